"""The replica pool: least-loaded dispatch behind a gate per replica, and deaths that are noticed and named."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import aiohttp

from pa_core.config import EngineConfig
from pa_core.errors import EngineError
from pa_core.rollout.client import ReplicaLost
from pa_core.rollout.process import ChildProcess
from pa_core.rollout.protocol import GenerateRequest, GenerateResponse, VersionMismatch
from pa_core.rollout.replica import Replica
from pa_core.store.objects import ObjectStore
from pa_core.store.registry import ReplicaRegistry
from pa_core.store.weights import WeightStore

logger = logging.getLogger(__name__)

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
class _Waiter:
    """A group that wants a replica, but none that already failed it (cause by replica id)."""

    version: int
    failures: dict[str, EngineError]
    future: asyncio.Future[Replica]

    def accepts(self, replica: Replica) -> bool:
        return replica.alive and replica.version == self.version and replica.id not in self.failures

    def may_accept(self, replica: Replica) -> bool:
        return self.accepts(replica) or (replica.alive and replica.loading == self.version)


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
        self._replicas: dict[str, Replica] = {}
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
        return {replica.id: replica.cause or "" for replica in list(self._replicas.values()) if not replica.alive}

    async def start(self) -> None:
        """Wait until every replica serves.

        Raises:
            EngineError: a replica died at start (exit code and the end of its log are named), or is not there after
                ``engine.startup_timeout_s``.
        """
        self._replicas = {
            name: Replica(name, self._processes.get(name), self._registry, self._dispatch) for name in self._ids
        }
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5.0)
        self._session = aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))
        try:
            async with asyncio.timeout(self._config.startup_timeout_s):
                while waiting := [replica for replica in self._replicas.values() if replica.client is None]:
                    await asyncio.gather(*(replica.join(self._session, self._api_key) for replica in waiting))
                    await asyncio.sleep(0.1)
        except TimeoutError:
            missing = [replica for replica in self._replicas.values() if replica.client is None]
            reasons = "; ".join(replica.with_log(replica.status()) for replica in missing)
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
        """Have every living replica load ``version``, unless it has; each becomes eligible when it acknowledges.

        May run beside :meth:`generate`, whose calls for ``version`` wait for the first replica. A replica that fails
        gets no work until a later load succeeds; a slow one that is asked for a later version meanwhile goes on with
        that. Neither holds the others up.

        Returns:
            The acknowledgements, in the order they came.

        Raises:
            EngineError: no replica has loaded the version.
            StoreError: the version is not published.
        """
        self._target = version
        self._progress_at = asyncio.get_running_loop().time()
        # A version never changes, so whoever has it keeps it.
        behind = [replica for replica in self._living() if replica.version != version]
        for replica in behind:
            # From here on nothing new goes to the replica, so its requests in flight drain.
            replica.version, replica.loading, replica.refused = None, version, None
        try:
            manifest = await asyncio.to_thread(self._weights.require, version)
            acks: list[LoadAck] = []
            await asyncio.gather(
                *(self._load_one(replica, version, manifest.weights_sha256, acks) for replica in behind)
            )
        finally:
            for replica in behind:
                if replica.loading == version:
                    replica.loading = None
            self._dispatch()
        if self._target == version and not any(replica.version == version for replica in self._living()):
            raise self._none_left(f"no replica has loaded policy version {version}")
        return acks

    async def generate(self, request: GenerateRequest) -> GenerateResponse:
        """Generate a group on the least loaded eligible replica; another one takes over when it dies.

        Raises:
            EngineError: no replica is left that could serve the request, with the cause for each.
        """
        failures: dict[str, EngineError] = {}
        broken = 0
        while True:
            replica = await self._acquire(request.version, failures)
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
                failures[replica.id] = error
                logger.warning("group %s is dispatched again: %s", request.group_id, error)
            finally:
                replica.release()
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

    async def _load_one(self, replica: Replica, version: int, digest: str, acks: list[LoadAck]) -> None:
        """Load one replica, unless it is asked for a later version before its turn comes."""
        started = time.time()
        limit = self._config.request_timeout_s
        got: str | None = None
        async with replica.load_lock:
            if not replica.alive or replica.loading != version:
                return
            try:
                async with asyncio.timeout(limit):
                    await replica.until_death(replica.idle.wait())
                    assert replica.client is not None and not replica.in_flight
                    got = await replica.until_death(replica.client.load(version))
                if got != digest:
                    raise EngineError(f"its weights have digest {got}, version {version} has {digest}")
            except TimeoutError:
                replica.die(f"it did not load version {version} within engine.request_timeout_s={limit:g} s")
            except EngineError as error:
                if isinstance(error, ReplicaLost):
                    await replica.connection_lost(error)
                if replica.alive and replica.loading == version:
                    replica.refused = str(error)
                    logger.warning("replica %s gets no work: it failed to load %s: %s", replica.id, version, error)
            else:
                acks.append(LoadAck(replica.id, version, got, started, time.time()))
        if replica.loading == version:
            replica.version = version if got == digest else None
            replica.loading = None
        self._progress_at = asyncio.get_running_loop().time()
        self._dispatch()

    # -- dispatch

    def _living(self) -> list[Replica]:
        return [replica for replica in self._replicas.values() if replica.alive]

    async def _acquire(self, version: int, failures: dict[str, EngineError]) -> Replica:
        """The least loaded eligible replica with room, first come first served; its count is already raised."""
        waiter = _Waiter(version, failures, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        if len(self._waiters) == 1:
            self._progress_at = asyncio.get_running_loop().time()
        self._dispatch()
        try:
            return await waiter.future
        except asyncio.CancelledError:
            if waiter.future.done() and not waiter.future.cancelled() and waiter.future.exception() is None:
                replica = waiter.future.result()
                replica.release()
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
                for replica in self._replicas.values()
                if waiter.accepts(replica) and replica.in_flight < self._limit
            ]
            if eligible:
                replica = min(eligible, key=lambda candidate: candidate.in_flight)
                replica.take()
                self._waiters.remove(waiter)
                waiter.future.set_result(replica)
        self._fail_waiters(self._hopeless)

    def _hopeless(self, waiter: _Waiter) -> EngineError | None:
        """Why a waiting group can never be served, if so."""
        living = self._living()
        if not living:
            return self._none_left("no replica is left")
        # A later version than the one asked for last may still come.
        coming = self._target is None or waiter.version > self._target
        if coming or any(waiter.may_accept(replica) for replica in living):
            return None
        if waiter.failures:
            return EngineError("; ".join(str(error) for error in waiter.failures.values()))
        return self._none_left(f"no living replica has policy version {waiter.version}")

    def _fail_waiters(self, verdict: Callable[[_Waiter], EngineError | None]) -> None:
        for waiter in list(self._waiters):
            error = verdict(waiter)
            if error is not None:
                self._waiters.remove(waiter)
                if not waiter.future.done():
                    waiter.future.set_exception(error)

    async def _run(self, replica: Replica, request: GenerateRequest) -> GenerateResponse:
        """One attempt. Raises ReplicaLost when the replica dies or misses its deadline."""
        assert replica.client is not None
        try:
            async with asyncio.timeout(self._config.request_timeout_s):
                return await replica.until_death(replica.client.generate(request))
        except TimeoutError:
            cause = (
                f"it did not answer group {request.group_id} within engine.request_timeout_s="
                f"{self._config.request_timeout_s:g} s"
            )
            replica.die(cause)
            raise ReplicaLost(f"replica {replica.id}: {cause}") from None
        except ReplicaLost as error:
            await replica.connection_lost(error)
            raise

    # -- life and death

    async def _watch(self) -> None:
        """Look after processes, heartbeats and waiting groups until closed."""
        while True:
            looks = (replica.check(self._config.heartbeat_timeout_s) for replica in self._living())
            for result in await asyncio.gather(*looks, return_exceptions=True):
                # One look that fails must not end the watch: the others would die unnoticed.
                if isinstance(result, Exception):
                    logger.error("looking after a replica failed", exc_info=result)
            self._check_progress()
            await asyncio.sleep(POLL_S)

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
