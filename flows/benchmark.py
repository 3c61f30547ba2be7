"""The ``benchmark`` flow: any ``pa bench NAME`` as a process of its own, followed to its end, its figures shown.

``pa bench`` logs to MLflow by itself; the flow adds the link. A module that defines flows must not postpone the
evaluation of annotations: a served flow then cannot build its form.
"""

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from prefect import State, flow, get_run_logger, runtime, task
from prefect.artifacts import (
    create_link_artifact,
    create_markdown_artifact,
    create_table_artifact,
)
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import FlowRun
from prefect.flows import Flow
from prefect.states import Completed, Failed

from flows import artifacts, tracking
from flows.children import LogReader, epitaph
from flows.forms import Benchmark, command_line
from flows.progress import ProgressArtifact
from flows.services import flow_run_page
from pa_core.bench.tracked import EXPERIMENT, OFF, flat_numbers
from pa_core.config import TrackingConfig
from pa_core.rollout.process import ChildProcess, spawn
from pa_core.tracking.origin import FLOW_RUN_VARIABLE

POLL_S = 0.5
GRACE_S = 15.0
FAILURES = {2: "Bad input"}


def end_mlflow_runs(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """After the flow's process died: MLflow must not show the benchmark as running."""
    uri = flow_run.parameters["settings"].get("tracking_uri", TrackingConfig().uri)
    end_runs(uri, str(flow_run.id), "KILLED")


def end_runs(uri: str, flow_run_id: str, status: str) -> None:
    """Give the benchmark's MLflow run its end if its process died before it could."""
    if uri != OFF:
        for run_id in tracking.runs_of_flow_run(uri, EXPERIMENT, flow_run_id):
            tracking.end_run(uri, run_id, status)


class Progress:
    """How long a benchmark has run and what it said last: no benchmark knows beforehand how long it takes."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._shown = ""
        self._artifact = ProgressArtifact("progress", get_run_logger())

    def show(self, percent: float, said: str) -> None:
        """Draw it when there is something new."""
        if said == self._shown and percent < 100:
            return
        self._artifact.show(percent, f"{time.monotonic() - self._began:.0f} s · {said}")
        self._shown = said


def follow(process: ChildProcess, log: Callable[..., None]) -> dict[str, Any]:
    """Forward what a benchmark says until it ends; returns the JSON object that it closed with, or nothing."""
    reader, progress, last = LogReader(process.log_path), Progress(), "started"
    progress.show(0.0, last)
    while True:
        ended = process.poll() is not None
        for last in reader.lines():
            log("%s", last)
        if ended:
            progress.show(100.0, last)
            return reader.result
        progress.show(0.0, last)
        time.sleep(POLL_S)


def publish(name: str, result: dict[str, Any], tracking_uri: str) -> None:
    """Figures, rows and the link to MLflow as artifacts."""
    numbers = flat_numbers(result)
    create_markdown_artifact(artifacts.figures(name, numbers), key=f"benchmark-{name}", description="Its figures.")
    if isinstance(result.get("rows"), list):
        create_table_artifact([flat_numbers(row) for row in result["rows"]], key=f"benchmark-{name}-rows")
    flow_run_id = str(runtime.flow_run.id)
    for run_id in tracking.runs_of_flow_run(tracking_uri, EXPERIMENT, flow_run_id) if tracking_uri != OFF else []:
        tracking.tag_flow_run(tracking_uri, run_id, flow_run_id, flow_run_page(flow_run_id))
        page = tracking.run_page(tracking_uri, run_id)
        create_link_artifact(page, link_text=f"MLflow: {name}", key="mlflow-run", description="Settings and figures.")


@task(name="measure", cache_policy=NO_CACHE, persist_result=False, log_prints=False)
def measure(arguments: list[str]) -> State[Any]:
    """Run ``pa`` with these arguments to its end. Called in the main thread, where a cancellation arrives."""
    folder = Path(tempfile.mkdtemp(prefix="pa-benchmark-"))
    env = {FLOW_RUN_VARIABLE: str(runtime.flow_run.id), "PYTHONUNBUFFERED": "1", "TQDM_DISABLE": "1"}
    process = spawn([sys.executable, "-m", "pa_core.cli", *arguments], folder / "benchmark.log", env)
    try:
        result = follow(process, get_run_logger().info)
    finally:
        code = process.stop(GRACE_S)
    if code == 0:
        return Completed(message="measured", data=result)
    message = str(result.get("error") or epitaph("the benchmark", process))
    return Failed(message=message, name=FAILURES.get(code, "Failed"))


@flow(
    name="benchmark",
    persist_result=False,
    log_prints=False,
    on_crashed=[end_mlflow_runs],
    on_cancellation=[end_mlflow_runs],
)
def benchmark(settings: Benchmark) -> State[Any]:
    """Measure with any `pa bench` command; figures go to the page of the run and to MLflow.

    Args:
        settings: Which benchmark, by its tab, and its options; they are those of the command line.
    """
    arguments = command_line(settings)
    get_run_logger().info("pa %s", " ".join(arguments))
    try:
        measured = measure(arguments, return_state=True)
    finally:
        end_runs(settings.tracking_uri, str(runtime.flow_run.id), "KILLED")
    if measured.is_failed():
        return Failed(message=measured.message, name=measured.name)
    result = cast(dict[str, Any], measured.result())
    publish(settings.benchmark, result, settings.tracking_uri)
    return Completed(message=f"measured {settings.benchmark}; its figures are among the artifacts", data=result)
