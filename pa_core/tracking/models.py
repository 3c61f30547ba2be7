"""A run's checkpoints among MLflow's models: their weights stay in the store, their figures can be compared.

MLflow calls a model whose files are elsewhere external. Its params say where they are; its metrics are those that the
run logged at the model's version.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from pa_core.tracking.outbox import Outbox

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import LoggedModel, Metric

MODEL_TYPE = "policy"
MODEL_METRICS = re.compile(r"reward/mean|eval/([^/]+/)?(accuracy|pass_at_1|maj_at_k)")
STORED_TAG = "stored"


def listed_model(client: MlflowClient, experiment_id: str, run_id: str, version: int) -> str | None:
    """Id of the model that a run's version is listed as, or None where it is not."""
    same = f"source_run_id = '{run_id}' AND params.policy_version = '{version}'"
    found = client.search_logged_models([experiment_id], same)
    return found[0].model_id if found else None


class LoggedModels:
    """The logged models of one run, by policy version. Everything is delivered by ``outbox``, in its thread.

    Args:
        run_name: models are called after it, ``NAME-v000012``.
    """

    def __init__(self, client: MlflowClient, outbox: Outbox, run_id: str, experiment_id: str, run_name: str) -> None:
        self._client = client
        self._outbox = outbox
        self._run_id = run_id
        self._experiment_id = experiment_id
        self._run_name = re.sub(r"[/:.%\"']+", "-", run_name or "run")  # what MLflow refuses in a model's name
        self._params: dict[int, dict[str, str]] = {}
        self._gone: set[int] = set()
        self._waiting: dict[int, list[Metric]] = {}
        self._ids: dict[int, str] = {}  # the outbox's thread alone writes it

    def __contains__(self, version: int) -> bool:
        return version in self._params

    def add(self, version: int, params: Mapping[str, str]) -> None:
        """List a stored version, once; metrics that came before it join it."""
        if version in self._params:
            return
        self._params[version] = {"policy_version": str(version), **params}
        self._outbox.put(f"model of version {version}", lambda: self._ensure(version))
        self._attach(version, self._waiting.pop(version, []))

    def note(self, version: int, metrics: Sequence[Metric]) -> None:
        """Give the model of ``version`` those of the run's metrics at that step that are about the model."""
        chosen = [metric for metric in metrics if MODEL_METRICS.fullmatch(metric.key)]
        if version in self._params:
            self._attach(version, chosen)
        elif chosen:
            # A version is listed right after it was made or never, so older ones wait in vain.
            self._waiting = {known: found for known, found in self._waiting.items() if known >= version - 1}
            self._waiting.setdefault(version, []).extend(chosen)

    def keep(self, versions: Iterable[int]) -> None:
        """Mark the listed models of all other versions as no longer stored."""
        for version in self._params.keys() - set(versions) - self._gone:
            self._gone.add(version)
            self.tag(version, {STORED_TAG: "false"})

    def tag(self, version: int, tags: Mapping[str, str]) -> None:
        """Set tags of a listed model."""
        self._outbox.put(
            f"tags of model {version}",
            lambda: self._client.set_logged_model_tags(self._ensure(version), dict(tags)),
        )

    def id_of(self, version: int) -> str | None:
        """The model's id, or None while MLflow has no such model."""
        return self._ids.get(version)

    def _attach(self, version: int, metrics: Sequence[Metric]) -> None:
        if metrics:
            self._outbox.put(f"metrics of model {version}", partial(self._log, version, metrics))

    def _log(self, version: int, metrics: Sequence[Metric]) -> None:
        """Log the very points that the run has once more, as the model's; the run keeps one of each."""
        from mlflow.entities import Metric

        model_id = self._ensure(version)
        batch = [Metric(one.key, one.value, one.timestamp, one.step, model_id=model_id) for one in metrics]
        self._client.log_batch(self._run_id, metrics=batch, synchronous=True)

    def _ensure(self, version: int) -> str:
        """The id of the version's model, which is made where there is none: by name, so that a repetition finds it."""
        from mlflow.entities import LoggedModelStatus

        if version in self._ids:
            return self._ids[version]
        name = f"{self._run_name}-v{version:06d}"
        same = f"source_run_id = '{self._run_id}' AND name = '{name}'"
        found = self._client.search_logged_models([self._experiment_id], same)
        model = found[0] if found else self._create(name, version)
        if model.status != LoggedModelStatus.READY:
            self._link(model, version)
            self._client.finalize_logged_model(model.model_id, LoggedModelStatus.READY)
        self._ids[version] = model.model_id
        return self._ids[version]

    def _create(self, name: str, version: int) -> LoggedModel:
        from mlflow.utils.mlflow_tags import MLFLOW_MODEL_IS_EXTERNAL

        return self._client.create_logged_model(
            self._experiment_id,
            name=name,
            source_run_id=self._run_id,
            model_type=MODEL_TYPE,
            tags={MLFLOW_MODEL_IS_EXTERNAL: "true", STORED_TAG: "true"},
            params=self._params[version],
        )

    def _link(self, model: LoggedModel, version: int) -> None:
        """Have the run name the model among its outputs, once."""
        from mlflow.entities import LoggedModelOutput

        outputs = self._client.get_run(self._run_id).outputs
        if model.model_id not in [output.model_id for output in outputs.model_outputs]:
            self._client.log_outputs(self._run_id, [LoggedModelOutput(model.model_id, step=version)])
