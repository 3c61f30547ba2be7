"""Replica records: how replicas say where they are, what they serve and that they live."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field

from pa_core.errors import StoreError
from pa_core.store.objects import ObjectStore


@dataclass(frozen=True)
class ReplicaRecord:
    """What a replica says about itself.

    Attributes:
        id: its name, also the record's key.
        url: where it serves.
        version: the policy version it has loaded, or None before the first.
        pid: its process on its machine.
        state: a word: starting, ready, loading, stopped, …
        heartbeat: when this was written, seconds since the epoch on the replica's clock.
        weights_sha256: digest of the loaded version.
    """

    id: str
    url: str
    version: int | None
    pid: int
    state: str
    heartbeat: float = field(default_factory=time.time)
    weights_sha256: str | None = None


class ReplicaRegistry:
    """``replicas/<id>.json`` below a run's store; each record is overwritten by its own replica alone."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store.child("replicas")

    def announce(self, record: ReplicaRecord) -> None:
        """Replace the replica's record."""
        data = json.dumps(asdict(record)).encode()
        self._store.publish(f"{record.id}.json", data, exclusive=False, durable=False)

    def read(self, replica_id: str) -> ReplicaRecord | None:
        """A replica's last record, or None before its first."""
        data = self._store.find(f"{replica_id}.json")
        if data is None:
            return None
        try:
            return ReplicaRecord(**json.loads(data))
        except (TypeError, ValueError) as error:
            raise StoreError(f"store {self._store.url}: {replica_id}.json is not a replica record: {error}") from None

    def withdraw(self, replica_id: str) -> None:
        """Withdraw a record; a replica that is gone needs none."""
        self._store.delete(f"{replica_id}.json")
