"""The replica pool: least-loaded dispatch behind a gate per replica, and deaths that are noticed and named."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

import aiohttp

from pa_core.errors import EngineError
from pa_core.rollout.client import ReplicaLost
from pa_core.rollout.config import EngineConfig
from pa_core.rollout.connect import Connect, connect, open_session
from pa_core.rollout.dispatch import Dispatcher
from pa_core.rollout.gate import Gate, LoadAck
from pa_core.rollout.hedge import Flight, Hedger
from pa_core.rollout.membership import POLL_S, REGISTRY_POLL_S, Membership
from pa_core.rollout.protocol import GenerateRequest, GenerateResponse, VersionMismatch
from pa_core.rollout.replica import Replica
from pa_core.rollout.supervisor import Supervisor
from pa_core.store.objects import ObjectStore
from pa_core.store.registry import ReplicaRecord
from pa_core.store.weights import WeightStore

logger = logging.getLogger(__name__)

HEDGE_POLL_S = 0.2
"""Seconds between two looks for stragglers."""

MAX_BROKEN_CONNECTIONS = 3
"""Times per replica that one group is sent again over a connection that broke although the replica lives."""


class ReplicaPool:
    """All replicas of a run, seen from the producer's event loop.

    A replica is *eligible* for a version from the moment it acknowledged that version and its digest: the gate is
    one per replica and no barrier. Replicas come and go while the pool is used; one that joins loads the version that
    was asked for last. Every method belongs to one event loop; properties may be read from any thread.

    Args:
        store: the run's folder.
        replica_ids: which replicas to wait for at start.
        api_key: the run's key.
        config: concurrency, hedging, static servers and deadlines.
        processes: the replica processes, where this program started them.
        make_client: how to talk to a replica.
        weights: the folder of the run whose versions are loaded; default: ``store``.

    Attributes:
        hedged: groups sent to a second replica because the first was slow.
        hedges_won: those of them that the second replica answered first.
        retries: attempts that failed, after which the group was dispatched again.
        on_late_load: told when a replica that joined has loaded the current version, outside of any :meth:`load`.
        on_failure: told when looking after the replicas fails; nothing works from then on.
    """

    def __init__(
        self,
        store: ObjectStore,
        replica_ids: Sequence[str],
        api_key: str,
        config: EngineConfig,
        processes: Supervisor | None = None,
        make_client: Connect = connect,
        weights: ObjectStore | None = None,
    ) -> None:
        self._config = config
        self._members = Membership(
            store, replica_ids, api_key, config, processes, self._has_joined, self._has_ended, make_client
        )
        self._queue = Dispatcher(self._members.serving, config.max_in_flight, self._hopeless)
        versions = WeightStore(weights or store)
        self._gate = Gate(versions, config.request_timeout_s, self._members.look_at, self._queue.progress)
        self._hedger = Hedger(config.hedge_after)
        self._flights: set[Flight] = set()
        self._target: int | None = None
        self._failure: BaseException | None = None
        self._session: aiohttp.ClientSession | None = None
        self._watches: list[asyncio.Task[None]] = []
        self._errands: set[asyncio.Task[None]] = set()
        self._attempts: set[asyncio.Task[GenerateResponse | None]] = set()
        self.hedged = 0
        self.hedges_won = 0
        self.retries = 0
        self.on_late_load: Callable[[LoadAck], None] = lambda ack: None
        self.on_failure: Callable[[BaseException], None] = lambda error: None

    @property
    def versions(self) -> dict[str, int | None]:
        """Loaded version of each serving replica; None before its first load and while it loads."""
        return {replica.id: replica.version for replica in self._all() if replica.serves}

    @property
    def in_flight(self) -> dict[str, int]:
        """Groups dispatched to each serving replica and not yet answered."""
        return {replica.id: replica.in_flight for replica in self._all() if replica.serves}

    @property
    def expected(self) -> list[str]:
        """Replicas that the run counts on from its start."""
        return self._members.expected

    @property
    def records(self) -> dict[str, ReplicaRecord]:
        """What each serving replica last said about itself."""
        return {replica.id: replica.record for replica in self._all() if replica.serves}

    @property
    def queued(self) -> int:
        """Groups that wait for a replica to have room."""
        return len(self._queue)

    @property
    def dead(self) -> dict[str, str]:
        """Why each dead replica counts as dead; one that came back does not."""
        return {replica.id: replica.cause or "" for replica in self._all() if not replica.alive and not replica.leaving}

    @property
    def restarts(self) -> int:
        """How often a replica that had died came back."""
        return self._members.returns

    def status(self) -> str:
        """What each replica does, for messages."""
        return self._members.status()

    def _all(self) -> list[Replica]:
        return list(self._members.replicas.values())

    async def start(self) -> None:
        """Wait until the expected replicas serve; when only some do by the deadline, go on with those.

        Raises:
            EngineError: a replica died at start for good (exit code and the end of its log are named), or none is
                there after ``engine.startup_timeout_s``.
        """
        self._session = open_session()
        try:
            await self._members.start(self._session)
        except BaseException:
            await self.close()
            raise
        looks: tuple[tuple[str, float, Callable[[], Awaitable[None]]], ...] = (
            ("lives", POLL_S, self._look_at_lives),
            # Apart, so that a store that hangs does not keep deaths from being noticed.
            ("registry", REGISTRY_POLL_S, self._members.look_at_registry),
            ("static", REGISTRY_POLL_S, self._members.look_at_static),
            ("stragglers", HEDGE_POLL_S, self._hedge_stragglers),
        )
        self._watches = [asyncio.create_task(self._watch(*look), name=f"replica-{look[0]}") for look in looks]

    async def load(self, version: int) -> list[LoadAck]:
        """Have every serving replica load ``version``, unless it has; each becomes eligible when it acknowledges.

        May run beside :meth:`generate`, whose calls for ``version`` wait for the first replica. A replica that fails
        gets no work until a later load succeeds; a slow one that is asked for a later version meanwhile goes on with
        that. Neither holds the others up.

        Returns:
            The acknowledgements, in the order they came.

        Raises:
            EngineError: no replica has loaded the version, and none is about to join.
            StoreError: the version is not published.
        """
        self._check()
        self._target = version
        acks: list[LoadAck] = []
        # A version never changes, so whoever has it keeps it.
        behind = [replica for replica in self._members.serving() if replica.version != version]
        await self._gate.load(behind, version, acks.append)
        if self._target == version and not self._loaded_or_coming(version):
            raise self._none_left(f"no replica has loaded policy version {version}")
        return acks

    async def generate(self, request: GenerateRequest) -> GenerateResponse:
        """Generate a group on the least loaded eligible replica; another one takes over when it dies.

        A straggler is sent to a second replica as well (``engine.hedge_after``); the first answer is returned and the
        other attempt is cancelled.

        Raises:
            EngineError: no replica is left that could serve the request, with the cause for each.
        """
        flight = Flight(request)
        self._flights.add(flight)
        try:
            while True:
                if not flight.attempts:
                    self._check()
                    if flight.lost is not None and flight.broken > MAX_BROKEN_CONNECTIONS * max(1, len(self._all())):
                        raise flight.lost
                    replica = await self._queue.acquire(flight)
                    self._begin(flight, replica)
                answer, replica, seconds = await flight.next_end()
                if answer is not None:
                    self._hedger.finished(flight, seconds)
                    self.hedges_won += replica is flight.hedge
                    return answer
        finally:
            self._flights.discard(flight)
            flight.abandon()

    async def close(self) -> None:
        """End the watches, fail what still waits, and close the connections. Processes are not touched."""
        tasks = [*self._watches, *self._errands, *self._attempts]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._watches.clear()
        self._queue.fail(lambda flight: EngineError("the replica pool was closed"))
        if self._session is not None:
            await self._session.close()
            self._session = None

    # -- generate

    def _begin(self, flight: Flight, replica: Replica) -> None:
        """Begin an attempt at a replica that the group is already counted at."""

        def ended(task: asyncio.Task[GenerateResponse | None]) -> None:
            # Not in the attempt itself: it may be cancelled before its first step.
            self._attempts.discard(task)
            replica.release(flight.request.group_id)
            self._queue.progress()

        task = flight.attempt(replica, self._attempt(replica, flight))
        self._attempts.add(task)
        task.add_done_callback(ended)

    async def _attempt(self, replica: Replica, flight: Flight) -> GenerateResponse | None:
        """The answer of one replica. None: it failed, which is noted."""
        request = flight.request
        try:
            return await self._run(replica, request)
        except ReplicaLost as error:
            flight.broken += 1
            flight.lost = error
            logger.warning("group %s is dispatched again: %s", request.group_id, error)
        except VersionMismatch as error:
            logger.warning("replica %s is out of the gate: %s", replica.id, error)
            self._shut(replica, request.version, str(error))
        except EngineError as error:
            flight.failures[replica] = error
            logger.warning("group %s is dispatched again: %s", request.group_id, error)
            await self._members.look_at(replica)  # it may have failed because it is leaving
        self.retries += 1
        return None

    def _shut(self, replica: Replica, version: int, why: str) -> None:
        """No work for a replica that lacks what it acknowledged; it may load once more: it may be a new process."""
        if replica.version != version:
            return
        replica.version, replica.refused = None, why
        if replica.mismatched != version and self._target == version:
            replica.mismatched = version
            self._catch_up(replica, version)

    async def _run(self, replica: Replica, request: GenerateRequest) -> GenerateResponse:
        """Ask a replica. Raises ReplicaLost when it dies or misses its deadline."""
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
            await replica.connection_lost(error, self._members.look_at)
            raise

    async def _hedge_stragglers(self) -> None:
        """Near the end, when replicas have room and nobody waits for it, send stragglers to a second replica."""
        for flight in list(self._flights):
            if self._queue or not self._hedger.is_straggler(flight, time.monotonic()):
                continue
            replica = self._queue.best(flight)
            if replica is not None:
                group = flight.request.group_id
                logger.info("group %s is slow and is sent to replica %s as well", group, replica.id)
                self.hedged += 1
                flight.hedge = replica
                replica.take(group)
                self._begin(flight, replica)

    def _hopeless(self, flight: Flight) -> EngineError | None:
        """Why a waiting group can never be served, if so."""
        serving, version = self._members.serving(), flight.request.version
        # A later version than the one asked for last may still come.
        coming = self._target is None or version > self._target
        if serving and coming:
            return None
        if any(flight.accepts(replica) or replica.loading == version for replica in serving):
            return None
        if (coming or version == self._target) and self._members.may_come():
            return None
        if not serving:
            return self._none_left("no replica is left")
        if flight.failures:
            return EngineError("; ".join(str(error) for error in flight.failures.values()))
        return self._none_left(f"no living replica has policy version {version}")

    # -- life and death

    def _has_joined(self, replica: Replica) -> None:
        if self._target is not None:
            self._catch_up(replica, self._target)
        self._queue.progress()

    def _catch_up(self, replica: Replica, version: int) -> None:
        """Have a replica load the current version beside everything else."""

        def loaded(ack: LoadAck) -> None:
            logger.info("replica %s has caught up with policy version %d", ack.replica, ack.version)
            self.on_late_load(ack)

        replica.loading = version
        self._keep(asyncio.create_task(self._gate.catch_up(replica, version, loaded)))

    def _has_ended(self, replica: Replica) -> None:
        if not replica.leaving:
            self._keep(asyncio.create_task(self._members.condemn(replica)))
        self._queue.dispatch()

    def _keep(self, task: asyncio.Task[None]) -> None:
        """Hold a task until it ends: the event loop alone would forget it."""
        self._errands.add(task)
        task.add_done_callback(self._errand_ended)

    def _errand_ended(self, task: asyncio.Task[None]) -> None:
        self._errands.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._break(error)

    async def _watch(self, what: str, every_s: float, look: Callable[[], Awaitable[None]]) -> None:
        """Look again and again until closed; a look that fails ends everything, since deaths would go unnoticed."""
        try:
            while True:
                await look()
                await asyncio.sleep(every_s)
        except Exception as error:
            logger.exception("looking after the replicas (%s) failed", what)
            self._break(error)

    def _break(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._queue.fail(lambda flight: self._broken())
        self.on_failure(error)

    def _check(self) -> None:
        if self._failure is not None:
            raise self._broken()

    def _broken(self) -> EngineError:
        return EngineError(f"looking after the replicas failed: {type(self._failure).__name__}: {self._failure}")

    async def _look_at_lives(self) -> None:
        await self._members.look_at_lives()
        self._queue.dispatch()
        # Nothing loaded or answered for longer than anything may take.
        limit = self._config.request_timeout_s + self._config.startup_timeout_s
        if asyncio.get_running_loop().time() - self._queue.progress_at > limit:
            keys = "engine.request_timeout_s + engine.startup_timeout_s"
            self._queue.fail(
                lambda flight: self._none_left(
                    f"no replica took group {flight.request.group_id} of version {flight.request.version} within "
                    f"{keys} = {limit:g} s"
                )
            )

    def _loaded_or_coming(self, version: int) -> bool:
        return any(replica.version == version for replica in self._members.serving()) or self._members.may_come()

    def _none_left(self, what: str) -> EngineError:
        return EngineError(f"{what}: {self._members.status()}")
