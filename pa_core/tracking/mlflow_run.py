"""One MLflow run per training run, written by its explicit id: MLflow's "active run" is a matter of each thread."""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tenacity import Retrying, retry_if_exception, stop_after_delay, wait_exponential

from pa_core.config import DataConfig, TrainConfig
from pa_core.errors import ConfigError, first_line
from pa_core.records import Group
from pa_core.tracking.connection import absolute_uri, experiment_id, is_passing, prepare_environment
from pa_core.tracking.description import data_source, flatten, run_tags
from pa_core.tracking.metrics import metric_key
from pa_core.tracking.models import LoggedModels
from pa_core.tracking.outbox import Outbox
from pa_core.tracking.timeline import Span

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from mlflow import MlflowClient

log = logging.getLogger(__name__)

Status = Literal["FINISHED", "FAILED", "KILLED"]

FINISH_TIMEOUT_S: dict[str, float] = {"FINISHED": 120.0, "FAILED": 15.0, "KILLED": 8.0}
DIGEST_LENGTH = 16  # MLflow takes 36 characters; 16 are told apart at a glance
TABLES_TAG = "mlflow.loggedArtifacts"
TABLES_IN_TAG = 60
# Migrations of a new database, and every retry of an outage that is told once anyway.
_CHATTY = ("alembic", "mlflow.store.db.utils", "mlflow.system_metrics", "urllib3.connectionpool")


class TrackedRun:
    """An MLflow run that training writes to.

    Everything after :meth:`start` is delivered by a background thread: a tracking server that is slow or away
    neither stops nor blocks training. What fails is kept and tried again; :meth:`finish` warns with a count of what
    never arrived.

    Attributes:
        run_id: the MLflow run.
        experiment_id: its experiment.
        uri: the tracking URI, absolute.
    """

    def __init__(self, client: MlflowClient, uri: str, run_id: str, experiment_id: str, run_name: str) -> None:
        self.run_id = run_id
        self.experiment_id = experiment_id
        self.uri = uri
        self._client = client
        self._outbox = Outbox(is_passing, self._restart_system_metrics)
        self._models = LoggedModels(client, self._outbox, run_id, experiment_id, run_name)
        self._tables: list[dict[str, str]] = []
        self._system_metrics: Any = None
        self._finished = False
        self._lock = threading.Lock()

    @classmethod
    def start(
        cls,
        config: TrainConfig,
        *,
        run_url: str,
        fingerprints: Mapping[str, str],
        versions: Mapping[str, str],
        run_name: str | None = None,
        resume_run_id: str | None = None,
    ) -> TrackedRun:
        """Create the run, or go on with ``resume_run_id``, and write what explains it.

        Args:
            config: the resolved configuration; params (dotted keys) and ``config.yaml``.
            run_url: the run's folder in the store.
            fingerprints: digests; ``data`` and ``evaluation`` become those of the data set inputs, all are tags.
            versions: package versions by name, as tags.
            run_name: name of the run; default ``config.run_name`` or the last part of ``run_url``.
            resume_run_id: an existing run; it becomes RUNNING again, and params that differ now are noted as tags.

        Raises:
            ConfigError: when the tracking store cannot be reached or used, or the run to resume is not there.
        """
        prepare_environment()
        for name in _CHATTY:
            logging.getLogger(name).setLevel(logging.ERROR)
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        uri = absolute_uri(config.tracking.uri)
        name = run_name or config.run_name or run_url.rstrip("/").rpartition("/")[2]
        tags = run_tags(config, run_url, fingerprints, versions)
        try:
            client = MlflowClient(tracking_uri=uri)
            if resume_run_id is None:
                experiment = experiment_id(client, uri, config.tracking.experiment)
                run = client.create_run(experiment, tags=tags, run_name=name)
            else:
                run = client.get_run(resume_run_id)
                client.update_run(resume_run_id, status="RUNNING")
        except (MlflowException, OSError) as error:
            raise _unreachable(config, resume_run_id, error) from error
        tracked = cls(client, uri, run.info.run_id, run.info.experiment_id, run.info.run_name)
        tracked._describe(config, fingerprints, tags, run.data if resume_run_id else None)
        tracked._start_system_metrics()
        return tracked

    @property
    def url(self) -> str | None:
        """Address of the run's page when there is a server; None for a local database."""
        if not self.uri.startswith(("http://", "https://")):
            return None
        return f"{self.uri.rstrip('/')}/#/experiments/{self.experiment_id}/runs/{self.run_id}"

    @property
    def open_command(self) -> str | None:
        """The command that shows a local run in a browser; None when there is a server already."""
        return None if self.url else f"mlflow ui --backend-store-uri {self.uri}"

    def log_iteration(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write an iteration's metrics in one batch; returns at once.

        Args:
            step: the iteration, the x-axis of every chart: also the policy version that generated. What tells how
                good that version is becomes a metric of its model too.
            metrics: values by name; characters that MLflow refuses become ``_``.
        """
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        batch = [Metric(metric_key(name), float(value), now, step) for name, value in metrics.items()]
        self._outbox.put(
            f"metrics of step {step}",
            lambda: self._client.log_batch(self.run_id, metrics=batch, synchronous=True),
        )
        self._models.note(step, batch)

    def log_trace(self, group: Group, advantages: Sequence[float], spans: Sequence[Span]) -> None:
        """Write what became of a trained group as a trace of the run; see :func:`~.group_trace.group_trace`."""
        from pa_core.tracking.group_trace import deliver, group_trace

        def write() -> None:
            trace = group_trace(group, advantages, spans, self.run_id, self.experiment_id)
            deliver(self.uri, trace, self._models.id_of(group.version))

        self._outbox.put(f"trace of group {group.id}", write)

    def add_model(self, version: int, params: Mapping[str, str]) -> None:
        """List a stored policy version among MLflow's models, once.

        Args:
            params: what to know of it, where its weights are for one; the version itself is added.
        """
        self._models.add(version, params)

    def unlisted(self, versions: Iterable[int]) -> list[int]:
        """Those of ``versions`` that :meth:`add_model` was not called for."""
        return [version for version in versions if version not in self._models]

    def keep_models(self, versions: Iterable[int]) -> None:
        """Have the models of other versions say that their weights are not stored any more."""
        self._models.keep(versions)

    def log_table(self, rows: Sequence[Mapping[str, Any]], name: str, step: int) -> None:
        """Write rows as ``tables/NAME/step_000010.json``, shown as a table among the artifacts.

        Columns are those of any row, in order of appearance; what a row lacks, NaN and infinities become null.
        """
        columns = list(dict.fromkeys(column for row in rows for column in row))
        data = [[_json_value(row.get(column)) for column in columns] for row in rows]
        path = f"tables/{name}/step_{step:06d}.json"
        self.log_text(json.dumps({"columns": columns, "data": data}, ensure_ascii=False), path)
        entry = {"path": path, "type": "table"}
        if entry not in self._tables:
            self._tables.append(entry)
        # The tag makes the artifact page draw a table; a tag holds 8,000 characters, so only the latest are listed.
        listed = json.dumps(self._tables[-TABLES_IN_TAG:])
        self._outbox.put("list of tables", lambda: self.set_tag_now(TABLES_TAG, listed), replaces=True)

    def log_text(self, text: str, path: str) -> None:
        """Write a text artifact, replacing what was there."""
        self._outbox.put(path, lambda: self._client.log_text(self.run_id, text, path), replaces=True)

    def log_dict(self, value: Mapping[str, Any], path: str) -> None:
        """Write a JSON or YAML artifact, by the ending of ``path``, replacing what was there."""
        copy = json.loads(json.dumps(value))
        self._outbox.put(path, lambda: self._client.log_dict(self.run_id, copy, path), replaces=True)

    def log_figure(self, figure: Figure, path: str) -> None:
        """Write a matplotlib figure, by the ending of ``path``; the figure must not be changed afterwards."""
        self._outbox.put(path, lambda: self._client.log_figure(self.run_id, figure, path), replaces=True)

    def set_tag(self, name: str, value: str) -> None:
        """Set a tag of the run."""
        self._outbox.put(f"tag {name}", lambda: self.set_tag_now(name, value), replaces=True)

    def set_tag_now(self, name: str, value: str) -> None:
        """Set a tag in the calling thread. Raises what MLflow raises."""
        self._client.set_tag(self.run_id, name, value, synchronous=True)

    def log_model_dir(self, folder: str | Path, *, version: int) -> bool:
        """Copy a model folder to the artifacts under ``model/``; it blocks, so that the folder may go afterwards.

        Args:
            folder: as written by ``save_pretrained``; ``model/`` loads with ``from_pretrained``.
            version: the policy version, whose model, if it is listed, says where this copy is.

        Returns:
            Whether it arrived; when not, also after two minutes of an outage, a warning says why.
        """
        attempts = Retrying(
            retry=retry_if_exception(lambda error: isinstance(error, Exception) and is_passing(error)),
            stop=stop_after_delay(FINISH_TIMEOUT_S["FINISHED"]),
            wait=wait_exponential(max=10),
            reraise=True,
        )
        try:
            attempts(self._client.log_artifacts, self.run_id, str(folder), "model")
        except Exception as error:  # as with every delivery: a finished training must not fail on its tracking
            log.warning("tracking: the model in %s was not delivered to MLflow: %s", folder, error)
            return False
        self._models.tag(version, {"model_folder": f"runs:/{self.run_id}/model"})
        return True

    def finish(self, status: Status, timeout_s: float | None = None) -> int:
        """Deliver what is left, stop system metrics and set the final status. Does nothing when called again.

        Args:
            status: FINISHED, FAILED, or KILLED for a run that was stopped from outside.
            timeout_s: seconds to wait; default long for FINISHED, which also sits out an outage, short for the others.

        Returns:
            How many deliveries never arrived; a warning names them.
        """
        with self._lock:
            if self._finished:
                return 0
            self._finished = True
        # Looked up when it is delivered: the outbox's thread is also the one that restarts the monitor.
        self._outbox.put("system metrics", lambda: self._system_metrics.finish())
        self._outbox.put(f"status {status}", lambda: self._client.set_terminated(self.run_id, status))
        patience = FINISH_TIMEOUT_S[status] if timeout_s is None else timeout_s
        lost = self._outbox.close(patience, patient=status == "FINISHED")
        if lost:
            shown = ", ".join(lost[:5]) + (", …" if len(lost) > 5 else "")
            log.warning("tracking: %d deliveries never reached MLflow at %s: %s", len(lost), self.uri, shown)
        return len(lost)

    def _describe(
        self, config: TrainConfig, fingerprints: Mapping[str, str], tags: Mapping[str, str], known: Any
    ) -> None:
        """Params, config file and data sets; on resume (``known`` is the run's data) only what changed."""
        from mlflow.entities import Param, RunTag

        tree = config.model_dump(mode="json")
        params = flatten(tree)
        if known is not None:
            old = known.params
            changed = {f"resumed.{key}": value for key, value in params.items() if old.get(key, value) != value}
            params = {key: value for key, value in params.items() if key not in old}
            self._tables = json.loads(known.tags.get(TABLES_TAG, "[]"))
            tags = {**tags, **changed, "resumed_at": datetime.now(UTC).isoformat(timespec="seconds")}
            self._batches([RunTag(key, value) for key, value in tags.items()], "tags")
        self._batches([Param(key, value) for key, value in params.items()], "params")
        self.log_dict(tree, "config.yaml" if known is None else "config_resumed.yaml")
        if known is None:
            self._outbox.put("data sets", lambda: self._log_data(config, fingerprints))

    def _batches(self, entities: list[Any], kind: Literal["params", "tags"]) -> None:
        """Hand over params or tags in batches of the 100 that MLflow takes at once."""
        for start in range(0, len(entities), 100):
            part: dict[str, Any] = {kind: entities[start : start + 100]}
            deliver = partial(self._client.log_batch, self.run_id, synchronous=True, **part)
            self._outbox.put(kind, deliver)

    def _log_data(self, config: TrainConfig, fingerprints: Mapping[str, str]) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag

        def as_input(data: DataConfig, digest: str, context: str) -> DatasetInput:
            name, kind, source = data_source(data)
            entity = Dataset(name=name, digest=digest[:DIGEST_LENGTH], source_type=kind, source=source)
            return DatasetInput(entity, [InputTag("mlflow.data.context", context)])

        inputs = []
        if "data" in fingerprints:
            inputs.append(as_input(config.data, fingerprints["data"], "training"))
        if "evaluation" in fingerprints:
            inputs.append(as_input(config.evaluation.data or config.data, fingerprints["evaluation"], "evaluation"))
        self._client.log_inputs(self.run_id, datasets=inputs)

    def _start_system_metrics(self) -> None:
        from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

        self._system_metrics = SystemMetricsMonitor(self.run_id, resume_logging=True, tracking_uri=self.uri)
        self._system_metrics.start()

    def _restart_system_metrics(self) -> None:
        """MLflow's monitor ends at the first failed call; begin anew when the server is back."""
        if self._finished:
            return
        self._system_metrics.finish()
        self._start_system_metrics()


def _unreachable(config: TrainConfig, resume_run_id: str | None, error: Exception) -> ConfigError:
    """What to tell the person when a run cannot begin."""
    cause = first_line(error)
    what = f" (run {resume_run_id})" if resume_run_id else ""
    return ConfigError(
        f"tracking.uri={config.tracking.uri!r}{what} cannot be used: {cause}. Start the MLflow server, or set "
        "tracking.uri=sqlite:///mlflow.db for a local database"
    )


def _json_value(value: Any) -> Any:
    """A table cell as JSON: NaN and infinities become null, numpy scalars plain numbers, the rest text."""
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, (str, int, float, bool)) else str(value)
