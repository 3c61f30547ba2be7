"""The processes of one run: its replicas and its trainer, started and stopped together."""

from __future__ import annotations

import json
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from prefect import runtime

from pa_core.errors import EngineError, StoreError
from pa_core.loop.run import Run
from pa_core.rollout.process import ChildProcess, ReplicaSet, spawn, stop_all
from pa_core.rollout.protocol import API_KEY_VARIABLE
from pa_core.tracking.origin import FLOW_RUN_VARIABLE

TRAINER_GRACE_S = 13.0
REPLICA_GRACE_S = 5.0


class Children:
    """A run's child processes; leaving the block ends them, the trainer first.

    Together they end within ``TRAINER_GRACE_S + REPLICA_GRACE_S`` seconds, which fits the grace that Prefect gives a
    cancelled flow. Should this process be killed, every child notices and ends by itself.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.stopping = threading.Event()
        self.replicas = ReplicaSet(run.url, run.config.engine, self.run.log_folder)
        self.trainer: ChildProcess | None = None

    def __enter__(self) -> Children:
        self.replicas.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopping.set()
        if self.trainer is not None:
            self.trainer.stop(TRAINER_GRACE_S)
        self.replicas.stop(REPLICA_GRACE_S)

    def start_trainer(self) -> ChildProcess:
        """Start the trainer. Raises :class:`EngineError` when it cannot be started."""
        command = [sys.executable, "-m", "pa_core.cli", "train", "--run-url", self.run.url, "--json"]
        env = {
            API_KEY_VARIABLE: self.replicas.api_key,
            FLOW_RUN_VARIABLE: str(runtime.flow_run.id or ""),
            "PYTHONUNBUFFERED": "1",
            "COLUMNS": "200",
            "TQDM_DISABLE": "1",
        }
        self.trainer = spawn(command, self.run.log_folder / "trainer.log", env)
        return self.trainer

    def replica_error(self) -> EngineError | None:
        """What to tell when every replica is given up, or None while one runs or will be started again."""
        processes = self.replicas.processes
        if self.stopping.is_set() or not processes or any(processes.may_return(id_) for id_ in processes):
            return None
        if self.run.config.engine.urls or self._others_serve():
            return None
        ends = "\n".join(f"replica {id_} {self.replica_end(id_)}" for id_ in processes)
        return EngineError(f"no replica is left:\n{ends}")

    def _others_serve(self) -> bool:
        """Whether a replica that somebody else started has a heartbeat."""
        timeout_s = self.run.config.engine.heartbeat_timeout_s
        try:
            records = self.replicas.registry.look(())
        except StoreError:
            return True  # nobody knows; the trainer will say if none is left
        mine = set(self.replicas.ids)
        return any(record and id_ not in mine and record.age() < timeout_s for id_, record in records.items())

    def replica_end(self, replica: str) -> str | None:
        """How a replica ended that is not started again, or None while it runs or will be started again."""
        if replica in self.replicas.processes.left:
            return "was asked to stop, and left"
        cause = self.replicas.processes.given_up.get(replica)
        return None if cause is None else f"died {cause}"

    def stop_trainer(self) -> None:
        """End the trainer, which has nothing left to work with."""
        if self.trainer is not None:
            stop_all([self.trainer], TRAINER_GRACE_S)


def epitaph(name: str, process: ChildProcess, lines: int = 15) -> str:
    """How a process ended, with the end of its log."""
    code = process.poll()
    how = f"ended by {signal.Signals(-code).name}" if code is not None and code < 0 else f"ended with exit code {code}"
    return f"{name} {how}; its last lines ({process.log_path}):\n{process.tail(lines)}"


class LogReader:
    """Reads what a growing log gained since the last look, by whole lines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self.result: dict[str, Any] = {}

    def lines(self) -> list[str]:
        """New lines. The trainer's closing JSON object is kept in ``result`` instead."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as log:
            log.seek(self._offset)
            data = log.read()
        end = data.rfind(b"\n") + 1
        self._offset += end
        lines = [line.rstrip() for line in data[:end].decode(errors="replace").split("\n")]
        return [line for line in lines if line and not self._is_result(line)]

    def _is_result(self, line: str) -> bool:
        if not line.startswith("{"):
            return False
        try:
            self.result = json.loads(line)
        except ValueError:
            return False
        return True
