"""A vLLM replica that serves a config's model for a benchmark, with everything around it in a temporary run."""

from __future__ import annotations

import contextlib
import secrets
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from pa_core.config import TrainConfig
from pa_core.config_files import load_config
from pa_core.loop.run import Run, prepare_run
from pa_core.loop.services import describing_files, replica_set
from pa_core.model.loading import LoadedModel, load_policy
from pa_core.rollout.pool import ReplicaPool
from pa_core.store.registry import ReplicaRecord
from pa_core.store.weights import WeightStore


@dataclass(frozen=True)
class Served:
    """One replica behind a pool, with version 0 published and not yet loaded.

    Attributes:
        record: what the replica says of itself, its URL among it.
        api_key: the run's key.
        files: the files that describe the model, published with every version.
    """

    run: Run
    model: LoadedModel
    weights: WeightStore
    pool: ReplicaPool
    record: ReplicaRecord
    api_key: str
    files: dict[str, bytes]


def bench_config(path: Path, overrides: list[str], *forced: str) -> TrainConfig:
    """The config with one vLLM replica, in a temporary store unless the overrides name another."""
    named = any(override.startswith("store.url=") for override in overrides)
    store = [] if named else [f"store.url={tempfile.mkdtemp(prefix='pa-bench-')}"]
    name = f"run_name=bench-{secrets.token_hex(4)}"
    return load_config(path, [*store, *overrides, name, "engine.kind=vllm", "engine.replicas=1", *forced])


@contextlib.asynccontextmanager
async def serving(config: TrainConfig) -> AsyncIterator[Served]:
    """Start the replica and wait until it serves; end it and remove the run's folder afterwards."""
    run = prepare_run(config)
    model = load_policy(config.model)
    weights = WeightStore(run.store)
    files = describing_files(model)
    weights.publish(0, model.model.state_dict(), files)
    try:
        with replica_set(run) as replicas:
            pool = ReplicaPool(run.store, replicas.ids, replicas.api_key, config.engine, replicas.processes)
            await pool.start()
            try:
                record = replicas.registry.read("r0")
                assert record is not None
                yield Served(run, model, weights, pool, record, replicas.api_key, files)
            finally:
                await pool.close()
    finally:
        run.store.delete("")
