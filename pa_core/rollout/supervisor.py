"""Looks after processes: one that ends by itself is started again, a few times; the registry tells who will return."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pa_core.errors import EngineError, StoreError
from pa_core.rollout.config import EngineConfig
from pa_core.store.registry import GIVEN_UP, RESTARTING, ReplicaRecord, ReplicaRegistry

if TYPE_CHECKING:
    from pa_core.rollout.process import ChildProcess

logger = logging.getLogger(__name__)

POLL_S = 0.2
CONDEMNED_POLL_S = 1.0
BAD_INPUT = 2


def exit_phrase(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


class Supervisor(Mapping[str, "ChildProcess"]):
    """The current process of each replica, kept running by one thread. Readable from any thread.

    ================== ===============================================================
    a process ends     then
    ================== ===============================================================
    with exit code 0   it was asked to stop: it has left
    with exit code 2   given up at once: bad input stays bad
    otherwise          started again after a pause that doubles, or given up at last
    ================== ===============================================================

    Args:
        start: starts the process of a replica.
        config: how often and how fast to start again.
        registry: where the trainer's pool, which may be in another process, learns what became of a replica.
    """

    def __init__(self, start: Callable[[str], ChildProcess], config: EngineConfig, registry: ReplicaRegistry) -> None:
        self._start = start
        self._config = config
        self._registry = registry
        self._lock = threading.Lock()
        self._processes: dict[str, ChildProcess] = {}
        self._due: dict[str, float] = {}
        self._restarts: dict[str, int] = {}
        self._given_up: dict[str, str] = {}
        self._left: set[str] = set()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="replica-supervisor", daemon=True)

    def __getitem__(self, replica_id: str) -> ChildProcess:
        with self._lock:
            return self._processes[replica_id]

    def __iter__(self) -> Iterator[str]:
        with self._lock:
            return iter(list(self._processes))

    def __len__(self) -> int:
        with self._lock:
            return len(self._processes)

    @property
    def given_up(self) -> dict[str, str]:
        """Replicas that are not started again, with how they ended and the end of their log."""
        with self._lock:
            return dict(self._given_up)

    @property
    def restarts(self) -> dict[str, int]:
        """How often each replica was started again."""
        with self._lock:
            return dict(self._restarts)

    @property
    def left(self) -> set[str]:
        """Replicas that were asked to stop by somebody else, and did."""
        with self._lock:
            return set(self._left)

    def may_return(self, replica_id: str) -> bool:
        """Whether the replica runs or will be started again."""
        with self._lock:
            over = replica_id in self._given_up or replica_id in self._left or self._stopping.is_set()
            return replica_id in self._processes and not over

    def begin(self, replica_ids: Sequence[str]) -> None:
        """Start all processes and look after them. Raises :class:`EngineError` when one cannot be started at all."""
        for replica_id in replica_ids:
            self._spawn(replica_id)
        self._thread.start()

    def end(self) -> list[ChildProcess]:
        """Look after nothing any more: from now on no process is started. Returns those to stop."""
        self._stopping.set()
        with self._lock:
            return list(self._processes.values())

    def _spawn(self, replica_id: str) -> None:
        with self._lock:  # against end(): a process started after it would be nobody's
            if not self._stopping.is_set():
                self._processes[replica_id] = self._start(replica_id)
                self._restarts.setdefault(replica_id, 0)

    def _watch(self) -> None:
        look_for_condemned = 0.0
        while not self._stopping.wait(POLL_S):
            condemned_too = time.monotonic() >= look_for_condemned
            if condemned_too:
                look_for_condemned = time.monotonic() + CONDEMNED_POLL_S
            for replica_id in self:
                # One look that fails must not end the watch: the others would stay dead.
                try:
                    self._look(replica_id, condemned_too)
                except StoreError as error:
                    logger.warning("looking after replica %s: %s", replica_id, error)
                except Exception:
                    logger.exception("looking after replica %s failed", replica_id)

    def _look(self, replica_id: str, condemned_too: bool) -> None:
        if not self.may_return(replica_id):
            return
        process, due = self[replica_id], self._due.get(replica_id)
        if due is not None:
            if time.monotonic() >= due:
                self._due.pop(replica_id)
                self._start_again(replica_id)
        elif (code := process.poll()) is not None:
            process.stop(0.0)  # what it started itself must not outlive it
            self._ended(replica_id, process, code)
        elif condemned_too and self._is_condemned(replica_id, process):
            logger.warning("replica %s is ended, because the trainer holds it for hung", replica_id)
            process.signal(signal.SIGKILL)

    def _is_condemned(self, replica_id: str, process: ChildProcess) -> bool:
        record = self._registry.read(replica_id)
        return record is not None and record.pid == process.pid and self._registry.is_condemned(record)

    def _ended(self, replica_id: str, process: ChildProcess, code: int) -> None:
        if code == 0:
            with self._lock:
                self._left.add(replica_id)
            logger.info("replica %s was asked to stop and has left", replica_id)
            return
        log = f"the end of its log {process.log_path}:\n{process.tail()}\n"
        if code == BAD_INPUT:
            self._give_up(replica_id, f"({exit_phrase(code)}), which no restart mends; {log}")
            return
        count = self._restarts[replica_id]
        if count >= self._config.max_restarts:
            used = f"engine.max_restarts={self._config.max_restarts} restarts are used up"
            self._give_up(replica_id, f"({exit_phrase(code)}) and {used}; {log}")
            return
        pause = self._config.restart_delay_s * 2**count
        with self._lock:
            self._restarts[replica_id] = count + 1
        self._due[replica_id] = time.monotonic() + pause
        plan = f"restart {count + 1} of {self._config.max_restarts} in {pause:g} s"
        logger.warning("replica %s ended by itself (%s); %s; %s", replica_id, exit_phrase(code), plan, log)
        self._tell(replica_id, RESTARTING, f"its process ended ({exit_phrase(code)}); {plan}")

    def _start_again(self, replica_id: str) -> None:
        try:
            self._spawn(replica_id)
        except EngineError as error:
            self._give_up(replica_id, f"and cannot be started again: {error}")

    def _give_up(self, replica_id: str, cause: str) -> None:
        with self._lock:
            self._given_up[replica_id] = cause
        logger.error("replica %s is given up: it died %s", replica_id, cause)
        self._tell(replica_id, GIVEN_UP, cause)

    def _tell(self, replica_id: str, state: str, detail: str) -> None:
        """Write the record on behalf of a process that has ended."""
        registry, pid = self._registry, self[replica_id].pid
        record = registry.read(replica_id)
        if record is None or record.pid != pid:
            engine = self._config.kind
            record = ReplicaRecord(replica_id, url="", version=None, pid=pid, state=state, engine=engine)
        registry.announce(replace(record, version=None, state=state, detail=detail, heartbeat=time.time()))
