"""The MLflow run of a study: parent of its runs, with the table, the pictures and the words that came of them."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pa_core.errors import ConfigError, first_line
from pa_core.study.plan import Study
from pa_core.tracking.connection import absolute_uri, experiment_id, is_passing, prepare_environment
from pa_core.tracking.description import flatten
from pa_core.tracking.mlflow_run import TABLES_TAG
from pa_core.tracking.outbox import Outbox

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from mlflow import MlflowClient

log = logging.getLogger(__name__)

PARENT_TAG = "mlflow.parentRunId"
CLOSE_TIMEOUT_S = 120.0
KILLED_TIMEOUT_S = 8.0


class ParentRun:
    """Created before anything is trained; from then on a server that is away holds nothing up.

    Attributes:
        run_id: the MLflow run.
        client: reads it.
    """

    def __init__(self, client: MlflowClient, run_id: str) -> None:
        self.client = client
        self.run_id = run_id
        self._outbox = Outbox(is_passing)

    @classmethod
    def start(cls, study: Study, tags: Mapping[str, str]) -> ParentRun:
        """Create the run, or go on with that of an earlier start.

        Raises:
            ConfigError: MLflow cannot be used.
        """
        prepare_environment()
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        for chatty in ("alembic", "mlflow.store.db.utils", "urllib3.connectionpool"):
            logging.getLogger(chatty).setLevel(logging.ERROR)
        tracking = study.base.tracking
        uri = absolute_uri(tracking.uri)
        tags = {**tags, "study": study.kind, "run_url": study.url, "mlflow.source.name": f"pa {study.kind}"}
        try:
            client = MlflowClient(tracking_uri=uri)
            if study.mlflow_run_id is None:
                experiment = experiment_id(client, uri, tracking.experiment)
                run = client.create_run(experiment, tags=tags, run_name=study.name)
            else:
                client.update_run(study.mlflow_run_id, status="RUNNING")
                run = client.get_run(study.mlflow_run_id)
        except (MlflowException, OSError) as error:
            cause = first_line(error)
            raise ConfigError(
                f"tracking.uri={tracking.uri!r} cannot be used for {study.kind} {study.name}: {cause}. Start the "
                "MLflow server, or set tracking.uri=sqlite:///mlflow.db for a local database"
            ) from error
        parent = cls(client, run.info.run_id)
        for name, value in tags.items() if study.mlflow_run_id is not None else ():
            parent.tag(name, value)
        parent._describe(study)
        return parent

    def _describe(self, study: Study) -> None:
        """What all runs of the study share, as params; what they differ in."""
        from mlflow.entities import Param

        varied = sorted({override.partition("=")[0] for child in study.children for override in child.overrides})
        tree = study.base.model_dump(mode="json")
        shared = {
            key: value
            for key, value in flatten(tree).items()
            if not any(key == one or key.startswith(f"{one}.") for one in varied)
        }
        params = [Param(key, value) for key, value in shared.items()]
        if study.mlflow_run_id is None:
            for start in range(0, len(params), 100):
                self._put("params", self.client.log_batch, self.run_id, params=params[start : start + 100])
        self.tag("varied", ", ".join(varied) or "nothing")
        self._put("config.yaml", self.client.log_dict, self.run_id, tree, "config.yaml")
        runs = [{"run": child.name, "overrides": list(child.overrides), "url": child.url} for child in study.children]
        self._put("runs.json", self.client.log_dict, self.run_id, {"runs": runs}, "runs.json")

    def adopt(self, run_id: str, tags: Mapping[str, str]) -> None:
        """Make a run a child of this one, wherever its experiment; ``tags`` are set on it as well."""
        for name, value in {PARENT_TAG: self.run_id, **tags}.items():
            self._put(f"tag {name} of {run_id}", self.client.set_tag, run_id, name, value)

    def tag(self, name: str, value: str) -> None:
        """Set a tag."""
        self._put(f"tag {name}", self.client.set_tag, self.run_id, name, value)

    def note(self, markdown: str) -> None:
        """Set the description that the run's page begins with."""
        self.tag("mlflow.note.content", markdown)

    def metrics(self, values: Mapping[str, float]) -> None:
        """Log metrics once, as of the whole study."""
        for name, value in values.items():
            self._put(f"metric {name}", self.client.log_metric, self.run_id, name, value, step=0)

    def text(self, text: str, path: str) -> None:
        """Write a text artifact."""
        self._put(path, self.client.log_text, self.run_id, text, path)

    def figure(self, figure: Figure, path: str) -> None:
        """Write a picture; it must not be changed afterwards."""
        self._put(path, self.client.log_figure, self.run_id, figure, path)

    def table(self, rows: Sequence[Mapping[str, Any]], path: str) -> None:
        """Write rows as a table artifact that the run's page draws; ``path`` ends with ``.json``."""
        columns = list(dict.fromkeys(column for row in rows for column in row))
        data = [[row.get(column) for column in columns] for row in rows]
        self.text(json.dumps({"columns": columns, "data": data}, ensure_ascii=False), path)
        self.tag(TABLES_TAG, json.dumps([{"path": path, "type": "table"}]))

    def finish(self, status: Literal["FINISHED", "FAILED", "KILLED"]) -> None:
        """Deliver what is left and give the run its status; a warning tells what never arrived."""
        self._put(f"status {status}", self.client.set_terminated, self.run_id, status)
        lost = self._outbox.close(KILLED_TIMEOUT_S if status == "KILLED" else CLOSE_TIMEOUT_S)
        if lost:
            log.warning("tracking: %d deliveries never reached MLflow: %s", len(lost), ", ".join(lost[:5]))

    def _put(self, what: str, call: Any, *arguments: Any, **options: Any) -> None:
        self._outbox.put(what, lambda: call(*arguments, **options))
