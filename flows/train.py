"""The ``train`` flow: prepare a run, start its processes, watch them, end them, report.

``python -m flows.train CONFIG [KEY=VALUE …]`` runs it here; ``prefect.yaml`` lists its deployments. A module that
defines flows must not postpone the evaluation of annotations: a served flow then cannot build its form.
"""

import re
import sys
from typing import Any, cast

from prefect import State, flow, get_run_logger, runtime, task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import FlowRun
from prefect.flows import Flow
from prefect.states import Completed, Failed
from prefect.task_runners import ThreadPoolTaskRunner

from flows import artifacts, tracking
from flows.children import Children, epitaph
from flows.replica_watch import ReplicaTable, ReplicaWatch
from flows.watch import TrainerWatch
from pa_core.config import TrainConfig
from pa_core.errors import UserError
from pa_core.loop.run import Run, prepare_run

MAX_REPLICAS = 62
POLL_S = 0.5
FAILURES = {2: "Bad input", 3: "Stopped"}
"""Names of failed states by the exit code that says the same."""


def end_mlflow_runs(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """After the flow's process died: MLflow must not show the run as running.

    It runs in another process, so it ends nothing itself; the children end with their parent.
    """
    config = TrainConfig.model_validate(flow_run.parameters["config"])
    uri, status = config.tracking.uri, "KILLED" if state.is_cancelled() else "FAILED"
    for run_id in tracking.runs_of_flow_run(uri, config.tracking.experiment, str(flow_run.id)):
        tracking.end_run(uri, run_id, status)


def failed(message: str, exit_code: int) -> State[Any]:
    """A failed state whose name tells what kind of failure it was."""
    return Failed(message=message, name=FAILURES.get(exit_code, "Failed"))


@task(name="replica", task_run_name="replica {replica}", cache_policy=NO_CACHE, persist_result=False, log_prints=False)
def watch_replica(children: Children, replica: str) -> State[Any]:
    """Follow a replica through its restarts: Failed when it is given up, Completed when it was stopped."""
    watch = ReplicaWatch(children.replicas, replica, get_run_logger())
    while not children.stopping.is_set():
        watch.look()
        if (end := children.replica_end(replica)) is not None:
            given_up = replica in children.replicas.processes.given_up
            return Failed(message=f"replica {replica} {end}") if given_up else Completed(message=end)
        children.stopping.wait(POLL_S)
    return Completed(message="stopped with the run")


@task(name="trainer", task_run_name="trainer", cache_policy=NO_CACHE, persist_result=False, log_prints=False)
def run_trainer(children: Children) -> State[Any]:
    """Start the trainer and follow it to its end. Called in the main thread, where a cancellation arrives."""
    process = children.start_trainer()
    watch = TrainerWatch(children.run, process, get_run_logger())
    table = ReplicaTable(children.replicas, get_run_logger())
    while process.poll() is None:
        children.stopping.wait(POLL_S)
        watch.look()
        table.look()
        if (error := children.replica_error()) is not None:
            children.stop_trainer()
            return Failed(message=str(error))
    watch.look(now=True)
    if process.poll() == 0:
        return Completed(message="trained", data=watch.result)
    message = str(watch.result.get("error") or epitaph("the trainer", process))
    return failed(message, process.poll() or 1)


def end_own_mlflow_run(run: Run, status: str) -> None:
    """Give the run's MLflow run its end if the trainer died before it could."""
    run_id = run.facts().get("mlflow_run_id")
    if run_id is not None and tracking.end_run(run.config.tracking.uri, run_id, status):
        get_run_logger().warning("MLflow run %s: marked %s, because the trainer could not", run_id, status)


def publish_results(run: Run, summary: dict[str, Any]) -> None:
    """The summary and the reward curve, beside the link that was there from the start."""
    uri, run_id = run.config.tracking.uri, summary["mlflow_run_id"]
    page = tracking.page_of(uri, run.facts()["mlflow_experiment_id"], run_id) if run_id else None
    history = tracking.metric_history(uri, run_id, "reward/mean") if run_id else []
    create_markdown_artifact(
        artifacts.summary_table(summary, page), key="summary", description=artifacts.headline(summary)
    )
    create_markdown_artifact(artifacts.reward_curve(history, page), key="reward-curve", description="Mean reward")


def run_name_hint() -> str:
    """First part of the run's name: the deployment, or else the flow run."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", str(runtime.deployment.name or runtime.flow_run.name))


def follow_run(run: Run) -> State[Any]:
    """Start a prepared run's processes, follow them to their end, end them whatever happens, and report."""
    get_run_logger().info("run %s in %s", run.name, run.url)
    status = "KILLED"
    try:
        with Children(run) as children:
            replicas = [watch_replica.submit(children, replica) for replica in children.replicas.ids]
            trained = run_trainer(children, return_state=True)
        for replica in replicas:
            replica.wait()
        status = "FAILED"
    except UserError as error:
        return failed(str(error), error.exit_code)
    finally:
        end_own_mlflow_run(run, status)
    if trained.is_failed():
        return Failed(message=trained.message, name=trained.name)
    summary = cast(dict[str, Any], trained.result())
    publish_results(run, summary)
    return Completed(message=artifacts.headline(summary), data=summary)


@flow(
    name="train",
    task_runner=ThreadPoolTaskRunner(max_workers=MAX_REPLICAS + 2),  # type: ignore[arg-type]
    persist_result=False,
    log_prints=False,
    on_crashed=[end_mlflow_runs],
    on_cancellation=[end_mlflow_runs],
)
def train(config: TrainConfig) -> State[Any]:
    """Train a language model with GRPO on verifiable rewards, generation and training overlapped.

    Starts the replicas and the trainer as processes, shows their progress, and ends them whatever happens.

    Args:
        config: The run: every key of the configuration, at first as in the deployment's file.
    """
    try:
        run = prepare_run(config, run_name_hint())
    except UserError as error:
        return failed(str(error), error.exit_code)
    return follow_run(run)


if __name__ == "__main__":
    from flows.foreground import main

    sys.exit(main(sys.argv[1:]))
