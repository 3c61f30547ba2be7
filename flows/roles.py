"""The roles of a run as flows of their own, so that work pools give trainer and replicas a place each.

``trainer`` prepares a run, asks the pool of the replicas for some, and trains; ``replica`` serves a run until it ends.
More replicas are further flow runs of ``replica``, started or cancelled at any time. Both sides need the run's store
and the same ``PA_API_KEY``, and the trainer must reach the address in the replicas' ``PA_REPLICA_HOST``.
``infra/prefect-roles.yaml`` lists the deployments.
"""

import json
import logging
import time
from typing import Annotated, Any

from prefect import State, flow, get_client, get_run_logger, runtime
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound
from prefect.states import Completed
from prefect.task_runners import ThreadPoolTaskRunner
from pydantic import Field

from flows.replica_watch import ReplicaWatch
from flows.train import end_mlflow_runs, failed, follow_run, run_name_hint
from pa_core.config import TrainConfig
from pa_core.errors import ConfigError, EngineError, UserError
from pa_core.loop.run import SUMMARY_KEY, TRAINER_KEY, Run, open_run, prepare_run
from pa_core.rollout.process import ReplicaSet, require_shared_key

REPLICA_GRACE_S = 10.0
POLL_S = 0.5
LOOK_EVERY_S = 3.0
TRAINER_FACT = "trainer_flow_run"
"""What ``run.json`` calls the flow run that trains."""

Logger = logging.Logger | logging.LoggerAdapter[logging.Logger]


def without_own_replicas(config: TrainConfig) -> TrainConfig:
    """The config with generation left to replicas that others start. Raises :class:`ConfigError` without a key."""
    engine = config.engine.model_copy(update={"replicas": 0})
    require_shared_key(engine)
    return config.model_copy(update={"engine": engine})


def require_deployment(name: str) -> None:
    """Raise :class:`ConfigError` when there is no such deployment to ask for replicas."""
    with get_client(sync_client=True) as client:
        try:
            client.read_deployment_by_name(name)
        except (ObjectNotFound, ValueError):
            raise ConfigError(
                f"replica_deployment={name!r}: there is no such deployment; make it with `prefect deploy "
                "--prefect-file infra/prefect-roles.yaml --all`, or set replicas=0 and start replicas yourself"
            ) from None


def ask_for_replicas(run: Run, count: int, deployment: str) -> None:
    """Have the replicas' pool start ``count`` of them; nobody waits, the trainer takes each in when it serves."""
    for number in range(count):
        run_deployment(
            deployment, parameters={"run_url": run.url}, timeout=0, flow_run_name=f"{run.name} replica {number}"
        )


class RunEnd:
    """Finds out that a run needs no replica any more."""

    def __init__(self, run: Run, logger: Logger) -> None:
        self._run = run
        self._logger = logger
        self._trained = False

    def reason(self) -> str | None:
        """Why the run has ended, or None while it goes on, or while neither store nor Prefect can tell."""
        try:
            return self._in_store() or self._in_prefect()
        except Exception as error:
            self._logger.warning("whether the run goes on cannot be seen: %s", error)
            return None

    def _in_store(self) -> str | None:
        store = self._run.store
        if store.exists(SUMMARY_KEY):
            return "the run is finished"
        trained, self._trained = self._trained, store.exists(TRAINER_KEY)
        return "the trainer has stopped" if trained and not self._trained else None

    def _in_prefect(self) -> str | None:
        """A trainer that was killed leaves its mark in the store; Prefect knows that its flow run is over."""
        flow_run_id = self._run.facts().get(TRAINER_FACT)
        if flow_run_id is None:
            return None
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(flow_run_id).state
        if state is None or not state.is_final() or self._resumed_since(state.timestamp.timestamp()):
            return None
        return f"the trainer's flow run is {state.name}"

    def _resumed_since(self, moment: float) -> bool:
        """Whether the process that trains now began later, with ``pa train --resume`` say."""
        record = self._run.store.find(TRAINER_KEY)
        return record is not None and json.loads(record)["started"] > moment


def serve(run: Run, replica_id: str, logger: Logger) -> str:
    """Keep one replica, started again when it dies, until the run ends. Returns why it ended.

    Raises:
        EngineError: the replica is given up.
    """
    end = RunEnd(run, logger)
    if (reason := end.reason()) is not None:
        return reason
    due = time.monotonic() + LOOK_EVERY_S
    replicas = ReplicaSet(run.url, run.config.engine, run.log_folder, ids=[replica_id])
    watch = ReplicaWatch(replicas, replica_id, logger)
    try:
        replicas.start()
        while True:
            watch.look()
            if replica_id in replicas.processes.left:
                return "it was asked to stop, and left"
            if (cause := replicas.processes.given_up.get(replica_id)) is not None:
                raise EngineError(f"replica {replica_id} died {cause}")
            if time.monotonic() >= due:
                if (reason := end.reason()) is not None:
                    return reason
                due = time.monotonic() + LOOK_EVERY_S
            time.sleep(POLL_S)
    finally:
        replicas.stop(REPLICA_GRACE_S)


@flow(name="replica", persist_result=False, log_prints=False)
def replica(run_url: str, replica_id: str | None = None) -> State[Any]:
    """Serve one inference replica of a run until the run ends or this flow run is cancelled.

    It is of the engine that the run is configured with, and gets work once it has loaded the current version. Start
    as many as there are devices for; cancel one and its work goes to the others.

    Args:
        run_url: The run to serve: its folder or URL, as its trainer logs it.
        replica_id: Name that no other replica of the run has; default: made from the flow run's id.
    """
    name = replica_id or f"x{str(runtime.flow_run.id).replace('-', '')[:12]}"
    try:
        return Completed(message=serve(open_run(run_url), name, get_run_logger()))
    except UserError as error:
        return failed(str(error), error.exit_code)


@flow(
    name="trainer",
    task_runner=ThreadPoolTaskRunner(max_workers=2),  # type: ignore[arg-type]
    persist_result=False,
    log_prints=False,
    on_crashed=[end_mlflow_runs],
    on_cancellation=[end_mlflow_runs],
)
def trainer(
    config: TrainConfig, replicas: Annotated[int, Field(ge=0)] = 1, replica_deployment: str = "replica/inference"
) -> State[Any]:
    """Train a run whose replicas are flow runs of their own, in a work pool of their own.

    Args:
        config: The run. Its engine.replicas does not count here.
        replicas: Replicas to ask for; 0: somebody starts them by hand.
        replica_deployment: Deployment of the replica flow that is asked for them.
    """
    try:
        wanted = without_own_replicas(config)
        if replicas:
            require_deployment(replica_deployment)
        run = prepare_run(wanted, run_name_hint())
        run.describe(**{TRAINER_FACT: str(runtime.flow_run.id)})
        ask_for_replicas(run, replicas, replica_deployment)
    except UserError as error:
        return failed(str(error), error.exit_code)
    return follow_run(run)
