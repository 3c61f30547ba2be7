"""What a flow shows of its trainer while it runs: log lines, progress, and the link to the MLflow run."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from prefect import runtime
from prefect.artifacts import create_link_artifact

from flows import tracking
from flows.children import LogReader
from flows.progress import ProgressArtifact
from flows.services import flow_run_page
from pa_core.loop.progress import ProgressState, read_progress
from pa_core.loop.run import Run
from pa_core.rollout.process import ChildProcess

PROGRESS_EVERY_S = 2.0
LONGEST_LINE = 4000

observers: list[Callable[[ProgressState], None]] = []
"""Called in the flow's thread with every snapshot; a terminal draws its bar with it."""


class TrainerWatch:
    """Carries news from the trainer's log and the run's store to Prefect."""

    def __init__(
        self, run: Run, process: ChildProcess, logger: logging.Logger | logging.LoggerAdapter[logging.Logger]
    ) -> None:
        self._run = run
        self._logger = logger
        self._log = LogReader(process.log_path)
        self._level = logging.INFO
        self._due = 0.0
        self._artifact = ProgressArtifact("progress", logger)
        self.mlflow_run_id: str | None = None

    @property
    def result(self) -> dict[str, object]:
        """The JSON object that the trainer closed with; empty while it runs or when it was killed."""
        return self._log.result

    def look(self, now: bool = False) -> None:
        """Forward new log lines; every ``PROGRESS_EVERY_S`` seconds, or ``now``, the progress as well."""
        self._forward()
        if now or time.monotonic() >= self._due:
            self._due = time.monotonic() + PROGRESS_EVERY_S
            self._progress()

    def _forward(self) -> None:
        for line in self._log.lines():
            word, _, rest = line.partition(" ")
            level = logging.getLevelNamesMapping().get(word)
            if level is not None:
                self._level, line = level, rest
            self._logger.log(self._level, "%s", line[:LONGEST_LINE])

    def _progress(self) -> None:
        """Progress is for looking at: when it cannot be read or shown, training goes on."""
        try:
            state = read_progress(self._run.store)
            if state is None:
                return
            for observer in observers:
                observer(state)
            self._artifact.show(round(100 * state.fraction, 1), state.line())
            if state.mlflow_run_id and self.mlflow_run_id is None:
                self._link(state.mlflow_run_id)
        except Exception as error:
            self._logger.warning("progress could not be shown: %s", error)

    def _link(self, run_id: str) -> None:
        uri = self._run.config.tracking.uri
        tracking.tag_flow_run(uri, run_id, str(runtime.flow_run.id), flow_run_page(str(runtime.flow_run.id)))
        create_link_artifact(
            tracking.run_page(uri, run_id),
            link_text=f"MLflow: {self._run.name}",
            key="mlflow-run",
            description="Metrics, sample rollouts, the timeline and the model of this run.",
        )
        self.mlflow_run_id = run_id
