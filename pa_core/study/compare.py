"""One config on several schedules, or in any variants: trained one after the other, and read beside each other."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pa_core.config import TrainConfig
from pa_core.store.objects import ObjectStore
from pa_core.study.children import Observer, Outcome
from pa_core.study.config import CompareConfig
from pa_core.study.history import History, read_history, read_timeline
from pa_core.study.parent_run import ParentRun
from pa_core.study.pictures import reward_picture, timelines_picture
from pa_core.study.plan import Study, plan
from pa_core.study.running import run_study
from pa_core.study.tables import Row, comparison_rows, markdown
from pa_core.study.verdict import Finished, Verdict, choose_baseline, judge, unfinished

if TYPE_CHECKING:
    from matplotlib.figure import Figure

log = logging.getLogger(__name__)

SHOWN_ITERATIONS = 3


@dataclass(frozen=True)
class Compared:
    """What came of a comparison.

    Attributes:
        rows: the table. verdicts: one per run but the baseline. report: both and more, as Markdown.
        pictures: by name; none where MLflow could not be read.
    """

    study: Study
    mlflow_run_id: str
    outcomes: Sequence[Outcome]
    rows: Sequence[Row]
    verdicts: Sequence[Verdict]
    report: str
    pictures: Mapping[str, Figure]

    @property
    def failed(self) -> list[str]:
        """Runs without a result."""
        return [outcome.name for outcome in self.outcomes if outcome.state != "finished"]

    @property
    def headline(self) -> str:
        """In one line."""
        return "; ".join(
            verdict.headline + (f", {verdict.speed_up:.2f} times as fast" if verdict.speed_up is not None else "")
            for verdict in self.verdicts
        )

    def result(self) -> dict[str, object]:
        """As JSON values."""
        return {
            "name": self.study.name,
            "url": self.study.url,
            "mlflow_run_id": self.mlflow_run_id,
            "headline": self.headline,
            "failed": self.failed,
            "verdicts": [vars(verdict) for verdict in self.verdicts],
            "runs": [{**row, "url": one.child.url} for row, one in zip(self.rows, self.outcomes, strict=True)],
        }


def plan_comparison(config: TrainConfig, asked: CompareConfig, hint: str) -> Study:
    """The runs of a comparison. Raises :class:`ConfigError` before anything is written."""
    return plan("compare", asked.name, hint, config, asked.variants)


def compare(
    study: Study,
    observers: Sequence[Observer] = (),
    *,
    tags: Mapping[str, str] | None = None,
    opened: Callable[[ParentRun], None] = lambda parent: None,
) -> Compared:
    """Train the runs one after the other, since they would distort each other's times, and compare them.

    See :func:`run_study` for arguments and errors. A run that fails is part of the result.
    """

    def conclude(parent: ParentRun, outcomes: list[Outcome]) -> Compared:
        compared = conclusion(study, parent, outcomes)
        _publish(compared, parent)
        return compared

    return run_study(study, observers, conclude, tags=tags, opened=opened)


def conclusion(study: Study, parent: ParentRun, outcomes: Sequence[Outcome]) -> Compared:
    """Table, verdicts and pictures of what was trained."""
    finished = {one.name: _finished(parent, one) for one in outcomes if one.state == "finished"}
    baseline = choose_baseline(outcomes)
    verdicts = [
        judge(finished[baseline.name], finished[one.name])
        if baseline is not None and one.name in finished
        else unfinished(one, "nothing" if baseline is None else baseline.name)
        for one in outcomes
        if one is not baseline
    ]
    speed_ups: dict[str, float | None] = {one.name: one.speed_up for one in verdicts}
    if baseline is not None:
        speed_ups[baseline.name] = 1.0
    rows = comparison_rows(outcomes, speed_ups)
    report = _report(study, rows, verdicts)
    pictures = _pictures(study, finished)
    return Compared(study, parent.run_id, tuple(outcomes), rows, verdicts, report, pictures)


def _finished(parent: ParentRun, outcome: Outcome) -> Finished:
    history = History()
    if outcome.mlflow_run_id is not None:
        history = read_history(parent.client, outcome.mlflow_run_id)
    return Finished(outcome, history, ObjectStore.open(outcome.child.url))


def _report(study: Study, rows: Sequence[Row], verdicts: Sequence[Verdict]) -> str:
    lines = [f"# {study.name}", "", markdown(rows), ""]
    for verdict in verdicts:
        lines += [f"## {verdict.headline}", "", *(f"- {sentence}" for sentence in verdict.sentences), ""]
    lines.append(
        "speed-up: wall time of the iterations against that of the run whose speed-up is 1. bound: the most that "
        "overlap gives with a run's own times over the synchronous schedule. overlap: share of the shorter side's work "
        "done while the other side worked. idle: share of the wall time."
    )
    return "\n".join(lines)


def _pictures(study: Study, finished: Mapping[str, Finished]) -> dict[str, Figure]:
    histories = {name: one.history for name, one in finished.items() if one.history.reward}
    pictures = {}
    if histories:
        pictures["reward.png"] = reward_picture(histories, f"{study.name}: mean reward")
    timelines = {name: read_timeline(one.store, one.history, SHOWN_ITERATIONS) for name, one in finished.items()}
    timelines = {name: timeline for name, timeline in timelines.items() if timeline[1]}
    if timelines:
        title = f"{study.name}: the last iterations of each run, on one axis"
        pictures["timelines.png"] = timelines_picture(timelines, title)
    return pictures


def _publish(compared: Compared, parent: ParentRun) -> None:
    """The result in the parent run, and in the study's folder, where no outage loses it."""
    study = compared.study
    study.store.publish("report.md", compared.report.encode(), exclusive=False)
    study.store.publish("comparison.json", json.dumps(compared.result(), indent=2).encode(), exclusive=False)
    parent.table(compared.rows, "comparison.json")
    parent.text(compared.report, "report.md")
    parent.note(compared.report)
    for name, figure in compared.pictures.items():
        parent.figure(figure, name)
    for verdict in compared.verdicts:
        parent.tag(f"verdict.{verdict.name}", verdict.headline)
        if verdict.speed_up is not None:
            parent.metrics({f"speed_up/{verdict.name}": verdict.speed_up})
        if verdict.bound is not None:
            parent.metrics({f"speed_up/bound_of_{verdict.baseline}": verdict.bound})
