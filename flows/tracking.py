"""The MLflow run as seen from a flow: its page, its link back, and its end when the trainer cannot see to it."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from pa_core.errors import first_line
from pa_core.tracking.connection import absolute_uri, prepare_environment
from pa_core.tracking.origin import FLOW_RUN_TAG

if TYPE_CHECKING:
    from mlflow import MlflowClient

log = logging.getLogger(__name__)


def mlflow_ui(tracking_uri: str) -> str:
    """Address of the MLflow pages: the tracking server itself, or for a database ``PA_MLFLOW_UI``.

    Where people reach that server at another address than programs do, ``PA_MLFLOW_PUBLIC_URL`` names it.
    """
    if tracking_uri.startswith(("http://", "https://")):
        return (os.environ.get("PA_MLFLOW_PUBLIC_URL") or tracking_uri).rstrip("/")
    return os.environ.get("PA_MLFLOW_UI", "http://127.0.0.1:5000").rstrip("/")


def _client(tracking_uri: str) -> MlflowClient:
    prepare_environment()
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=tracking_uri)


def run_page(tracking_uri: str, run_id: str) -> str:
    """Address of the run's page. Raises ``MlflowException`` when there is no such run."""
    return page_of(tracking_uri, _client(tracking_uri).get_run(run_id).info.experiment_id, run_id)


def page_of(tracking_uri: str, experiment_id: str, run_id: str) -> str:
    """Address of the page of a run whose experiment is known."""
    return f"{mlflow_ui(tracking_uri)}/#/experiments/{experiment_id}/runs/{run_id}"


def tag_flow_run(tracking_uri: str, run_id: str, flow_run_id: str, flow_run_url: str) -> None:
    """Note on the MLflow run which flow run it belongs to."""
    client = _client(tracking_uri)
    client.set_tag(run_id, FLOW_RUN_TAG, flow_run_id)
    client.set_tag(run_id, "prefect.flow_run_url", flow_run_url)


def end_run(tracking_uri: str, run_id: str, status: str) -> bool:
    """Give the run its final status unless it has one already; says whether it did.

    Without MLflow it does not, with a warning: what else a flow has to do at its end is worth more.
    """
    from mlflow.exceptions import MlflowException

    try:
        client = _client(tracking_uri)
        if client.get_run(run_id).info.status != "RUNNING":
            return False
        client.set_terminated(run_id, status)
    except MlflowException as error:
        log.warning("MLflow run %s was not marked %s: %s", run_id, status, first_line(error))
        return False
    return True


def runs_of_flow_run(tracking_uri: str, experiment: str, flow_run_id: str) -> list[str]:
    """Ids of the MLflow runs that carry the flow run's tag."""
    client = _client(tracking_uri)
    found = client.get_experiment_by_name(experiment)
    if found is None:
        return []
    runs = client.search_runs([found.experiment_id], f"tags.`{FLOW_RUN_TAG}` = '{flow_run_id}'")
    return [run.info.run_id for run in runs]


def running_runs(tracking_uri: str) -> list[tuple[str, dict[str, str]]]:
    """Id and tags of the runs that a flow started and that have not ended; none, with a warning, without MLflow."""
    address = absolute_uri(tracking_uri)
    if address.startswith("sqlite:///") and not Path(address.removeprefix("sqlite:///")).exists():
        return []  # asking would create it
    prepare_environment()
    from mlflow.exceptions import MlflowException

    try:
        client = _client(address)
        experiments = [one.experiment_id for one in client.search_experiments()]
        runs = client.search_runs(experiments, "attributes.status = 'RUNNING'") if experiments else []
    except MlflowException as error:
        log.warning("%s: its runs cannot be read: %s", tracking_uri, first_line(error))
        return []
    return [(run.info.run_id, dict(run.data.tags)) for run in runs if FLOW_RUN_TAG in run.data.tags]


def metric_history(tracking_uri: str, run_id: str, key: str) -> list[tuple[int, float]]:
    """``(step, value)`` of a metric in order of steps; none, with a warning, without MLflow."""
    from mlflow.exceptions import MlflowException

    try:
        history = _client(tracking_uri).get_metric_history(run_id, key)
    except MlflowException as error:
        log.warning("the history of %s cannot be read: %s", key, first_line(error))
        return []
    return sorted((metric.step, metric.value) for metric in history)
