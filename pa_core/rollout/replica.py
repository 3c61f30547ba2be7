"""What the pool knows of one replica: how to talk to it, what it has loaded, and whether it lives."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from pa_core.rollout.client import PROBE_TIMEOUT_S, ReplicaClient, ReplicaLost
from pa_core.rollout.process import ChildProcess
from pa_core.rollout.supervisor import exit_phrase
from pa_core.store.registry import ReplicaRecord

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Replica:
    """One member of a pool: a process that serves, from the moment it joined. Belongs to one event loop.

    A process that was started again under the same id is another object.

    Attributes:
        version: the version it acknowledged: the gate. None before the first load, while loading, when gone.
        loading: the version it is asked to load, if any.
        refused: why its last load failed, if it did.
        load_lock: held while it loads; a later version waits for it.
        groups: ids of the groups dispatched and not yet answered.
        idle: set while there are none.
        leaving: it withdrew: it gets no new work, and its end is no failure.
        silent: it died of silence alone, so it may turn out to live.
        mismatched: the version it was last asked for and did not have, although it had acknowledged it.
        died_at: when it died, by the monotonic clock.
    """

    def __init__(
        self,
        replica_id: str,
        client: ReplicaClient,
        record: ReplicaRecord,
        process: ChildProcess | None,
        on_end: Callable[[Replica], None],
    ) -> None:
        self.id = replica_id
        self.client = client
        self.record = record
        self.version: int | None = None
        self.loading: int | None = None
        self.refused: str | None = None
        self.load_lock = asyncio.Lock()
        self.groups: list[str] = []
        self.idle = asyncio.Event()
        self.idle.set()
        self.leaving = False
        self.silent = False
        self.mismatched: int | None = None
        self.died_at = 0.0
        self._process = process
        self._on_end = on_end
        self._heard_at = time.monotonic()
        self._death: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def alive(self) -> bool:
        """Whether it has not been declared dead."""
        return not self._death.done()

    @property
    def serves(self) -> bool:
        """Whether it lives and takes new work."""
        return self.alive and not self.leaving

    @property
    def in_flight(self) -> int:
        """Groups dispatched and not yet answered."""
        return len(self.groups)

    @property
    def cause(self) -> str | None:
        """Why it is dead, with the end of its log where there is one."""
        return self._death.result() if self._death.done() else None

    def status(self) -> str:
        """One phrase for messages."""
        if self.leaving:
            return f"replica {self.id} is gone, because it withdrew"
        if not self.alive:
            return f"replica {self.id} is dead: {self.cause}"
        if self.loading is not None:
            return f"replica {self.id} is loading version {self.loading}"
        if self.refused is not None:
            return f"replica {self.id} failed to load: {self.refused}"
        return f"replica {self.id} is {self.record.state} with version {self.version}"

    def take(self, group_id: str) -> None:
        """Count one more group in flight."""
        self.groups.append(group_id)
        self.idle.clear()

    def release(self, group_id: str) -> None:
        """Count one group less in flight."""
        self.groups.remove(group_id)
        if not self.groups:
            self.idle.set()

    def heard(self, record: ReplicaRecord) -> None:
        """Note its latest record."""
        if record.heartbeat != self.record.heartbeat:
            # By this clock: those of other machines may differ.
            self._heard_at = time.monotonic()
        self.record = record

    def check_process(self) -> None:
        """Declare it dead when its process has ended, or gone when it ended as one does that was told to stop."""
        if self._process is not None and self.alive and (code := self._process.poll()) is not None:
            if code == 0:
                self.leave()
            self.die(f"its process ended ({exit_phrase(code)})")

    async def check_silence(self, heartbeat_timeout_s: float) -> None:
        """Declare it dead when nothing was heard of it for too long and it does not answer either."""
        silence = time.monotonic() - self._heard_at
        if not self.alive:
            return
        if silence > heartbeat_timeout_s:
            self.silent = True
            self.die(f"no heartbeat for {silence:.1f} s (engine.heartbeat_timeout_s={heartbeat_timeout_s:g})")
        # The store may be what is slow: a replica that answers is alive.
        elif silence > heartbeat_timeout_s / 2 and await self.client.alive(
            min(PROBE_TIMEOUT_S, heartbeat_timeout_s - silence)
        ):
            self._heard_at = time.monotonic()

    async def until_death(self, work: Coroutine[Any, Any, T]) -> T:
        """Await ``work``, but no longer than the replica lives; then raise :class:`ReplicaLost`."""
        task = asyncio.create_task(work)
        waited: set[asyncio.Future[Any]] = {task, self._death}
        try:
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise ReplicaLost(f"replica {self.id} died: {self.cause}")
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def connection_lost(self, error: ReplicaLost, look: Callable[[Replica], Awaitable[None]]) -> None:
        """A broken connection is a death unless the replica still answers, or has withdrawn, as ``look`` finds out."""
        for _ in range(3):
            self.check_process()
            if not self.alive or await self.client.alive():
                return
            await look(self)
            if self.leaving:
                break
            await asyncio.sleep(0.2)
        self.silent = True
        self.die(str(error))

    def leave(self) -> None:
        """It withdrew: no new work from now on; what is in flight may finish."""
        if not self.serves:
            return
        self.leaving, self.version, self.loading = True, None, None
        logger.info("replica %s has withdrawn and leaves; %d groups in flight", self.id, self.in_flight)
        self._on_end(self)

    def die(self, cause: str) -> None:
        """Take it out for good; whoever waits in :meth:`until_death` gets :class:`ReplicaLost`."""
        if not self.alive:
            return
        self.version, self.died_at = None, time.monotonic()
        if self.leaving:
            self._death.set_result(cause)
        else:
            self._death.set_result(self._with_log(cause))
            logger.error("replica %s is dead: %s", self.id, self.cause)
            if self._process is not None:
                # A stopped or hung process would keep its cores, and could come back with old weights.
                self._process.signal(signal.SIGKILL)
        self._on_end(self)

    def _with_log(self, what: str) -> str:
        if self._process is None:
            return what
        return f"{what}; the end of its log {self._process.log_path}:\n{self._process.tail()}\n"
