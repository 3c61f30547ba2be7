"""Runs that a dead host left behind: Crashed in Prefect, KILLED in MLflow. ``python -m flows.reconcile [--local]``.

A host that loses power tells nobody. ``make up`` calls this before it serves; on a cluster, call it with
``PREFECT_API_URL`` set, or schedule the deployment *reconcile*. A run is left alone while anything says that it lives:

* a process on this machine belongs to it (Prefect names the flow run in the environment of its process, which all
  processes of the run inherit);
* its last heartbeat in Prefect is younger than ``SILENCE_S``. With ``--local`` this does not count: a server that
  only this machine reaches, as that of ``make up``, has no runs elsewhere. Runs without heartbeats, those that no
  deployment started, are ended with ``--local`` only;
* for the MLflow run of a flow run that is over: its run folder names a trainer that runs here, or one elsewhere whose
  progress or replicas wrote something within ``SILENCE_S``, as after ``pa train --resume``.

Flow runs that a schedule made for a time when nothing ran are skipped with ``--local``, instead of all running at once.
"""

import argparse
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import psutil
from prefect import flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.client.schemas.sorting import FlowRunSort
from prefect.events.filters import EventFilter, EventNameFilter, EventResourceFilter
from prefect.logging import get_logger
from prefect.states import Cancelled, Crashed

from flows import tracking
from pa_core.config import TrackingConfig
from pa_core.loop.liveness import trains
from pa_core.tracking.origin import FLOW_RUN_TAG, FLOW_RUN_VARIABLE

SILENCE_S = 300.0
"""Seconds without a sign of life after which a run elsewhere counts as dead."""
MISSED_S = 120.0
"""Seconds after its time from which a scheduled run counts as missed."""
PAGE = 200

_STARTED = [StateType.PENDING, StateType.RUNNING, StateType.CANCELLING]
_ENDED_BADLY = [StateType.CRASHED, StateType.CANCELLED, StateType.FAILED]


def flow_runs_here() -> set[str]:
    """Ids of the flow runs that a process on this machine belongs to, as far as this user may look."""
    found = set()
    for process in psutil.process_iter():
        try:
            found.add(process.environ().get(FLOW_RUN_VARIABLE))
        except (psutil.Error, OSError):  # another user's, or gone
            continue
    return {id_ for id_ in found if id_}


def _read(client: SyncPrefectClient, types: list[StateType]) -> Iterator[FlowRun]:
    """Flow runs in states of these types, the newest first."""
    wanted = FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=types)))
    for offset in range(0, sys.maxsize, PAGE):
        page = client.read_flow_runs(
            flow_run_filter=wanted, limit=PAGE, offset=offset, sort=FlowRunSort.EXPECTED_START_TIME_DESC
        )
        yield from page
        if len(page) < PAGE:
            return


def last_heartbeat(client: SyncPrefectClient, run: FlowRun) -> datetime | None:
    """When Prefect last heard of the run, or None when it has no heartbeats."""
    events = client.read_events(
        EventFilter(
            event=EventNameFilter(name=["prefect.flow-run.heartbeat"]),
            resource=EventResourceFilter(id=[f"prefect.flow-run.{run.id}"]),
        ),
        limit=1,
    ).events
    return events[0].occurred if events else None


def is_dead(client: SyncPrefectClient, run: FlowRun, here: set[str], local: bool) -> bool:
    """Whether a flow run that has been started has nobody any more who runs it."""
    if str(run.id) in here:
        return False
    if local:
        return True
    heartbeat = last_heartbeat(client, run)
    return heartbeat is not None and datetime.now(UTC) - heartbeat > timedelta(seconds=SILENCE_S)


def end_flow_runs(client: SyncPrefectClient, local: bool) -> list[FlowRun]:
    """Mark started flow runs that are dead Crashed, or Cancelled where that was asked for; returns them."""
    here = flow_runs_here()
    dead = [run for run in _read(client, _STARTED) if is_dead(client, run, here, local)]
    for run in dead:
        why = "nothing runs it any more: its process, or its machine, is gone"
        cancelling = run.state_type == StateType.CANCELLING
        end: State[Any] = Cancelled(message=why) if cancelling else Crashed(message=why)
        client.set_flow_run_state(run.id, end, force=True)
    return dead


def skip_missed(client: SyncPrefectClient) -> list[FlowRun]:
    """Cancel runs that a schedule made for a time that has passed; returns them."""
    latest = datetime.now(UTC) - timedelta(seconds=MISSED_S)
    missed = [
        run
        for run in _read(client, [StateType.SCHEDULED])
        if run.auto_scheduled and run.expected_start_time is not None and run.expected_start_time < latest
    ]
    for run in missed:
        client.set_flow_run_state(run.id, Cancelled(name="Skipped", message="nothing was there to start it in time"))
    return missed


def tracking_uris(value: Any) -> Iterator[str]:
    """Tracking stores that parameters of a flow run name: every ``tracking.uri`` and ``tracking_uri`` in them."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == "tracking_uri" and isinstance(inner, str):
                yield inner
            elif key == "tracking" and isinstance(inner, dict) and isinstance(inner.get("uri"), str):
                yield inner["uri"]
            else:
                yield from tracking_uris(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from tracking_uris(inner)


def end_mlflow_runs(client: SyncPrefectClient) -> list[str]:
    """Mark MLflow runs KILLED that still run although their flow run is over and nobody trains them; returns ids."""
    here = flow_runs_here()
    over = [run for run in _read(client, _ENDED_BADLY) if str(run.id) not in here]
    dead = {str(run.id) for run in over}
    uris = {uri for run in over for uri in tracking_uris(run.parameters)} | {TrackingConfig().uri}
    ended = []
    for uri in sorted(uris - {"off"}) if over else ():
        for run_id, tags in tracking.running_runs(uri):
            url = tags.get("run_url")
            alive = url is not None and trains(url, SILENCE_S)
            if tags.get(FLOW_RUN_TAG) in dead and not alive and tracking.end_run(uri, run_id, "KILLED"):
                ended.append(run_id)
    return ended


def clean_up(local: bool) -> dict[str, int]:
    """Everything above on the server of the settings; how many of each were ended."""
    log = get_logger("reconcile")
    with get_client(sync_client=True) as client:
        dead = end_flow_runs(client, local)
        missed = skip_missed(client) if local else []
        ended = end_mlflow_runs(client)
    for run in dead:
        log.warning("flow run %s (%s): nothing runs it any more", run.name, run.id)
    counts = {"flow runs ended": len(dead), "scheduled runs skipped": len(missed), "MLflow runs ended": len(ended)}
    log.info(", ".join(f"{count} {what}" for what, count in counts.items()))
    return counts


@flow(name="reconcile", persist_result=False, log_prints=False)
def reconcile() -> dict[str, int]:
    """End what a dead host left running, in Prefect and in MLflow, judged by heartbeats."""
    return clean_up(local=False)


def main(arguments: list[str]) -> int:
    """Clean up once."""
    parser = argparse.ArgumentParser(prog="python -m flows.reconcile", description="End runs that a dead host left.")
    parser.add_argument("--local", action="store_true", help="the Prefect server has no runs on other machines")
    clean_up(parser.parse_args(arguments).local)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
