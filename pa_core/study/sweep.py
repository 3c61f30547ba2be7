"""A grid or list of runs, so many at a time; the best by a metric goes into MLflow's model registry."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pa_core.config import TrainConfig
from pa_core.errors import ConfigError, first_line
from pa_core.study.children import Observer, Outcome
from pa_core.study.config import SweepConfig
from pa_core.study.parent_run import ParentRun
from pa_core.study.pictures import sweep_picture
from pa_core.study.plan import Study, plan
from pa_core.study.registry import ALIAS, Registered, register_best
from pa_core.study.running import run_study
from pa_core.study.tables import Row, markdown, sweep_rows, swept
from pa_core.tracking.metrics import check_documented

if TYPE_CHECKING:
    from matplotlib.figure import Figure

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Swept:
    """What came of a sweep.

    Attributes:
        rows: the table. values: the metric of each finished run that has it. best: name of the best run.
        registered: the best in the model registry; None when there is none, or ``problem`` says why not.
    """

    study: Study
    asked: SweepConfig
    mlflow_run_id: str
    outcomes: Sequence[Outcome]
    rows: Sequence[Row]
    values: Mapping[str, float]
    best: str | None
    registered: Registered | None
    problem: str
    picture: Figure | None

    @property
    def failed(self) -> list[str]:
        """Runs without a result."""
        return [outcome.name for outcome in self.outcomes if outcome.state != "finished"]

    @property
    def headline(self) -> str:
        """In one line."""
        if self.best is None:
            parts = [f"no best: {self.problem}"]
        else:
            parts = [f"best: {self.best}, {self.asked.metric} {self.values[self.best]:.4g}"]
        if self.failed:
            parts.append(f"{len(self.failed)} of {len(self.outcomes)} runs without a result: {', '.join(self.failed)}")
        return "; ".join(parts)

    @property
    def report(self) -> str:
        """Table and words, as Markdown."""
        lines = [f"# {self.study.name}", "", self.headline, "", markdown(self.rows), ""]
        if self.registered is not None:
            lines.append(
                f"Registered as `models:/{self.registered.name}@{ALIAS}` (version {self.registered.version}); its "
                f"weights are in `{self.registered.weights}`."
            )
        elif self.best is not None:
            lines.append(f"Not registered: {self.problem}")
        return "\n".join(lines)

    def result(self) -> dict[str, object]:
        """As JSON values."""
        return {
            "name": self.study.name,
            "url": self.study.url,
            "mlflow_run_id": self.mlflow_run_id,
            "headline": self.headline,
            "metric": self.asked.metric,
            "mode": self.asked.mode,
            "best": self.best,
            "registered": None if self.registered is None else vars(self.registered),
            "problem": self.problem,
            "failed": self.failed,
            "runs": [{**row, "url": one.child.url} for row, one in zip(self.rows, self.outcomes, strict=True)],
        }


def plan_sweep(config: TrainConfig, asked: SweepConfig, hint: str) -> Study:
    """The runs of a sweep. Raises :class:`ConfigError` before anything is written, also for a metric nobody logs."""
    try:
        check_documented([asked.metric])
    except ValueError:
        raise ConfigError(
            f"metric={asked.metric!r} is logged by no run; choose eval/accuracy, reward/mean or another metric of the "
            "run's description in MLflow"
        ) from None
    study = plan("sweep", asked.name, hint, config, asked.variants())
    for child in study.children:
        evaluation, held_out = child.config.evaluation, child.config.data.held_out
        if asked.metric.startswith("eval/") and not (evaluation.enabled and (evaluation.data or held_out)):
            raise ConfigError(
                f"metric={asked.metric}: {child.name} evaluates nothing; set data.held_out, 0.1 for example, and "
                "evaluation.enabled=true, or metric=reward/mean"
            )
    return study


def sweep(
    study: Study,
    asked: SweepConfig,
    observers: Sequence[Observer] = (),
    *,
    tags: Mapping[str, str] | None = None,
    opened: Callable[[ParentRun], None] = lambda parent: None,
) -> Swept:
    """Train the runs that are missing and register the best of all.

    See :func:`run_study` for arguments and errors. A run that fails is part of the result.
    """

    def conclude(parent: ParentRun, outcomes: list[Outcome]) -> Swept:
        found = conclusion(study, asked, parent, outcomes)
        _publish(found, parent)
        return found

    return run_study(
        study,
        observers,
        conclude,
        concurrency=asked.concurrency,
        devices=asked.devices,
        tags=tags,
        opened=opened,
    )


def conclusion(study: Study, asked: SweepConfig, parent: ParentRun, outcomes: Sequence[Outcome]) -> Swept:
    """Find the best, register it, make table and picture."""
    values = _values(parent, asked.metric, outcomes)
    best = choose_best(values, asked.mode)
    registered, problem = None, ""
    if best is None:
        problem = "no run finished" if not _finished(outcomes) else f"no finished run has logged {asked.metric}"
    else:
        winner = next(one for one in outcomes if one.name == best)
        registered, problem = _register(parent, asked.model_name or study.name, winner, asked.metric, values[best])
    rows = sweep_rows(outcomes, asked.metric, values, best)
    picture = _picture(study, asked.metric, outcomes, values, best)
    return Swept(study, asked, parent.run_id, tuple(outcomes), rows, values, best, registered, problem, picture)


def choose_best(values: Mapping[str, float], mode: str) -> str | None:
    """The run with the largest or smallest value; the first of equals; NaN never wins."""
    known = {name: value for name, value in values.items() if not math.isnan(value)}
    if not known:
        return None
    return (max if mode == "max" else min)(known, key=lambda name: known[name])


def _finished(outcomes: Sequence[Outcome]) -> list[Outcome]:
    return [one for one in outcomes if one.state == "finished" and one.mlflow_run_id is not None]


def _values(parent: ParentRun, metric: str, outcomes: Sequence[Outcome]) -> dict[str, float]:
    """The metric's last value by finished run."""
    found = {one.name: parent.client.get_run(one.mlflow_run_id).data.metrics.get(metric) for one in _finished(outcomes)}
    return {name: float(value) for name, value in found.items() if value is not None}


def _register(
    parent: ParentRun, name: str, winner: Outcome, metric: str, value: float
) -> tuple[Registered | None, str]:
    """The registered version, or why there is none: hours of training must not end in an error for that."""
    from mlflow.exceptions import MlflowException

    try:
        return register_best(parent.client, name, winner, metric, value), ""
    except MlflowException as error:
        problem = f"MLflow's model registry refused it: {first_line(error)}"
        log.warning("%s", problem)
        return None, problem


def _picture(
    study: Study, metric: str, outcomes: Sequence[Outcome], values: Mapping[str, float], best: str | None
) -> Figure | None:
    shown = [one for one in outcomes if one.name in values]
    points = [(swept(one), values[one.name]) for one in shown]
    keys = list(dict.fromkeys(key for changed, _ in points for key in changed))
    if not keys:
        return None
    place = next((place for place, one in enumerate(shown) if one.name == best), None)
    return sweep_picture(points, keys, metric, place, study.name)


def _publish(found: Swept, parent: ParentRun) -> None:
    """The result in the parent run, and in the study's folder, where no outage loses it."""
    found.study.store.publish("report.md", found.report.encode(), exclusive=False)
    found.study.store.publish("sweep.json", json.dumps(found.result(), indent=2).encode(), exclusive=False)
    parent.table(found.rows, "sweep.json")
    parent.text(found.report, "report.md")
    parent.note(found.report)
    parent.tag("failed", ", ".join(found.failed) or "none")
    if found.picture is not None:
        parent.figure(found.picture, "sweep.png")
    if found.best is not None:
        parent.tag("best", found.best)
        parent.tag("best_value", f"{found.asked.metric} = {found.values[found.best]:.6g}")
