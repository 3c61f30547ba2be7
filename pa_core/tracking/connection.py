"""How MLflow is reached: addresses, patience, and where an experiment keeps its artifacts."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from pa_core.errors import ConfigError

if TYPE_CHECKING:
    from mlflow import MlflowClient

# A server that is away must not hold a call for the minutes of MLflow's defaults (7 retries, 120 s each); and the last
# line of stdout belongs to the command's own result.
ENVIRONMENT_DEFAULTS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
EXPERIMENT_TAGS = {
    "mlflow.experimentKind": "custom_model_development",
    "mlflow.note.content": "One research question. Every run is one training: compare their `reward/mean` and "
    "`eval/accuracy`; each run's description says how to read it.",
}
_PASSING_HTTP = (408, 429)


def prepare_environment() -> None:
    """Have MLflow give up on a server that is away within seconds, unless the environment says otherwise."""
    for name, value in ENVIRONMENT_DEFAULTS.items():
        os.environ.setdefault(name, value)


def absolute_uri(uri: str) -> str:
    """``uri`` with a relative SQLite path made absolute, so that the run can be found from any folder."""
    prefix = "sqlite:///"
    path = uri.removeprefix(prefix)
    if not uri.startswith(prefix) or path.startswith("/") or not path or path == ":memory:":
        return uri
    return prefix + str(Path(path).resolve())


def artifact_location(uri: str, experiment: str) -> str | None:
    """Where an experiment's artifacts go: beside a SQLite file, by absolute path; None leaves it to the server."""
    prefix = "sqlite:////"
    if not uri.startswith(prefix):
        return None
    folder = re.sub(r"[^\w.-]+", "_", experiment)
    return (Path("/" + unquote(uri.removeprefix(prefix)).partition("?")[0]).parent / "mlartifacts" / folder).as_uri()


def experiment_id(client: MlflowClient, uri: str, name: str) -> str:
    """Id of the experiment, created when it is new; another process may create it at the same moment.

    Raises:
        ConfigError: when it was deleted.
        MlflowException: when the store cannot be used.
    """
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(name)
    if found is None:
        try:
            created: str = client.create_experiment(name, artifact_location(uri, name), EXPERIMENT_TAGS)
            return created
        except MlflowException as error:
            found = client.get_experiment_by_name(name)
            if found is None:
                raise error
    if found.lifecycle_stage == "deleted":
        raise ConfigError(
            f"tracking.experiment={name!r} was deleted; restore it with "
            f"`mlflow experiments restore --experiment-id {found.experiment_id}` or choose another name"
        )
    existing: str = found.experiment_id
    return existing


def is_passing(error: Exception) -> bool:
    """Whether trying again can help: the network, the server's own errors, a locked database, a full disk."""
    from mlflow.exceptions import MlflowException

    if isinstance(error, MlflowException):
        status = error.get_http_status_code()
        return status >= 500 or status in _PASSING_HTTP
    return isinstance(error, OSError)
