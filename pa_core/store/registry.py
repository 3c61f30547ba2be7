"""Replica records: how replicas say where they are, what they serve and that they live."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Literal

from pa_core.errors import StoreError
from pa_core.store.objects import ObjectStore

logger = logging.getLogger(__name__)

READY = "ready"
RESTARTING = "restarting"
GIVEN_UP = "given up"


@dataclass(frozen=True)
class ReplicaRecord:
    """What a replica says about itself.

    Attributes:
        id: its name, also the record's key.
        url: where it serves.
        version: the policy version it has loaded, or None before the first.
        pid: its process on its machine.
        state: starting or ready, by the replica itself; restarting or given up, by who looks after its process.
        heartbeat: when this was written, seconds since the epoch on the replica's clock.
        weights_sha256: digest of the loaded version.
        engine: what serves there, hence how to talk to it.
        incarnation: drawn anew by every process, so that one that was started again is not taken for its predecessor.
        detail: what it is doing, or how it ended, for messages.
    """

    id: str
    url: str
    version: int | None
    pid: int
    state: str
    heartbeat: float = field(default_factory=time.time)
    weights_sha256: str | None = None
    engine: Literal["embedded", "vllm"] = "embedded"
    incarnation: str = ""
    detail: str = ""

    def age(self) -> float:
        """Seconds since it was written, as far as this machine's clock and the replica's agree."""
        return time.time() - self.heartbeat


class ReplicaRegistry:
    """``replicas/<id>.json`` below a run's store: written by the replica, and by its supervisor once it has ended.

    ``replicas/<id>.condemned`` names an incarnation that the trainer holds for hung, for its supervisor to end.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._store = store.child("replicas")

    def announce(self, record: ReplicaRecord) -> None:
        """Replace the replica's record."""
        data = json.dumps(asdict(record)).encode()
        self._store.publish(f"{record.id}.json", data, exclusive=False, durable=False)

    def read(self, replica_id: str) -> ReplicaRecord | None:
        """A replica's last record, or None before its first."""
        data = self._store.find(f"{replica_id}.json")
        return None if data is None else self._parse(replica_id, data)

    def look(self, known: Iterable[str]) -> dict[str, ReplicaRecord | None]:
        """The records of the ``known`` replicas (None: there is none) and of all others that announced themselves.

        One that is unreadable is left out and reported. Found by listing, unlike everything else in a store: the
        prefix is small, and membership is advisory. A replica that a stale listing hides is found a look later, one
        that it invents has no record or does not answer, and what a replica has loaded is for the gate to decide.

        Raises:
            StoreError: the store cannot be listed or read.
        """
        listed = (key.removesuffix(".json") for key in self._store.list() if key.endswith(".json") and "/" not in key)
        records: dict[str, ReplicaRecord | None] = {}
        for replica_id in dict.fromkeys((*known, *listed)):
            data = self._store.find(f"{replica_id}.json")
            try:
                records[replica_id] = None if data is None else self._parse(replica_id, data)
            except StoreError as error:
                logger.warning("%s", error)
        return records

    def withdraw(self, replica_id: str) -> None:
        """Withdraw a record; a replica that is gone needs none."""
        self._store.delete(f"{replica_id}.json")

    def condemn(self, replica_id: str, incarnation: str) -> None:
        """Ask whoever looks after the replica's process to end this incarnation of it."""
        self._store.publish(f"{replica_id}.condemned", incarnation.encode(), exclusive=False, durable=False)

    def is_condemned(self, record: ReplicaRecord) -> bool:
        """Whether the incarnation that wrote ``record`` shall be ended."""
        return self._store.find(f"{record.id}.condemned") == record.incarnation.encode()

    def _parse(self, replica_id: str, data: bytes) -> ReplicaRecord:
        try:
            return ReplicaRecord(**json.loads(data))
        except (TypeError, ValueError) as error:
            raise StoreError(f"store {self._store.url}: {replica_id}.json is not a replica record: {error}") from None


class Presence:
    """One replica's own record, from its first announcement to its withdrawal. Safe to use from several threads."""

    def __init__(self, registry: ReplicaRegistry, replica_id: str) -> None:
        self._registry = registry
        self._id = replica_id
        self._lock = threading.Lock()
        self._withdrawn = False

    def announce(self, record: ReplicaRecord) -> None:
        """Replace the record, unless it was withdrawn."""
        with self._lock:
            if not self._withdrawn:
                self._registry.announce(record)

    def withdraw(self) -> None:
        """Withdraw the record for good: an announcement that is on its way must not come back after this."""
        with self._lock:
            self._withdrawn = True
            self._registry.withdraw(self._id)
