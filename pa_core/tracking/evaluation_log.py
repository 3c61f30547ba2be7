"""An evaluation in MLflow: in the run that the policy belongs to, or in one of its own."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pa_core.config import TrainConfig
from pa_core.errors import first_line
from pa_core.tracking.connection import absolute_uri, experiment_id, prepare_environment
from pa_core.tracking.description import flatten
from pa_core.tracking.metrics import metric_key
from pa_core.tracking.mlflow_run import TABLES_IN_TAG, TABLES_TAG
from pa_core.tracking.models import MODEL_METRICS, listed_model
from pa_core.tracking.origin import origin_tags

if TYPE_CHECKING:
    from mlflow import MlflowClient

log = logging.getLogger(__name__)

EXPERIMENT = "evaluation"
"""Experiment of evaluations that belong to no training run."""


@dataclass(frozen=True)
class EvaluationRecord:
    """What is logged.

    Attributes:
        version: policy version, the step of the metrics.
        metrics: values by name.
        report: the whole result, as a JSON artifact.
        rows: samples for the table.
        name: the set of problems; "" for the run's own held-out ones.
    """

    version: int
    metrics: Mapping[str, float]
    report: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]
    name: str


def log_evaluation(
    config: TrainConfig, record: EvaluationRecord, *, run_id: str | None, run_name: str, run_url: str
) -> str | None:
    """Write an evaluation; a server that is away costs the record there, not the evaluation.

    Args:
        run_id: the MLflow run of the training; None makes a run in the experiment ``evaluation``.
        run_name: name of a new run. run_url: its folder in the store.

    Returns:
        The MLflow run, or None where it could not be written; a warning says why.
    """
    prepare_environment()
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    uri = absolute_uri(config.tracking.uri)
    tags = {"run_url": run_url, "model": config.model.path, "engine": config.engine.kind, **origin_tags()}
    try:
        client = MlflowClient(tracking_uri=uri)
        if run_id is not None:
            _write(client, run_id, record)
            return run_id
        created: str = client.create_run(
            experiment_id(client, uri, EXPERIMENT), tags=tags, run_name=run_name
        ).info.run_id
        for key, value in flatten(config.model_dump(mode="json")).items():
            if key.split(".")[0] in ("model", "evaluation", "sampling", "rewards", "engine", "seed"):
                client.log_param(created, key, value)
        _write(client, created, record)
        client.set_terminated(created, "FINISHED")
        return created
    except (MlflowException, OSError) as error:
        cause = first_line(error)
        log.warning("tracking: the evaluation is in the store, but not in MLflow at %s: %s", uri, cause)
        return None


def _write(client: MlflowClient, run_id: str, record: EvaluationRecord) -> None:
    from mlflow.entities import Metric

    now = int(time.time() * 1000)
    run = client.get_run(run_id)
    model = listed_model(client, run.info.experiment_id, run_id, record.version)
    metrics = [
        Metric(key, value, now, record.version, model_id=model if MODEL_METRICS.fullmatch(key) else None)
        for key, value in ((metric_key(name), value) for name, value in record.metrics.items())
    ]
    client.log_batch(run_id, metrics=metrics, synchronous=True)
    folder = f"evaluation/{record.name}" if record.name else "evaluation"
    client.log_dict(run_id, dict(record.report), f"{folder}/step_{record.version:06d}.json")
    columns = list(record.rows[0]) if record.rows else []
    data = [[row[column] for column in columns] for row in record.rows]
    path = f"tables/{folder}/step_{record.version:06d}.json"
    client.log_text(run_id, json.dumps({"columns": columns, "data": data}, ensure_ascii=False), path)
    tables = json.loads(run.data.tags.get(TABLES_TAG, "[]"))
    entry = {"path": path, "type": "table"}
    listed = [*(table for table in tables if table != entry), entry]
    client.set_tag(run_id, TABLES_TAG, json.dumps(listed[-TABLES_IN_TAG:]))
