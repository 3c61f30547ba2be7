"""Which flow runs count as dead."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any, cast
from uuid import uuid4

import pytest

pytest.importorskip("prefect", reason="the flows extra is not installed")

from flows.reconcile import SILENCE_S, flow_runs_here, is_dead
from pa_core.tracking.origin import FLOW_RUN_VARIABLE


def heard(seconds_ago: float | None) -> Any:
    """A client whose server heard of the run's heartbeat so long ago."""
    occurred = None if seconds_ago is None else datetime.now(UTC) - timedelta(seconds=seconds_ago)
    events = [] if occurred is None else [SimpleNamespace(occurred=occurred)]
    return cast(Any, SimpleNamespace(read_events=lambda *_, **__: SimpleNamespace(events=events)))


def test_elsewhere_only_a_run_whose_heartbeats_stopped_is_dead() -> None:
    run = cast(Any, SimpleNamespace(id=uuid4()))
    assert is_dead(heard(SILENCE_S + 5), run, set(), local=False)
    assert not is_dead(heard(SILENCE_S - 60), run, set(), local=False)
    assert not is_dead(heard(None), run, set(), local=False), "one without heartbeats may well live"
    assert not is_dead(heard(SILENCE_S + 5), run, {str(run.id)}, local=False), "it has a process here"


def test_on_the_only_machine_a_run_without_a_process_is_dead() -> None:
    run = cast(Any, SimpleNamespace(id=uuid4()))
    assert is_dead(heard(1.0), run, set(), local=True)
    assert not is_dead(heard(None), run, {str(run.id)}, local=True)


def test_a_process_is_known_by_the_flow_run_in_its_environment() -> None:
    flow_run = str(uuid4())
    with subprocess.Popen(
        [sys.executable, "-c", "input()"], env={FLOW_RUN_VARIABLE: flow_run}, stdin=subprocess.PIPE
    ) as process:
        found = flow_runs_here()
        process.communicate(b"\n")
    assert flow_run in found
    assert flow_run not in flow_runs_here()
