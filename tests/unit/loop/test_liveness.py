"""Whether a run is being trained, as told from its store."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from pa_core.loop.liveness import trains
from pa_core.loop.progress import ProgressState, write_progress
from pa_core.loop.run import TRAINER_KEY
from pa_core.store.objects import ObjectStore
from pa_core.store.registry import ReplicaRecord, ReplicaRegistry

Train = Callable[..., str]


@pytest.fixture
def run(tmp_path: Path) -> Train:
    """Writes who trains the run and returns its URL."""

    def write(**trainer: Any) -> str:
        ObjectStore.open(str(tmp_path)).publish(TRAINER_KEY, json.dumps(trainer).encode())
        return str(tmp_path)

    return write


def test_a_run_that_nobody_claims_is_not_trained(tmp_path: Path) -> None:
    assert not trains(str(tmp_path), 300)


def test_on_this_machine_the_process_decides_even_when_it_is_silent(run: Train) -> None:
    me = psutil.Process()
    assert trains(run(host=platform.node(), pid=me.pid, started=me.create_time()), 300)


def test_a_later_process_of_the_same_number_is_another_one(run: Train) -> None:
    me = psutil.Process()
    assert not trains(run(host=platform.node(), pid=me.pid, started=me.create_time() - 1000), 300)


def test_elsewhere_the_last_sign_of_trainer_or_replica_decides(run: Train) -> None:
    url = run(host="another machine", pid=1, started=0.0)
    store = ObjectStore.open(url)
    assert not trains(url, 300)
    write_progress(store, ProgressState())
    assert trains(url, 300)
    assert not trains(url, 0.0)
    store.publish("progress.json", json.dumps({"updated_at": time.time() - 1000}).encode(), exclusive=False)
    assert not trains(url, 300)
    ReplicaRegistry(store).announce(ReplicaRecord("r0", "http://r0", 3, 17, "ready"))
    assert trains(url, 300)
