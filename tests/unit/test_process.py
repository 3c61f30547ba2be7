"""Child processes: logs, stopping, and the guard against the parent's death."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from pa_core.errors import ConfigError, EngineError
from pa_core.rollout.config import EngineConfig
from pa_core.rollout.process import ReplicaSet, fair_threads, spawn, stop_all

GUARDED = "from pa_core.rollout.process import watch_parent; watch_parent()\n"
WITH_GRANDCHILD = GUARDED + (
    "import subprocess, sys, time\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    "print('grandchild', child.pid, flush=True)\n"
    "time.sleep(600)\n"
)


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"timed out waiting until {what}"
        time.sleep(0.05)


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def grandchild_of(log: Path) -> int:
    wait_until(lambda: log.exists() and "grandchild" in log.read_text(), "the grandchild runs")
    return int(log.read_text().split()[1])


def test_output_goes_to_the_log_and_its_tail_is_at_hand(tmp_path: Path) -> None:
    code = "import sys; [print('line', i) for i in range(50)]; sys.exit('the end')"
    child = spawn([sys.executable, "-c", code], tmp_path / "logs" / "a.log", {"PYTHONUNBUFFERED": "1"})
    wait_until(lambda: child.poll() is not None, "the child ends")
    assert child.poll() == 1
    assert child.tail(3).splitlines() == ["line 48", "line 49", "the end"]
    child.stop()


def test_a_child_gets_the_extra_environment_and_a_session_of_its_own(tmp_path: Path) -> None:
    code = "import os; print(os.environ['EXTRA'], os.getsid(0) == os.getpid())"
    child = spawn([sys.executable, "-c", code], tmp_path / "a.log", {"EXTRA": "word"})
    wait_until(lambda: child.poll() is not None, "the child ends")
    assert child.tail() == "word True"
    child.stop()


def test_stopping_ends_grandchildren_too(tmp_path: Path) -> None:
    child = spawn([sys.executable, "-c", WITH_GRANDCHILD], tmp_path / "a.log")
    grandchild = grandchild_of(tmp_path / "a.log")
    assert child.stop() == -signal.SIGTERM
    wait_until(lambda: gone(grandchild), "the grandchild is gone")


def test_a_child_that_ignores_sigterm_is_killed_after_the_timeout(tmp_path: Path) -> None:
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    children = [spawn([sys.executable, "-c", code], tmp_path / f"{name}.log") for name in "ab"]
    wait_until(lambda: all(child.tail() == "up" for child in children), "the children run")
    started = time.monotonic()
    stop_all(children, timeout=4.0)
    assert time.monotonic() - started < 8, "they are waited for together"
    assert [child.poll() for child in children] == [-signal.SIGKILL, -signal.SIGKILL]
    stop_all(children, timeout=1.0)


def test_when_the_parent_is_killed_children_and_grandchildren_are_gone_within_seconds(tmp_path: Path) -> None:
    parent_code = (
        "import sys, time\nfrom pathlib import Path\nfrom pa_core.rollout.process import spawn\n"
        "folder = Path(sys.argv[1])\n"
        "pids = [spawn([sys.executable, '-c', sys.argv[2]], folder / f'{n}.log').pid for n in 'ab']\n"
        "print(*pids, flush=True)\ntime.sleep(600)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", parent_code, str(tmp_path), WITH_GRANDCHILD], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    children = [int(pid) for pid in parent.stdout.readline().split()]
    everyone = [*children, *(grandchild_of(tmp_path / f"{name}.log") for name in "ab")]
    assert len(everyone) == 4 and not any(gone(pid) for pid in everyone)
    parent.kill()
    parent.wait()
    wait_until(lambda: all(gone(pid) for pid in everyone), "no orphan is left", timeout_s=5)
    parent.stdout.close()


def test_a_program_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"cannot start /no/such/program with log .*a\.log"):
        spawn(["/no/such/program"], tmp_path / "a.log")


def test_every_start_has_a_new_key_that_is_in_the_environment_but_in_no_argument(tmp_path: Path) -> None:
    code = (
        "import os, time; print(os.environ['PA_API_KEY'], os.environ['OMP_NUM_THREADS'], flush=True); time.sleep(600)"
    )
    config = EngineConfig(replicas=2, threads=3)
    keys = set()
    for run in range(2):
        with ReplicaSet("memory://run", config, tmp_path / str(run), [sys.executable, "-c", code]) as replicas:
            wait_until(lambda: all(p.tail() for p in replicas.processes.values()), "the replicas run")
            for process in replicas.processes.values():
                assert process.tail().split() == [replicas.api_key, "3"]
                assert replicas.api_key not in " ".join(psutil.Process(process.pid).cmdline())
            keys.add(replicas.api_key)
        assert all(process.poll() is not None for process in replicas.processes.values())
    assert len(keys) == 2


def test_a_run_that_waits_for_the_replicas_of_others_needs_a_key_to_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PA_API_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"engine.replicas=0 .*PA_API_KEY.* is not set; set it"):
        ReplicaSet("memory://run", EngineConfig(replicas=0), tmp_path).start()
    monkeypatch.setenv("PA_API_KEY", "shared")
    with ReplicaSet("memory://run", EngineConfig(replicas=0), tmp_path) as replicas:
        assert not replicas.processes and replicas.api_key == "shared"


def test_replicas_and_trainer_share_the_cores() -> None:
    cores = len(os.sched_getaffinity(0))
    assert fair_threads(1) == max(1, cores // 2)
    assert fair_threads(10 * cores) == 1
