"""Who is in the pool: replicas that announce themselves join, those that withdraw leave, the dead may come back."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

import aiohttp

from pa_core.errors import EngineError, StoreError
from pa_core.rollout.config import EngineConfig
from pa_core.rollout.connect import Connect, connect
from pa_core.rollout.replica import Replica
from pa_core.rollout.supervisor import Supervisor
from pa_core.store.objects import ObjectStore
from pa_core.store.registry import GIVEN_UP, READY, RESTARTING, ReplicaRecord, ReplicaRegistry

logger = logging.getLogger(__name__)

POLL_S = 0.5
"""Seconds between two looks at processes and silences."""

REGISTRY_POLL_S = 1.0
"""Seconds between two looks at the registry."""

STATIC_POLL_S = 3.0
"""Seconds between two attempts to reach a server of ``engine.urls`` that does not answer."""

RETURN_GRACE_S = 5.0
"""Seconds in which a replica that died may be announced to be started again."""

START_POLL_S = 0.25
START_REPORT_S = 10.0
LOOK_LIMIT_S = 5.0


class Membership:
    """The replicas of a run, found in its registry and in ``engine.urls``. Belongs to one event loop.

    Args:
        store: the run's folder.
        expected: ids to wait for at start; where neither it nor ``config.urls`` names any, replicas come by
            themselves, and the pool waits for one as long as for a start, also when none is left.
        api_key: the run's key.
        config: deadlines and static servers.
        processes: the processes that this program started, if it did.
        make_client: :func:`connect`.
        joined: called with every replica that begins to serve.
        ended: called with every replica that left or died.

    Attributes:
        replicas: by id the one that serves or was the last to do so.
        returns: how often a replica came back under its id.
    """

    def __init__(
        self,
        store: ObjectStore,
        expected: Sequence[str],
        api_key: str,
        config: EngineConfig,
        processes: Supervisor | None,
        joined: Callable[[Replica], None],
        ended: Callable[[Replica], None],
        make_client: Connect = connect,
    ) -> None:
        self.replicas: dict[str, Replica] = {}
        self.returns = 0
        self._static = {f"u{index}": url for index, url in enumerate(config.urls)}
        self._expected = [*expected, *self._static]
        self._store_url = store.url
        self._registry = ReplicaRegistry(store)
        self._api_key = api_key
        self._config = config
        self._processes = processes
        self._joined = joined
        self._ended = ended
        self._make_client = make_client
        self._session: aiohttp.ClientSession | None = None
        self._records: dict[str, ReplicaRecord] = {}
        self._heard_at: dict[str, float] = {}
        self._tried: dict[str, float] = {}
        self._absent: dict[str, str] = {}
        self._looked_at = 0.0
        self._last_end = -1.0

    # -- who is there

    @property
    def expected(self) -> list[str]:
        """Those that the run counts on from its start: its own processes and the servers of ``engine.urls``."""
        return list(self._expected)

    def serving(self) -> list[Replica]:
        """Those that live and take work."""
        return [replica for replica in self.replicas.values() if replica.serves]

    def may_come(self) -> bool:
        """Whether a replica that does not serve now is about to: it starts, or is started again."""
        if self._looked_at <= self._last_end:
            return True  # somebody may have announced itself since the registry was read last
        if not self._expected and time.monotonic() - self._last_end < self._config.startup_timeout_s:
            return True
        return any(self._may_come(id_) for id_ in {*self._expected, *self._records, *self.replicas})

    def _may_come(self, id_: str) -> bool:
        replica = self.replicas.get(id_)
        if replica is not None and replica.serves:
            return False
        if self._processes is not None and id_ in self._processes:
            return self._processes.may_return(id_)
        record = self._records.get(id_)
        if record is not None and record.state == GIVEN_UP:
            return False
        if record is not None and record.state == RESTARTING:
            return True
        if record is not None and (replica is None or record.incarnation != replica.record.incarnation):
            return time.monotonic() - self._heard_at[id_] < self._config.heartbeat_timeout_s
        grace = min(RETURN_GRACE_S, self._config.heartbeat_timeout_s)
        return replica is not None and not replica.leaving and time.monotonic() - replica.died_at < grace

    def status(self) -> str:
        """What each replica does, in one phrase each."""
        known = dict.fromkeys((*self._expected, *self.replicas, *self._absent))
        return "; ".join(map(self._status, known)) or self._invitation()

    def _invitation(self) -> str:
        """How a run without replicas of its own gets some."""
        return f"none has announced itself; start one with pa serve --run-url {self._store_url} --replica-id NAME"

    def _status(self, id_: str) -> str:
        replica = self.replicas.get(id_)
        if replica is not None and replica.serves:
            return replica.status()
        if (cause := self._given_up(id_)) is not None:
            return f"replica {id_} is dead: it died {cause}"
        if replica is not None:
            record = self._records.get(id_)
            again = (
                "" if record is None or record.incarnation == replica.record.incarnation else f", now {record.state}"
            )
            return replica.status() + again
        return f"replica {id_} is {self._absent.get(id_, 'not announced')}"

    def _given_up(self, id_: str) -> str | None:
        """How a replica ended that is not started again, if so."""
        if self._processes is not None and id_ in self._processes:
            return self._processes.given_up.get(id_)
        record = self._records.get(id_)
        return record.detail if record is not None and record.state == GIVEN_UP else None

    # -- start

    async def start(self, session: aiohttp.ClientSession) -> None:
        """Wait until all expected replicas serve, or any where none is expected, or the deadline if any serves then.

        Raises:
            EngineError: one is given up (exit code and the end of its log are named), or none is there after
                ``engine.startup_timeout_s``.
        """
        self._session = session
        started = report_at = time.monotonic()
        limit = self._config.startup_timeout_s
        while True:
            await self._look_within(max(0.1, started + limit - time.monotonic()))
            for id_ in self._expected:
                if (cause := self._given_up(id_)) is not None:
                    raise EngineError(f"replica {id_} died at start {cause}")
            missing = [id_ for id_ in self._expected if id_ not in self.replicas or not self.replicas[id_].serves]
            if not missing and (self._expected or self.serving()):
                return
            now = time.monotonic()
            if now - started >= limit:
                break
            if now - report_at >= START_REPORT_S:
                report_at = now
                statuses = "; ".join(map(self._status, missing)) or self.status()
                logger.info("waiting for replicas, %.0f of at most %.0f s: %s", now - started, limit, statuses)
            await asyncio.sleep(START_POLL_S)
        names = self._statuses(missing) or self.status()
        if not self.serving():
            raise EngineError(f"no replica serves after engine.startup_timeout_s={limit:g} s: {names}")
        logger.warning("going on without some replicas after engine.startup_timeout_s=%g s: %s", limit, names)

    def _statuses(self, ids: Sequence[str]) -> str:
        return "; ".join(self._with_log(id_) for id_ in ids)

    def _with_log(self, id_: str) -> str:
        process = self._processes.get(id_) if self._processes is not None else None
        if process is None:
            return self._status(id_)
        return f"{self._status(id_)}; the end of its log {process.log_path}:\n{process.tail(5)}\n"

    async def _look_within(self, limit_s: float) -> None:
        """One look at everything, but a store or server that hangs must not outlast the deadline."""
        looks = asyncio.gather(self.look_at_registry(), self.look_at_static(), self.look_at_lives())
        try:
            await asyncio.wait_for(looks, limit_s)
        except TimeoutError:
            logger.warning("the registry %s/replicas does not answer", self._store_url)

    # -- looks, repeated while the pool lives

    async def look_at_registry(self) -> None:
        """Let replicas join and leave as their records say. A store that fails for a moment changes nothing."""
        known = [id_ for id_ in (*self._expected, *self.replicas) if id_ not in self._static]
        began = time.monotonic()
        try:
            records = await asyncio.to_thread(self._registry.look, known)
            await asyncio.gather(*(self._heed(id_, record) for id_, record in records.items()))
        except StoreError as error:
            logger.warning("the registry of replicas cannot be read: %s", error)
        finally:
            self._looked_at = began

    async def look_at(self, replica: Replica) -> None:
        """As :meth:`look_at_registry`, for one replica."""
        if replica.id in self._static:
            return
        try:
            record = await asyncio.wait_for(asyncio.to_thread(self._registry.read, replica.id), LOOK_LIMIT_S)
        except (StoreError, TimeoutError) as error:
            logger.warning("the record of replica %s cannot be read: %s", replica.id, error or "no answer")
            return
        await self._heed(replica.id, record)

    async def look_at_lives(self) -> None:
        """Notice ended processes and silences, and forget those that have left for good."""
        for replica in list(self.replicas.values()):
            replica.check_process()
        looks = (replica.check_silence(self._config.heartbeat_timeout_s) for replica in self.replicas.values())
        await asyncio.gather(*looks)
        for replica in [replica for replica in self.replicas.values() if replica.leaving and not replica.in_flight]:
            replica.die("it has left")
            del self.replicas[replica.id]

    async def look_at_static(self) -> None:
        """Take servers of ``engine.urls`` in that answer, again and again those that did not."""
        absent = [id_ for id_ in self._static if id_ not in self.replicas or not self.replicas[id_].alive]
        due = [id_ for id_ in absent if time.monotonic() - self._tried.get(id_, -STATIC_POLL_S) >= STATIC_POLL_S]
        for id_ in due:
            self._tried[id_] = time.monotonic()
        records = (ReplicaRecord(id_, self._static[id_], None, 0, READY, 0.0, engine="vllm") for id_ in due)
        await asyncio.gather(*(self._try_to_join(record) for record in records))

    async def _heed(self, id_: str, record: ReplicaRecord | None) -> None:
        """Draw the consequences of a replica's latest record."""
        replica = self.replicas.get(id_)
        if record is None:
            if self._records.pop(id_, None) is not None:
                self._absent[id_] = "gone, because it withdrew"
            if replica is not None:
                replica.leave()
            return
        process = self._processes.get(id_) if self._processes is not None else None
        if process is not None and record.pid != process.pid:
            return  # an earlier process wrote it
        before = self._records.get(id_)
        self._records[id_] = record
        news = before is None or (before.heartbeat, before.incarnation) != (record.heartbeat, record.incarnation)
        if news:
            self._heard_at[id_] = time.monotonic()
        if replica is not None and replica.record.incarnation == record.incarnation:
            if record.state in (RESTARTING, GIVEN_UP):
                replica.die(record.detail)
            replica.heard(record)
            if replica.alive or not (replica.silent and news):
                return
        elif replica is not None and replica.serves:
            replica.die(f"another process took its place ({record.state})")
        if record.state != READY:
            self._absent[id_] = record.state + (f" ({record.detail})" if record.detail else "")
        elif news:  # a record whose heartbeat stands still is all that is left of somebody
            await self._try_to_join(record)

    async def _try_to_join(self, record: ReplicaRecord) -> None:
        """Take a replica in if it answers."""
        if self._session is None:
            return
        process = self._processes.get(record.id) if self._processes is not None else None
        client = self._make_client(self._session, self._store_url, record.id, record.engine, record.url, self._api_key)
        if not await client.alive():
            self._absent[record.id] = f"not answering at {record.url}"
            return
        predecessor = self.replicas.get(record.id)
        if predecessor is not None and predecessor.serves:
            return
        self._absent.pop(record.id, None)
        self.returns += predecessor is not None and not predecessor.leaving
        replica = Replica(record.id, client, record, process, self._has_ended)
        self.replicas[record.id] = replica
        logger.info("replica %s (%s) serves at %s", record.id, record.engine, record.url)
        self._joined(replica)

    def _has_ended(self, replica: Replica) -> None:
        self._last_end = time.monotonic()
        self._ended(replica)

    async def condemn(self, replica: Replica) -> None:
        """Ask whoever looks after a dead replica's process, in whatever program, to end it."""
        mine = self._processes is not None and replica.id in self._processes
        if mine or replica.id in self._static or not replica.record.incarnation:
            return
        try:
            await asyncio.to_thread(self._registry.condemn, replica.id, replica.record.incarnation)
        except StoreError as error:
            logger.warning("replica %s cannot be condemned: %s", replica.id, error)
