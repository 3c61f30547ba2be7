"""What the pool knows of one replica: where it is, what it has loaded, and whether it lives."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import aiohttp

from pa_core.errors import EngineError, StoreError
from pa_core.rollout.client import PROBE_TIMEOUT_S, HttpReplicaClient, ReplicaClient, ReplicaLost
from pa_core.rollout.process import ChildProcess
from pa_core.store.registry import ReplicaRecord, ReplicaRegistry

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Replica:
    """One member of a pool. Belongs to one event loop.

    Attributes:
        client: how to talk to it; None until it serves.
        version: the version it acknowledged: the gate. None before the first load, while loading, when dead.
        loading: the version it is asked to load, if any.
        refused: why its last load failed, if it did.
        load_lock: held while it loads; a later version waits for it.
        in_flight: groups dispatched and not yet answered.
        idle: set while nothing is in flight.
    """

    def __init__(
        self,
        replica_id: str,
        process: ChildProcess | None,
        registry: ReplicaRegistry,
        on_death: Callable[[], None],
    ) -> None:
        self.id = replica_id
        self.client: ReplicaClient | None = None
        self.version: int | None = None
        self.loading: int | None = None
        self.refused: str | None = None
        self.load_lock = asyncio.Lock()
        self.in_flight = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self._process = process
        self._registry = registry
        self._on_death = on_death
        self._state = "not announced"
        self._heartbeat = 0.0
        self._heard_at = 0.0
        self._death: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def alive(self) -> bool:
        """Whether it has not been declared dead."""
        return not self._death.done()

    @property
    def cause(self) -> str | None:
        """Why it is dead, with the end of its log where there is one."""
        return self._death.result() if self._death.done() else None

    def status(self) -> str:
        """One phrase for messages."""
        if not self.alive:
            return f"replica {self.id} is dead: {self.cause}"
        if self.loading is not None:
            return f"replica {self.id} is loading version {self.loading}"
        if self.refused is not None:
            return f"replica {self.id} failed to load: {self.refused}"
        return f"replica {self.id} is {self._state}" + ("" if self.client is None else f" with version {self.version}")

    def take(self) -> None:
        """Count one more group in flight."""
        self.in_flight += 1
        self.idle.clear()

    def release(self) -> None:
        """Count one group less in flight."""
        self.in_flight -= 1
        if not self.in_flight:
            self.idle.set()

    def with_log(self, what: str) -> str:
        """A message, followed by the end of the replica's log."""
        if self._process is None:
            return what
        return f"{what}; the end of its log {self._process.log_path}:\n{self._process.tail()}\n"

    async def join(self, session: aiohttp.ClientSession, api_key: str) -> None:
        """One look at whether it serves by now; then ``client`` is set.

        Raises:
            EngineError: its process has ended.
        """
        if self._process is not None and (code := self._process.poll()) is not None:
            raise EngineError(self.with_log(f"replica {self.id} died at start ({exit_phrase(code)})"))
        record = await self._record()
        if record is None:
            return
        self._state = record.state
        if record.state != "ready":
            return
        client = HttpReplicaClient(session, self.id, record.url, api_key)
        # The record may be all that is left of a replica that somebody else ran.
        if not await client.alive():
            self._state = f"announced, but does not answer at {record.url}"
            return
        self.client = client
        self._heard_at = time.monotonic()
        logger.info("replica %s serves at %s", self.id, record.url)

    async def check(self, heartbeat_timeout_s: float) -> None:
        """Declare it dead when its process has ended or nothing was heard of it for too long."""
        if self._process is not None and (code := self._process.poll()) is not None:
            self.die(f"its process ended ({exit_phrase(code)})")
            return
        await self._record()
        silence = time.monotonic() - self._heard_at
        if silence > heartbeat_timeout_s:
            self.die(f"no heartbeat for {silence:.1f} s (engine.heartbeat_timeout_s={heartbeat_timeout_s:g})")
        # The store may be what is slow: a replica that answers is alive.
        elif (
            silence > heartbeat_timeout_s / 2
            and self.client is not None
            and await self.client.alive(min(PROBE_TIMEOUT_S, heartbeat_timeout_s - silence))
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

    async def connection_lost(self, error: ReplicaLost) -> None:
        """A broken connection is a death unless the replica still answers."""
        for _ in range(3):
            if not self.alive:
                return
            if self._process is not None and (code := self._process.poll()) is not None:
                self.die(f"its process ended ({exit_phrase(code)})")
                return
            if self.client is not None and await self.client.alive():
                return
            await asyncio.sleep(0.2)
        self.die(str(error))

    def die(self, cause: str) -> None:
        """Take it out for good; whoever waits in :meth:`until_death` gets :class:`ReplicaLost`."""
        if not self.alive:
            return
        self.version = None
        self._death.set_result(self.with_log(cause))
        logger.error("replica %s is dead: %s", self.id, self.cause)
        if self._process is not None:
            # A stopped or hung process would keep its cores, and could come back with old weights.
            self._process.signal(signal.SIGKILL)
        self._on_death()

    async def _record(self) -> ReplicaRecord | None:
        """Its record, if it has one; notes when a heartbeat was last seen to change."""
        try:
            record = await asyncio.to_thread(self._registry.read, self.id)
        except StoreError as error:
            logger.warning("the record of replica %s cannot be read: %s", self.id, error)
            return None
        # A record of an earlier process of the same run is not this replica's.
        if record is None or (self._process is not None and record.pid != self._process.pid):
            return None
        if record.heartbeat != self._heartbeat:
            # By this clock: those of other machines may differ.
            self._heartbeat, self._heard_at = record.heartbeat, time.monotonic()
        return record


def exit_phrase(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
