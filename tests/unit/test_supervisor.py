"""Replica processes that end by themselves: started again after a pause, a few times, then given up with a cause."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from pa_core.rollout.config import EngineConfig
from pa_core.rollout.process import ReplicaSet
from pa_core.store.registry import GIVEN_UP, RESTARTING, ReplicaRecord

SLEEP = "import time; print('up', flush=True); time.sleep(600)"


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"timed out waiting until {what}"
        time.sleep(0.05)


def replica_set(folder: Path, code: str, **config: float) -> ReplicaSet:
    settings = EngineConfig.model_validate({"replicas": 1, "restart_delay_s": 0.2, "max_restarts": 2, **config})
    return ReplicaSet(str(folder / "run"), settings, folder / "logs", [sys.executable, "-c", code])


def test_a_process_that_crashes_is_started_again_with_growing_pauses_and_given_up_at_last(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with replica_set(tmp_path, "import sys; sys.exit('out of luck')", restart_delay_s=0.5) as replicas:
        told: set[tuple[str, str]] = set()

        def given_up() -> bool:
            record = replicas.registry.read("r0")
            told.add(("", "") if record is None else (record.state, record.detail))
            return any(state == GIVEN_UP for state, _ in told)

        wait_until(given_up, "other programs learn that the replica is given up")
        cause = replicas.processes.given_up["r0"]
        assert cause.startswith("(exit code 1) and engine.max_restarts=2 restarts are used up")
        assert "out of luck" in cause, "the end of the log tells why"
        assert replicas.processes.restarts == {"r0": 2} and not replicas.processes.may_return("r0")
        assert replicas.processes["r0"].log_path.read_text().count("out of luck") == 3
    plans = ["restart 1 of 2 in 0.5 s", "restart 2 of 2 in 1 s"]
    assert all(f"replica r0 ended by itself (exit code 1); {plan}" in caplog.text for plan in plans)
    assert {(RESTARTING, f"its process ended (exit code 1); {plan}") for plan in plans} <= told


def test_a_killed_process_comes_back_as_another_one_and_takes_its_children_with_it(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print('grandchild', child.pid, flush=True); time.sleep(600)\n"
    )
    with replica_set(tmp_path, code) as replicas:
        first = replicas.processes["r0"]
        wait_until(lambda: "grandchild" in first.tail(), "it runs")
        grandchild = int(first.tail().split()[-1])
        os.kill(first.pid, signal.SIGKILL)
        wait_until(lambda: replicas.processes["r0"].pid != first.pid, "it is started again")
        assert not psutil.pid_exists(grandchild) or psutil.Process(grandchild).status() == psutil.STATUS_ZOMBIE
        assert replicas.processes.restarts == {"r0": 1} and replicas.processes.given_up == {}
        assert replicas.processes["r0"].poll() is None


def test_bad_input_is_not_tried_twice(tmp_path: Path) -> None:
    with replica_set(tmp_path, "import sys; print('error: no such model'); sys.exit(2)") as replicas:
        wait_until(lambda: replicas.processes.given_up, "the replica is given up")
        cause = replicas.processes.given_up["r0"]
        assert cause.startswith("(exit code 2), which no restart mends") and "error: no such model" in cause
        assert replicas.processes.restarts == {"r0": 0}


def test_a_process_that_was_told_to_stop_has_left_and_stays_away(tmp_path: Path) -> None:
    with replica_set(tmp_path, "pass") as replicas:
        wait_until(lambda: replicas.processes.left == {"r0"}, "it has left")
        time.sleep(1)
        assert replicas.processes.restarts == {"r0": 0} and replicas.processes.given_up == {}


def test_after_the_stop_nothing_is_started_any_more(tmp_path: Path) -> None:
    replicas = replica_set(tmp_path, SLEEP, restart_delay_s=0.5, replicas=2)
    replicas.start()
    wait_until(lambda: all(process.tail() == "up" for process in replicas.processes.values()), "both run")
    os.kill(replicas.processes["r0"].pid, signal.SIGKILL)
    wait_until(lambda: replicas.processes.restarts["r0"] == 1, "a restart is due")
    replicas.stop()
    time.sleep(1.5)
    assert all(process.poll() is not None for process in replicas.processes.values())
    mine = psutil.Process().children(recursive=True)
    assert not [child for child in mine if "--replica-id" in child.cmdline()], "no orphan"


def test_a_condemned_process_is_ended_and_started_again_but_not_its_successor(tmp_path: Path) -> None:
    with replica_set(tmp_path, SLEEP) as replicas:
        first = replicas.processes["r0"].pid
        replicas.registry.announce(ReplicaRecord("r0", "http://h", 3, first, "ready", incarnation="one"))
        replicas.registry.condemn("r0", "one")
        wait_until(lambda: replicas.processes["r0"].pid != first, "it is started again")
        second = replicas.processes["r0"].pid
        replicas.registry.announce(ReplicaRecord("r0", "http://h", 3, second, "ready", incarnation="two"))
        time.sleep(2.5)
        assert replicas.processes["r0"].pid == second and replicas.processes["r0"].poll() is None


def test_what_an_earlier_life_of_the_run_wrote_about_its_replicas_is_forgotten_at_start(tmp_path: Path) -> None:
    replicas = replica_set(tmp_path, SLEEP)
    replicas.registry.announce(ReplicaRecord("r0", "", None, 1, GIVEN_UP, detail="long ago"))
    with replicas:
        assert replicas.registry.read("r0") is None
