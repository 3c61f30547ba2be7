"""What the ``compare`` and ``sweep`` flows have in common: their runs as tasks, their pages, their links."""

import base64
import io
import logging
import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

from matplotlib.figure import Figure
from prefect import State, get_run_logger, runtime, task
from prefect.artifacts import (
    create_link_artifact,
    create_markdown_artifact,
    create_table_artifact,
)
from prefect.cache_policies import NO_CACHE
from prefect.futures import PrefectFuture
from prefect.states import Completed, Failed

from flows import tracking
from flows.progress import ProgressArtifact
from flows.services import flow_run_page
from flows.watch import TrainerWatch
from pa_core.loop.progress import ProgressState
from pa_core.loop.run import Run
from pa_core.rollout.process import ChildProcess
from pa_core.study.children import Observer, Outcome
from pa_core.study.parent_run import ParentRun
from pa_core.study.plan import Child, Study

POLL_S = 0.5
PICTURE_DPI = 90


class Watched:
    """A run in training, as its task sees it; ``outcome`` is there once ``over`` is set.

    No dataclass: Prefect would walk through the fields of one that it gets as a parameter.
    """

    def __init__(self, run: Run, process: ChildProcess) -> None:
        self.run = run
        self.process = process
        self.over = threading.Event()
        self.outcome: Outcome | None = None


@task(name="run", task_run_name="{name}", cache_policy=NO_CACHE, persist_result=False, log_prints=False)
def watch_run(name: str, watched: Watched) -> State[Any]:
    """Show a run's log, progress and MLflow page; it is trained by the flow, and ends when the flow says so."""
    watch = TrainerWatch(watched.run, watched.process, get_run_logger())
    while not watched.over.wait(POLL_S):
        watch.look()
    watch.look(now=True)
    outcome = watched.outcome
    if outcome is None or outcome.state != "finished":
        message = "ended with the flow" if outcome is None else outcome.error
        return Failed(message=message, name="Stopped" if outcome is None or outcome.state == "stopped" else "Failed")
    return Completed(message="trained")


class StudyPage(Observer, AbstractContextManager["StudyPage"]):
    """A study on its flow run's page: a task per run in training, overall progress, a link to the parent run."""

    def __init__(self, study: Study, tracking_uri: str) -> None:
        self._study = study
        self._uri = tracking_uri
        self._logger = get_run_logger()
        self._watched: dict[str, Watched] = {}
        self._tasks: list[PrefectFuture[Any]] = []
        self._fractions = {child.name: 1.0 if child.finished else 0.0 for child in study.children}
        self._artifact = ProgressArtifact(f"{study.kind}-progress", self._logger)
        self.tags = {
            tracking.FLOW_RUN_TAG: str(runtime.flow_run.id),
            "prefect.flow_run_url": flow_run_page(str(runtime.flow_run.id)),
        }

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for watched in self._watched.values():
            watched.over.set()
        if kind is None or issubclass(kind, Exception):  # a cancelled flow has no time to wait
            for future in self._tasks:
                future.wait()

    def opened(self, parent: ParentRun) -> None:
        """The parent run is there: link to it."""
        create_link_artifact(
            tracking.run_page(self._uri, parent.run_id),
            link_text=f"MLflow: {self._study.name}",
            key=f"mlflow-{self._study.kind}",
            description="The parent of all runs: table, pictures and words.",
        )

    def started(self, child: Child, run: Run, process: ChildProcess) -> None:
        """See :class:`Observer`."""
        watched = Watched(run, process)
        self._watched[child.name] = watched
        self._tasks.append(watch_run.submit(child.name, watched))

    def progress(self, states: Mapping[str, ProgressState]) -> None:
        """See :class:`Observer`."""
        for name, state in states.items():
            self._fractions[name] = state.fraction
        ended = sum(watched.over.is_set() for watched in self._watched.values())
        ended += sum(child.finished for child in self._study.children)
        line = f"{ended} of {len(self._study.children)} runs ended" + "".join(
            f" · {name}: iteration {state.iteration}/{state.iterations}" for name, state in states.items()
        )
        self._artifact.show(round(100 * sum(self._fractions.values()) / len(self._fractions), 1), line)

    def ended(self, outcome: Outcome) -> None:
        """See :class:`Observer`."""
        self._fractions[outcome.name] = 1.0
        watched = self._watched.get(outcome.name)
        if watched is not None:
            watched.outcome = outcome
            watched.over.set()
        elif outcome.state == "failed":
            self._logger.log(logging.ERROR, "%s could not be started: %s", outcome.name, outcome.error)


def publish(kind: str, report: str, rows: list[dict[str, Any]], pictures: Mapping[str, Figure], headline: str) -> None:
    """Words, table and pictures on the flow run's page."""
    create_markdown_artifact(report, key=kind, description=headline)
    create_table_artifact(rows, key=f"{kind}-runs", description="The runs beside each other.")
    if pictures:
        shown = "\n\n".join(f"![{name}]({embedded(figure)})" for name, figure in pictures.items())
        create_markdown_artifact(shown, key=f"{kind}-pictures", description="The same pictures are in MLflow.")


def embedded(figure: Figure) -> str:
    """A figure as a ``data:`` address, which a Markdown page can show by itself."""
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=PICTURE_DPI)
    return f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"
