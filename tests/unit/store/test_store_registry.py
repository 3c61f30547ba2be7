from __future__ import annotations

import time
from dataclasses import replace

import pytest

from pa_core.errors import StoreError
from pa_core.store.objects import ObjectStore
from pa_core.store.registry import ReplicaRecord, ReplicaRegistry


def test_a_record_is_read_as_it_was_last_announced(store: ObjectStore) -> None:
    registry = ReplicaRegistry(store)
    assert registry.read("r0") is None
    starting = ReplicaRecord("r0", "http://127.0.0.1:1234", version=None, pid=7, state="starting")
    registry.announce(starting)
    ready = replace(starting, version=3, state="ready", heartbeat=time.time() + 2, weights_sha256="ab")
    registry.announce(ready)
    assert ReplicaRegistry(ObjectStore.open(store.url)).read("r0") == ready
    assert registry.read("r1") is None


def test_the_heartbeat_is_the_time_of_the_announcement() -> None:
    before = time.time()
    assert before <= ReplicaRecord("r0", "", None, 7, "ready").heartbeat <= time.time()


def test_a_withdrawn_replica_has_no_record(store: ObjectStore) -> None:
    registry = ReplicaRegistry(store)
    registry.announce(ReplicaRecord("r0", "http://127.0.0.1:1", None, 7, "ready"))
    registry.withdraw("r0")
    registry.withdraw("r0")
    assert registry.read("r0") is None


def test_a_record_that_is_none_is_named(store: ObjectStore) -> None:
    store.publish("replicas/r0.json", b'{"id": "r0"}')
    with pytest.raises(StoreError, match=r"r0\.json is not a replica record"):
        ReplicaRegistry(store).read("r0")
