"""The replica pool: least-loaded dispatch behind a gate per replica, and deaths that are noticed and named."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import aiohttp

from pa_core.config import EngineConfig
from pa_core.errors import EngineError, StoreError
from pa_core.rollout.client import PROBE_TIMEOUT_S, HttpReplicaClient, ReplicaClient, ReplicaLost
from pa_core.rollout.process import ChildProcess
from pa_core.rollout.protocol import GenerateRequest, GenerateResponse, VersionMismatch
from pa_core.store.objects import ObjectStore
from pa_core.store.registry import ReplicaRecord, ReplicaRegistry
from pa_core.store.weights import WeightStore

logger = logging.getLogger(__name__)

T = TypeVar("T")

POLL_S = 0.5
"""Seconds between two looks at processes and heartbeats."""

MAX_BROKEN_CONNECTIONS = 3
"""Times per replica that one group is sent again over a connection that broke although the replica lives."""


@dataclass(frozen=True)
class LoadAck:
    """A replica's word that it has loaded a version; times are seconds since the epoch."""

    replica: str
    version: int
    weights_sha256: str
    started_at: float
    ended_at: float


@dataclass
class _Replica:
    """What the pool knows of one replica."""

    id: str
    process: ChildProcess | None
    client: ReplicaClient | None = None
    version: int | None = None
    loading: int | None = None
    in_flight: int = 0
    heartbeat: float = 0.0
    heard_at: float = 0.0
    state: str = "not announced"
    refused: str | None = None
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    death: asyncio.Future[str] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def alive(self) -> bool:
        return not self.death.done()

    def status(self) -> str:
        """One phrase for messages."""
        if not self.alive:
            return f"replica {self.id} is dead: {self.death.result()}"
        if self.loading is not None:
            return f"replica {self.id} is loading version {self.loading}"
        if self.refused is not None:
            return f"replica {self.id} failed to load: {self.refused}"
        return f"replica {self.id} is {self.state} with version {self.version}"


@dataclass
class _Waiter:
    version: int
    future: asyncio.Future[_Replica]


class ReplicaPool:
    """All replicas of a run, seen from the producer's event loop.

    A replica is *eligible* for a version from the moment it acknowledged that version and its digest: the gate is
    one per replica and no barrier. Every method belongs to one event loop; :attr:`versions`, :attr:`in_flight` and
    :attr:`dead` may be read from any thread.

    Args:
        store: the run's folder.
        replica_ids: which replicas to expect.
        api_key: the run's key.
        config: batch size and deadlines.
        processes: child processes by replica id, where this program started them.
    """

    def __init__(
        self,
        store: ObjectStore,
        replica_ids: Sequence[str],
        api_key: str,
        config: EngineConfig,
        processes: Mapping[str, ChildProcess] | None = None,
    ) -> None:
        self._registry = ReplicaRegistry(store)
        self._weights = WeightStore(store)
        self._ids = list(replica_ids)
        self._api_key = api_key
        self._config = config
        self._processes = dict(processes or {})
        self._limit = 2 * config.batch_groups
        self._replicas: dict[str, _Replica] = {}
        self._waiters: deque[_Waiter] = deque()
        self._target: int | None = None
        self._progress_at = 0.0
        self._session: aiohttp.ClientSession | None = None
        self._monitor: asyncio.Task[None] | None = None

    @property
    def versions(self) -> dict[str, int | None]:
        """Loaded version of each living replica; None before its first load and while it loads."""
        return {replica.id: replica.version for replica in list(self._replicas.values()) if replica.alive}

    @property
    def in_flight(self) -> dict[str, int]:
        """Groups dispatched to each living replica and not yet answered."""
        return {replica.id: replica.in_flight for replica in list(self._replicas.values()) if replica.alive}

    @property
    def queued(self) -> int:
        """Groups that wait for a replica to have room."""
        return len(self._waiters)

    @property
    def dead(self) -> dict[str, str]:
        """Why each dead replica counts as dead."""
        return {replica.id: replica.death.result() for replica in list(self._replicas.values()) if not replica.alive}

    async def start(self) -> None:
        """Wait until every replica serves.

        Raises:
            EngineError: a replica died at start (exit code and the end of its log are named), or is not there after
                ``engine.startup_timeout_s``.
        """
        self._replicas = {name: _Replica(name, self._processes.get(name)) for name in self._ids}
        for replica in self._replicas.values():
            replica.idle.set()
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5.0)
        self._session = aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))
        try:
            async with asyncio.timeout(self._config.startup_timeout_s):
                while waiting := [replica for replica in self._replicas.values() if replica.client is None]:
                    await asyncio.gather(*(self._look_at_start(replica) for replica in waiting))
                    await asyncio.sleep(0.1)
        except TimeoutError:
            missing = [replica for replica in self._replicas.values() if replica.client is None]
            reasons = "; ".join(self._with_log(replica, replica.status()) for replica in missing)
            await self.close()
            raise EngineError(
                f"not every replica serves after engine.startup_timeout_s={self._config.startup_timeout_s:g} s: "
                f"{reasons}"
            ) from None
        except BaseException:
            await self.close()
            raise
        self._monitor = asyncio.create_task(self._watch(), name="replica-monitor")

    async def load(self, version: int) -> list[LoadAck]:
        """Have every living replica load ``version``; each becomes eligible the moment it acknowledges.

        May run beside :meth:`generate`, whose calls for ``version`` wait for the first replica. A replica that fails
        gets no work until a later load succeeds, and holds nobody up.

        Returns:
            The acknowledgements, in the order they came.

        Raises:
            EngineError: no replica has loaded the version.
            StoreError: the version is not published.
        """
        self._target = version
        self._progress_at = asyncio.get_running_loop().time()
        living = self._living()
        for replica in living:
            # From here on nothing new goes to the replica, so its requests in flight drain.
            replica.version, replica.loading, replica.refused = None, version, None
        try:
            manifest = await asyncio.to_thread(self._weights.manifest, version)
            if manifest is None:
                raise StoreError(f"policy version {version} is not published, so no replica can load it")
            acks: list[LoadAck] = []
            await asyncio.gather(
                *(self._load_one(replica, version, manifest.weights_sha256, acks) for replica in living)
            )
        finally:
            for replica in living:
                replica.loading = None
            self._dispatch()
        if not acks:
            raise self._none_left(f"no replica has loaded policy version {version}")
        return acks

    async def generate(self, request: GenerateRequest) -> GenerateResponse:
        """Generate a group on the least loaded eligible replica; another one takes over when it dies.

        Raises:
            EngineError: no replica is left that could serve the request, with the cause for each.
        """
        attempts: set[str] = set()
        broken = 0
        while True:
            replica = await self._acquire(request.version)
            try:
                return await self._run(replica, request)
            except ReplicaLost as error:
                broken += 1
                if broken > MAX_BROKEN_CONNECTIONS * len(self._replicas):
                    raise
                logger.warning("group %s is dispatched again: %s", request.group_id, error)
            except VersionMismatch as error:
                if replica.version == request.version:
                    replica.version, replica.refused = None, str(error)
                logger.warning("replica %s is out of the gate: %s", replica.id, error)
            except EngineError as error:
                attempts.add(replica.id)
                if attempts >= {other.id for other in self._living() if other.version == request.version}:
                    raise
                logger.warning("group %s is dispatched again: %s", request.group_id, error)
            finally:
                replica.in_flight -= 1
                if not replica.in_flight:
                    replica.idle.set()
                self._progress_at = asyncio.get_running_loop().time()
                self._dispatch()

    async def close(self) -> None:
        """End the monitor, fail what still waits, and close the connections. Processes are not touched."""
        if self._monitor is not None:
            self._monitor.cancel()
            await asyncio.gather(self._monitor, return_exceptions=True)
            self._monitor = None
        self._fail_waiters(lambda waiter: EngineError("the replica pool was closed"))
        if self._session is not None:
            await self._session.close()
            self._session = None

    # -- start and load

    async def _look_at_start(self, replica: _Replica) -> None:
        """Take a replica in once its own record says that it is ready."""
        if replica.process is not None and (code := replica.process.poll()) is not None:
            raise EngineError(self._with_log(replica, f"replica {replica.id} died at start ({_exit(code)})"))
        record = await self._fresh_record(replica)
        if record is None:
            return
        replica.state = record.state
        if record.state == "ready" and self._session is not None:
            replica.client = HttpReplicaClient(self._session, replica.id, record.url, self._api_key)
            logger.info("replica %s serves at %s", replica.id, record.url)

    async def _fresh_record(self, replica: _Replica) -> ReplicaRecord | None:
        """The replica's record if it is alive; notes when a heartbeat was last seen to change, by this clock."""
        try:
            record = await asyncio.to_thread(self._registry.read, replica.id)
        except StoreError as error:
            logger.warning("the record of replica %s cannot be read: %s", replica.id, error)
            return None
        # A record of an earlier process of the same run is not this replica's.
        if record is None or (replica.process is not None and record.pid != replica.process.pid):
            return None
        first = replica.heartbeat == 0.0
        if record.heartbeat != replica.heartbeat:
            replica.heartbeat, replica.heard_at = record.heartbeat, time.monotonic()
        # Whose process is unknown must be seen to beat once: an old record never changes.
        return None if first and replica.process is None else record

    async def _load_one(self, replica: _Replica, version: int, digest: str, acks: list[LoadAck]) -> None:
        started = time.time()
        try:
            async with asyncio.timeout(self._config.request_timeout_s):
                await self._until_death(replica, replica.idle.wait())
                assert replica.client is not None and not replica.in_flight
                got = await self._until_death(replica, replica.client.load(version))
        except TimeoutError:
            self._declare_dead(
                replica,
                f"it did not load version {version} within engine.request_timeout_s="
                f"{self._config.request_timeout_s:g} s",
            )
        except ReplicaLost as error:
            await self._connection_lost(replica, error)
        except EngineError as error:
            replica.refused = str(error)
            logger.warning("replica %s gets no work: it failed to load version %s: %s", replica.id, version, error)
        else:
            if got == digest:
                replica.version = version
                acks.append(LoadAck(replica.id, version, got, started, time.time()))
            else:
                replica.refused = f"its weights have digest {got}, version {version} has {digest}"
                logger.warning("replica %s gets no work: %s", replica.id, replica.refused)
        replica.loading = None
        self._progress_at = asyncio.get_running_loop().time()
        self._dispatch()

    # -- dispatch

    def _living(self) -> list[_Replica]:
        return [replica for replica in self._replicas.values() if replica.alive]

    async def _acquire(self, version: int) -> _Replica:
        """The least loaded eligible replica with room, first come first served; its count is already raised."""
        waiter = _Waiter(version, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        if len(self._waiters) == 1:
            self._progress_at = asyncio.get_running_loop().time()
        self._dispatch()
        try:
            return await waiter.future
        except asyncio.CancelledError:
            if waiter.future.done() and not waiter.future.cancelled() and waiter.future.exception() is None:
                replica = waiter.future.result()
                replica.in_flight -= 1
                if not replica.in_flight:
                    replica.idle.set()
            elif waiter in self._waiters:
                self._waiters.remove(waiter)
            self._dispatch()
            raise

    def _dispatch(self) -> None:
        """Give waiting groups to replicas with room, in order; fail those that no replica will ever serve."""
        for waiter in list(self._waiters):
            if waiter.future.done():
                self._waiters.remove(waiter)
                continue
            eligible = [
                replica
                for replica in self._living()
                if replica.version == waiter.version and replica.in_flight < self._limit
            ]
            if eligible:
                replica = min(eligible, key=lambda candidate: candidate.in_flight)
                replica.in_flight += 1
                replica.idle.clear()
                self._waiters.remove(waiter)
                waiter.future.set_result(replica)
        self._fail_waiters(self._hopeless)

    def _hopeless(self, waiter: _Waiter) -> EngineError | None:
        """Why a waiting group can never be served, if so."""
        living = self._living()
        if not living:
            return self._none_left("no replica is left")
        # Another version than the one asked for last may still be on its way.
        if waiter.version == self._target and not any(
            waiter.version in (replica.version, replica.loading) for replica in living
        ):
            return self._none_left(f"no living replica has policy version {waiter.version}")
        return None

    def _fail_waiters(self, verdict: Callable[[_Waiter], EngineError | None]) -> None:
        for waiter in list(self._waiters):
            error = verdict(waiter)
            if error is not None:
                self._waiters.remove(waiter)
                if not waiter.future.done():
                    waiter.future.set_exception(error)

    async def _run(self, replica: _Replica, request: GenerateRequest) -> GenerateResponse:
        """One attempt. Raises ReplicaLost when the replica dies or misses its deadline."""
        assert replica.client is not None
        try:
            async with asyncio.timeout(self._config.request_timeout_s):
                return await self._until_death(replica, replica.client.generate(request))
        except TimeoutError:
            cause = (
                f"it did not answer group {request.group_id} within engine.request_timeout_s="
                f"{self._config.request_timeout_s:g} s"
            )
            self._declare_dead(replica, cause)
            raise ReplicaLost(f"replica {replica.id}: {cause}") from None
        except ReplicaLost as error:
            await self._connection_lost(replica, error)
            raise

    # -- life and death

    async def _until_death(self, replica: _Replica, work: Coroutine[Any, Any, T]) -> T:
        """Await ``work``, but no longer than the replica lives; then raise ReplicaLost."""
        task = asyncio.create_task(work)
        waited: set[asyncio.Future[Any]] = {task, replica.death}
        try:
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise ReplicaLost(f"replica {replica.id} died: {replica.death.result()}")
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def _connection_lost(self, replica: _Replica, error: ReplicaLost) -> None:
        """A broken connection is a death unless the replica still answers."""
        if not replica.alive:
            return
        for _ in range(3):
            if replica.process is not None and (code := replica.process.poll()) is not None:
                self._declare_dead(replica, f"its process ended ({_exit(code)})")
                return
            if replica.client is not None and await replica.client.alive():
                return
            await asyncio.sleep(0.2)
        self._declare_dead(replica, str(error))

    def _declare_dead(self, replica: _Replica, cause: str) -> None:
        """Take a replica out for good; what was in flight there is dispatched again by its callers."""
        if not replica.alive:
            return
        replica.version = None
        replica.death.set_result(self._with_log(replica, cause))
        logger.error("replica %s is dead: %s", replica.id, replica.death.result())
        if replica.process is not None:
            # A stopped or hung process would keep its cores and could come back with old weights.
            replica.process.signal(signal.SIGKILL)
        self._dispatch()

    async def _watch(self) -> None:
        """Look after processes, heartbeats and waiting groups until closed."""
        for replica in self._replicas.values():
            replica.heard_at = time.monotonic()
        while True:
            await asyncio.gather(*(self._check(replica) for replica in self._living()))
            self._check_progress()
            await asyncio.sleep(POLL_S)

    async def _check(self, replica: _Replica) -> None:
        if replica.process is not None and (code := replica.process.poll()) is not None:
            self._declare_dead(replica, f"its process ended ({_exit(code)})")
            return
        await self._fresh_record(replica)
        limit = self._config.heartbeat_timeout_s
        silence = time.monotonic() - replica.heard_at
        if limit / 2 < silence <= limit and replica.client is not None:
            # The store may be what is slow: a replica that answers is alive.
            if await replica.client.alive(min(PROBE_TIMEOUT_S, limit - silence)):
                replica.heard_at = time.monotonic()
        elif silence > limit:
            self._declare_dead(
                replica,
                f"no heartbeat for {silence:.1f} s (engine.heartbeat_timeout_s={self._config.heartbeat_timeout_s:g})",
            )

    def _check_progress(self) -> None:
        """Fail groups that wait although nothing has been loaded or answered for longer than anything may take."""
        limit = self._config.request_timeout_s + self._config.startup_timeout_s
        if asyncio.get_running_loop().time() - self._progress_at > limit:
            self._fail_waiters(
                lambda waiter: self._none_left(f"no replica took a group of version {waiter.version} for {limit:g} s")
            )

    def _none_left(self, what: str) -> EngineError:
        reasons = "; ".join(replica.status() for replica in self._replicas.values())
        return EngineError(f"{what}: {reasons}")

    @staticmethod
    def _with_log(replica: _Replica, what: str) -> str:
        if replica.process is None:
            return what
        return f"{what}; the end of its log {replica.process.log_path}:\n{replica.process.tail()}\n"


def _exit(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
