"""The best run of a sweep in MLflow's model registry; its weights stay in the store.

A registered version needs a place that the tracking server accepts. A server refuses a local folder outside of its own
artifacts, and a database looks up ``models:/`` addresses by the process's global tracking URI. What both take is the
artifact location of a logged model: the run's own for that policy version, or one made here that has no files. The
version's tag ``uri`` and its description lead to the weights.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pa_core.store.versions import version_name
from pa_core.study.children import Outcome

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import LoggedModel
    from mlflow.entities.model_registry import ModelVersion

ALIAS = "best"


@dataclass(frozen=True)
class Registered:
    """A version of a registered model: its name, its number, and where its weights are."""

    name: str
    version: int
    weights: str


def weights_url(outcome: Outcome) -> str:
    """Where a finished run's final weights are in the store."""
    return f"{outcome.child.url}/weights/{version_name(int(outcome.summary['iterations']))}"


def register_best(client: MlflowClient, name: str, outcome: Outcome, metric: str, value: float) -> Registered:
    """Make the run's final version the one that ``models:/NAME@best`` is; registered once, however often it is asked.

    Raises:
        MlflowException: the registry refuses or is away.
    """
    assert outcome.mlflow_run_id is not None
    _ensure_model(client, name)
    weights = weights_url(outcome)
    found = [
        version
        for version in client.search_model_versions(f"name='{name}'")
        if version.run_id == outcome.mlflow_run_id and version.tags.get("uri") == weights
    ]
    version = found[0] if found else _register(client, name, outcome, weights, metric, value)
    client.set_registered_model_alias(name, ALIAS, version.version)
    return Registered(name, int(version.version), weights)


def _register(
    client: MlflowClient, name: str, outcome: Outcome, weights: str, metric: str, value: float
) -> ModelVersion:
    model = _logged_model(client, outcome, weights)
    return client.create_model_version(
        name,
        model.artifact_location,
        run_id=outcome.mlflow_run_id,
        model_id=model.model_id,
        tags={"uri": weights, "metric": metric, "value": repr(value), "weights_sha256": _digest(outcome)},
        description=f"Final version of `{outcome.child.config.run_name}`, the best of its sweep by `{metric}` = "
        f"{value:.4g}. Weights: `{weights}`.",
    )


def _digest(outcome: Outcome) -> str:
    return str(outcome.summary.get("weights_sha256") or "")


def _ensure_model(client: MlflowClient, name: str) -> None:
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise


def _logged_model(client: MlflowClient, outcome: Outcome, weights: str) -> LoggedModel:
    """The run's own logged model of its final version, or else a new one."""
    from mlflow.entities import LoggedModelOutput, LoggedModelStatus

    run = client.get_run(outcome.mlflow_run_id)
    final = int(outcome.summary["iterations"])
    own = client.search_logged_models([run.info.experiment_id], filter_string=f"source_run_id='{run.info.run_id}'")
    for model in own:
        if model.params.get("policy_version") == str(final):
            return model
    model = client.create_logged_model(
        run.info.experiment_id,
        name=re.sub(r"[/:.%\"']+", "-", f"{run.info.run_name}-{version_name(final)}"),
        source_run_id=run.info.run_id,
        model_type="transformers",
        tags={"uri": weights, "mlflow.model.isExternal": "true"},
        params={"base_model": outcome.child.config.model.path, "policy_version": str(final)},
    )
    client.log_outputs(run.info.run_id, [LoggedModelOutput(model.model_id, step=final)])
    return client.finalize_logged_model(model.model_id, LoggedModelStatus.READY)
