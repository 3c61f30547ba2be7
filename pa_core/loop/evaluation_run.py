"""One evaluation from beginning to end: ``pa eval`` and the ``evaluate`` flow."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from pa_core.data.sources import source_name
from pa_core.errors import StoreError, UserError
from pa_core.evaluation.request import EvaluationRequest
from pa_core.evaluation.store import EvaluationStore, shown_rows
from pa_core.loop.evaluation import Evaluation, Show
from pa_core.loop.evaluation_engine import EvaluationEngine, engine_alone
from pa_core.loop.evaluation_target import Target, find_target
from pa_core.loop.run import Run
from pa_core.loop.services import describing_files
from pa_core.model.loading import load_policy
from pa_core.store.weights import WeightStore
from pa_core.tracking.evaluation_log import EvaluationRecord, log_evaluation

log = logging.getLogger(__name__)

TABLE_ROWS = 1000
"""Rows of the table in MLflow, which a browser has to draw; the Parquet file in the store has all of them."""


@dataclass(frozen=True)
class Outcome:
    """An evaluation that is over.

    Attributes:
        found: its result (:class:`pa_core.evaluation.result.EvaluationResult`) as JSON, with run_url, data, name,
            model, engine, samples_url, mlflow_run_id and mlflow_uri.
        table: its samples (:mod:`pa_core.evaluation.store`).
    """

    found: dict[str, Any]
    table: pa.Table


def evaluate(request: EvaluationRequest, show: Show = lambda done, total: None) -> Outcome:
    """Replicas up, one version loaded, problems answered and scored, results kept and logged.

    Args:
        show: told how many of how many problems are done, in the calling thread.

    Raises:
        UserError: what was asked for is not there, or replicas or rewards failed. Nothing is left behind then of a
            run that was made for this evaluation.
    """
    target = find_target(request)
    try:
        evaluation = _measure(target, show)
    except UserError:
        if target.fresh:
            target.run.store.delete("")
        raise
    return _keep(target, evaluation)


def _measure(target: Target, show: Show) -> Evaluation:
    run = target.run
    engine = EvaluationEngine(run, engine_alone(run.config), run.log_folder / "evaluation")
    if target.fresh:
        _publish_untrained(run)
        log.info("evaluating %s on %d problems", run.config.model.path, len(engine.problems))
    with engine:
        version = _version(target)
        if not target.fresh:
            log.info("evaluating version %d of %s on %d problems", version, run.url, len(engine.problems))
        evaluation = engine.evaluate(version, show)
    if target.fresh:
        run.store.delete("weights")  # they are the model's, which stays where it is
    return evaluation


def _version(target: Target) -> int:
    """The version to evaluate, chosen late: a run in training goes on while replicas start, and keeps few versions."""
    version = WeightStore(target.run.store).latest() if target.version is None else target.version
    if version is None:
        raise StoreError(f"{target.run.url} has no published version any more")
    return version


def _publish_untrained(run: Run) -> None:
    """Make the model itself version 0, for replicas to load as they load any version."""
    model = load_policy(run.config.model)
    WeightStore(run.store).publish(0, model.model.state_dict(), describing_files(model))


def _keep(target: Target, evaluation: Evaluation) -> Outcome:
    """Results into the store and into MLflow."""
    run, result = target.run, evaluation.result
    samples_url = EvaluationStore(run.store, target.name).write(result, evaluation.table)
    prefix = "eval" if target.name is None else f"eval/{target.name}"
    found = result.model_dump(mode="json") | {
        "run_url": run.url,
        "data": source_name(run.config.evaluation.data or run.config.data),
        "name": target.name or "held_out",
        "model": run.config.model.path,
        "engine": run.config.engine.kind,
        "samples_url": samples_url,
    }
    record = EvaluationRecord(
        result.version,
        result.metrics(prefix),
        found,
        shown_rows(evaluation.table, TABLE_ROWS),
        target.name or "",
    )
    facts = {} if target.fresh else run.facts()
    run_id = log_evaluation(run.config, record, run_id=facts.get("mlflow_run_id"), run_name=run.name, run_url=run.url)
    if target.fresh:
        run.describe(mlflow_run_id=run_id)
    found |= {"mlflow_run_id": run_id, "mlflow_uri": run.config.tracking.uri}
    return Outcome(found, evaluation.table)


def report(found: dict[str, Any]) -> str:
    """An evaluation for people."""
    k = found["samples_per_problem"]
    lines = [
        f"version {found['version']} of {found['run_url']} ({found['model']}, {found['engine']} engine)",
        f"  problems           {found['problems']} x {k} samples of {found['name']} ({found['data']}), "
        f"temperature {found['temperature']:g}, metric {found['metric']}",
        f"  accuracy           {found['accuracy']:.3f} ± {found['ci95']:.3f} (95 %)",
    ]
    for name, score in found["scores"].items():
        label = name.replace("_at_k", f"_at_{k}")
        lines.append(f"  {label:<18} {score['value']:.3f}  [{score['low']:.3f}, {score['high']:.3f}]")
    lines += [
        f"  responses          {found['response_length']:.1f} tokens on average, {found['truncated_share']:.1%} cut at "
        f"{found['max_tokens']}",
        f"  unscored           {found['unscored']} of {found['samples']} samples{_causes(found)}",
        f"  samples            {found['samples_url']}",
        f"  MLflow run         {found['mlflow_run_id'] or 'not written'}",
    ]
    return "\n".join(lines)


def _causes(found: dict[str, Any]) -> str:
    causes = found["unscored_by_cause"]
    return "" if not causes else " (" + ", ".join(f"{count} x {cause}" for cause, count in causes.items()) + ")"
