"""The MLflow run as seen from a flow: its page, its link back, and its end when the trainer cannot see to it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlflow import MlflowClient

FLOW_RUN_TAG = "prefect.flow_run_id"


def mlflow_ui(tracking_uri: str) -> str:
    """Address of the MLflow pages: the tracking server itself, or for a database ``PA_MLFLOW_UI``."""
    if tracking_uri.startswith(("http://", "https://")):
        return tracking_uri.rstrip("/")
    return os.environ.get("PA_MLFLOW_UI", "http://127.0.0.1:5000").rstrip("/")


def _client(tracking_uri: str) -> MlflowClient:
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=tracking_uri)


def run_page(tracking_uri: str, run_id: str) -> str:
    """Address of the run's page. Raises ``MlflowException`` when there is no such run."""
    experiment = _client(tracking_uri).get_run(run_id).info.experiment_id
    return f"{mlflow_ui(tracking_uri)}/#/experiments/{experiment}/runs/{run_id}"


def tag_flow_run(tracking_uri: str, run_id: str, flow_run_id: str, flow_run_url: str) -> None:
    """Note on the MLflow run which flow run it belongs to."""
    client = _client(tracking_uri)
    client.set_tag(run_id, FLOW_RUN_TAG, flow_run_id)
    client.set_tag(run_id, "prefect.flow_run_url", flow_run_url)


def end_run(tracking_uri: str, run_id: str, status: str) -> bool:
    """Give the run its final status unless it has one already; says whether it did."""
    client = _client(tracking_uri)
    if client.get_run(run_id).info.status != "RUNNING":
        return False
    client.set_terminated(run_id, status)
    return True


def runs_of_flow_run(tracking_uri: str, experiment: str, flow_run_id: str) -> list[str]:
    """Ids of the MLflow runs that carry the flow run's tag."""
    client = _client(tracking_uri)
    found = client.get_experiment_by_name(experiment)
    if found is None:
        return []
    runs = client.search_runs([found.experiment_id], f"tags.`{FLOW_RUN_TAG}` = '{flow_run_id}'")
    return [run.info.run_id for run in runs]


def metric_history(tracking_uri: str, run_id: str, key: str) -> list[tuple[int, float]]:
    """``(step, value)`` of a metric in order of steps."""
    history = _client(tracking_uri).get_metric_history(run_id, key)
    return sorted((metric.step, metric.value) for metric in history)
