"""The gate of each replica: it opens for a version when the replica acknowledged the digest of its weights."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from pa_core.errors import EngineError, StoreError
from pa_core.rollout.client import ReplicaLost
from pa_core.rollout.replica import Replica
from pa_core.store.weights import WeightStore

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadAck:
    """A replica's word that it has loaded a version; times are seconds since the epoch."""

    replica: str
    version: int
    weights_sha256: str
    started_at: float
    ended_at: float


class Gate:
    """Has replicas load versions. Belongs to one event loop.

    Args:
        weights: where versions are published.
        limit_s: seconds a replica may take to finish what is in flight and to load (``engine.request_timeout_s``).
        look_at: finds out whether a replica has withdrawn.
        changed: called when a replica became eligible or failed to.
    """

    def __init__(
        self,
        weights: WeightStore,
        limit_s: float,
        look_at: Callable[[Replica], Awaitable[None]],
        changed: Callable[[], None],
    ) -> None:
        self._weights = weights
        self._limit_s = limit_s
        self._look_at = look_at
        self._changed = changed

    async def load(self, replicas: list[Replica], version: int, ack: Callable[[LoadAck], None]) -> None:
        """Close the gate of each replica, and open it for ``version`` when that is loaded.

        Failures are noted in the replica: it gets no work until a later load succeeds.

        Raises:
            StoreError: the version is not published.
        """
        for replica in replicas:
            # From here on nothing new goes to the replica, so its requests in flight drain.
            replica.version, replica.loading, replica.refused = None, version, None
        try:
            manifest = await asyncio.to_thread(self._weights.require, version)
            await asyncio.gather(
                *(self._load_one(replica, version, manifest.weights_sha256, ack) for replica in replicas)
            )
        finally:
            for replica in replicas:
                if replica.loading == version:
                    replica.loading = None
            self._changed()

    async def catch_up(self, replica: Replica, version: int, ack: Callable[[LoadAck], None]) -> None:
        """As :meth:`load` for one replica, while others already work; a failure concerns it alone."""
        try:
            await self.load([replica], version, ack)
        except StoreError as error:
            replica.refused = str(error)
            logger.warning("replica %s gets no work: %s", replica.id, error)

    async def _load_one(self, replica: Replica, version: int, digest: str, ack: Callable[[LoadAck], None]) -> None:
        """Load one replica, unless it is asked for a later version before its turn comes."""
        started = time.time()
        got: str | None = None
        async with replica.load_lock:
            if not replica.serves or replica.loading != version:
                return
            doing = "finish its groups in flight before it loads"
            try:
                async with asyncio.timeout(self._limit_s):
                    await replica.until_death(replica.idle.wait())
                    assert not replica.in_flight
                    doing = "load"
                    got = await replica.until_death(replica.client.load(version, digest))
                if got != digest:
                    raise EngineError(f"its weights have digest {got}, version {version} has {digest}")
            except TimeoutError:
                groups = f" ({', '.join(replica.groups)})" if replica.groups else ""
                limit = f"engine.request_timeout_s={self._limit_s:g} s"
                replica.die(f"it did not {doing} version {version} within {limit}{groups}")
            except EngineError as error:
                await self._failed(replica, version, error)
            else:
                ack(LoadAck(replica.id, version, got, started, time.time()))
        if replica.loading == version:
            replica.version = version if got == digest and replica.serves else None
            replica.loading = None
        self._changed()

    async def _failed(self, replica: Replica, version: int, error: EngineError) -> None:
        if isinstance(error, ReplicaLost):
            await replica.connection_lost(error, self._look_at)
        if replica.serves and replica.loading == version:
            replica.refused = str(error)
            logger.warning("replica %s gets no work: it failed to load %s: %s", replica.id, version, error)
