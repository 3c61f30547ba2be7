"""One MLflow run per benchmark: settings as params, both sides and their ratios as metrics, the table as artifact."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from pa_core import __version__
from pa_core.errors import ConfigError, first_line
from pa_core.tracking.connection import absolute_uri, artifact_location, prepare_environment
from pa_core.tracking.description import flatten
from pa_core.tracking.metrics import metric_key
from pa_core.tracking.origin import origin_tags

log = logging.getLogger(__name__)

EXPERIMENT = "benchmarks"
OFF = "off"
_NOTE = (
    "Measurements by `pa bench`. Every run has both sides of each ratio as metrics, `table.txt` as printed, and "
    "`result.json` with every single time."
)
_PACKAGES = ("torch", "transformers")


def flat_numbers(tree: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of a result by path, ``seconds/ours``; lists, texts and truth values are left out."""
    found: dict[str, float] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            found |= flat_numbers(value, f"{prefix}{name}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            found[f"{prefix}{name}"] = float(value)
    return found


class TrackedBenchmark:
    """The MLflow run of one benchmark; a benchmark that raises is FAILED, one that is interrupted KILLED.

    MLflow is tried before anything is measured. What it does not take afterwards is a warning: the result is printed
    anyway.

    Args:
        name: the benchmark, as in ``pa bench NAME``.
        settings: what was asked for; becomes params.
        uri: tracking URI; ``off`` logs nothing.

    Raises:
        ConfigError: MLflow cannot be used; names the option.
    """

    def __init__(self, name: str, settings: Mapping[str, Any], uri: str) -> None:
        self.name = name
        self.run_id: str | None = None
        if uri == OFF:
            return
        prepare_environment()
        for chatty in ("alembic", "mlflow.store.db.utils", "urllib3.connectionpool"):
            logging.getLogger(chatty).setLevel(logging.ERROR)
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        address = absolute_uri(uri)
        try:
            self._client = MlflowClient(address)
            found = self._client.get_experiment_by_name(EXPERIMENT)
            experiment = found.experiment_id if found is not None else self._new_experiment(address)
            tags = {"benchmark": name, **_environment()}
            self.run_id = self._client.create_run(experiment, tags=tags, run_name=_run_name(name)).info.run_id
            for key, value in flatten(dict(settings)).items():
                self._client.log_param(self.run_id, key, value)
        except (MlflowException, OSError) as error:
            raise ConfigError(
                f"--tracking-uri {uri}: MLflow cannot be used ({first_line(error)}); start the "
                f"server, name another store such as sqlite:///mlflow.db, or turn it off with --tracking-uri {OFF}"
            ) from error

    def _new_experiment(self, address: str) -> str:
        tags = {"mlflow.note.content": _NOTE}
        created: str = self._client.create_experiment(EXPERIMENT, artifact_location(address, EXPERIMENT), tags)
        return created

    def row(self, values: Mapping[str, Any], prefix: str = "") -> None:
        """Log the numbers of a part of the result as soon as it is there; ``prefix`` tells parts apart."""
        self._deliver("metrics", lambda run_id: self._log_numbers(run_id, flat_numbers(values, prefix)))

    def result(self, result: Mapping[str, Any], text: str, rows: Sequence[Mapping[str, Any]] = ()) -> None:
        """Log the whole: its numbers, the printed table, everything as JSON, and ``rows`` as an MLflow table."""
        self.row(result)
        self._deliver("table.txt", lambda run_id: self._client.log_text(run_id, text, "table.txt"))
        self._deliver("result.json", lambda run_id: self._client.log_dict(run_id, dict(result), "result.json"))
        if rows:
            flat = [flat_numbers(row) for row in rows]
            columns = list(dict.fromkeys(column for row in flat for column in row))
            data = {column: [row.get(column) for row in flat] for column in columns}
            self._deliver("table.json", lambda run_id: self._client.log_table(run_id, data, "table.json"))

    def _log_numbers(self, run_id: str, numbers: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(metric_key(key), value, now, 0) for key, value in numbers.items()]
        for start in range(0, len(metrics), 1000):
            self._client.log_batch(run_id, metrics=metrics[start : start + 1000])

    def _deliver(self, what: str, deliver: Callable[[str], Any]) -> None:
        if self.run_id is None:
            return
        try:
            deliver(self.run_id)
        except Exception as error:  # hours of measuring must not be lost for want of a tracking server
            log.warning("%s of the benchmark did not reach MLflow: %s", what, str(error).strip().splitlines()[:1])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        status = "FINISHED" if error is None else "KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED"
        self._deliver("the status", lambda run_id: self._client.set_terminated(run_id, status))


def _run_name(name: str) -> str:
    return f"{name}-{time.strftime('%m%d-%H%M%S')}"


def _environment() -> dict[str, str]:
    """What figures depend on besides the settings."""
    versions = {package: importlib.metadata.version(package) for package in _PACKAGES}
    machine = {"machine": platform.machine(), "cores": str(os.cpu_count())}
    return {"pa": __version__, **versions, **machine, **origin_tags()}
