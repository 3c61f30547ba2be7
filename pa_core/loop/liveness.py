"""Whether somebody trains a run, as far as its store can tell."""

from __future__ import annotations

import json
import platform
import time

from pa_core.errors import StoreError
from pa_core.loop.progress import read_progress
from pa_core.loop.run import TRAINER_KEY
from pa_core.processes import running_process
from pa_core.store.objects import ObjectStore
from pa_core.store.registry import ReplicaRegistry


def trains(url: str, silence_s: float) -> bool:
    """Whether a process trains the run at ``url``: one that runs here, or one elsewhere that was heard of lately.

    A store that cannot be read says nothing, which is no proof of death: the run counts as trained.

    Args:
        silence_s: seconds since the last sign of life after which a trainer on another host counts as dead.
    """
    try:
        store = ObjectStore.open(url)
        if not store.exists(TRAINER_KEY):
            return False
        trainer = json.loads(store.read(TRAINER_KEY))
        if trainer["host"] == platform.node():
            return running_process(trainer["pid"], trainer["started"]) is not None
        return _last_sign(store) > time.time() - silence_s
    except (StoreError, OSError):
        return True


def _last_sign(store: ObjectStore) -> float:
    """When the run's trainer or one of its replicas last wrote, seconds since the epoch."""
    progress = read_progress(store)
    records = ReplicaRegistry(store).look(()).values()
    return max([progress.updated_at if progress else 0.0, *(record.heartbeat for record in records if record)])
