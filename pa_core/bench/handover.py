"""``pa bench handover``: from the optimizer's step to the first token of the new version, against a plain copy."""

from __future__ import annotations

import asyncio
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pa_core.bench.served import Served, bench_config, serving
from pa_core.rollout.protocol import GenerateRequest
from pa_core.store.objects import ObjectStore
from pa_core.store.versions import version_name

PARTS = ("publish", "acknowledge", "load", "first_token")


def run(config_path: Path, overrides: list[str], repeats: int) -> dict[str, Any]:
    """Hand over ``repeats`` versions to one vLLM replica; copy each version's files right after.

    ================ ====================================================================================
    publish          tensors in the trainer's memory until the version is visible in the store
    load             the replica's requests: drain, verify, load in place, name the version
    acknowledge      what the pool needs besides to learn of the version and open the gate
    first_token      a request for one token of the new version, until its answer
    write_and_read   the same bytes from memory into the store and back, unchecked: the least a hand-over by files does
    copy             the version's tensor files copied within the store, unchecked, by shutil.copyfile or S3 get and put
    ================ ====================================================================================
    """
    config = bench_config(config_path, overrides, "engine.hedge_after=null")

    async def measure() -> tuple[list[dict[str, float]], int]:
        async with serving(config) as served:
            size = sum(file.size for file in served.weights.require(0).shards)
            await served.pool.load(0)
            await _first_token(served, 0)
            rows = [await _hand_over(served, version) for version in range(1, repeats + 2)]
        return rows[1:], size  # the first one meets cold caches

    rows, size = asyncio.run(measure())
    medians = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    return {
        "store": config.store.url,
        "bytes": size,
        "repeats": repeats,
        "seconds": medians,
        "all": rows,
        "ratio": statistics.median(row["total"] / row["copy"] for row in rows),
        "ratio_write_and_read": statistics.median(row["total"] / row["write_and_read"] for row in rows),
    }


async def _hand_over(served: Served, version: int) -> dict[str, float]:
    """Seconds of one hand-over, by part."""
    with torch.no_grad():
        for parameter in served.model.model.parameters():
            parameter.add_(1e-5)
    start = time.perf_counter()
    # In a thread, as in training: the pool has to go on looking after its replicas.
    await asyncio.to_thread(served.weights.publish, version, served.model.model.state_dict(), served.files)
    published = time.perf_counter()
    (ack,) = await served.pool.load(version)
    acknowledged = time.perf_counter()
    await _first_token(served, version)
    answered = time.perf_counter()
    load = ack.ended_at - ack.started_at
    copy = await asyncio.to_thread(_copy, served, version)
    through = await asyncio.to_thread(_write_and_read, served, version)
    await asyncio.to_thread(served.weights.remove, version - 1)
    return {
        "publish": published - start,
        "load": load,
        "acknowledge": acknowledged - published - load,
        "first_token": answered - acknowledged,
        "total": answered - start,
        "copy": copy,
        "write_and_read": through,
    }


async def _first_token(served: Served, version: int) -> None:
    prompt = np.arange(16, dtype=np.int32)
    await served.pool.generate(GenerateRequest(f"first-{version}", prompt, 1, 1.0, 1, 0, version))


def _copy(served: Served, version: int) -> float:
    """Seconds to copy a version's tensor files, without checks, by a program that does nothing else."""
    store: ObjectStore = served.run.store
    keys = [f"weights/{version_name(version)}/{file.name}" for file in served.weights.require(version).shards]
    with tempfile.TemporaryDirectory(prefix="pa-bench-copy-") as elsewhere:
        start = time.perf_counter()
        for number, key in enumerate(keys):
            local = store.local_path(key)
            if local is not None:
                shutil.copyfile(local, local.with_name(f"copy-{number}"))
            else:
                store.download(key, Path(elsewhere) / str(number))
                store.publish(f"copy/{number}", Path(elsewhere) / str(number), exclusive=False)
        seconds = time.perf_counter() - start
    store.delete("copy")
    return seconds


def _write_and_read(served: Served, version: int) -> float:
    """Seconds to write a version's bytes from memory into the store and to read them back into memory, unchecked."""
    store: ObjectStore = served.run.store
    blobs = [
        store.read(f"weights/{version_name(version)}/{file.name}") for file in served.weights.require(version).shards
    ]
    start = time.perf_counter()
    for number, blob in enumerate(blobs):
        store.publish(f"through/{number}", blob, exclusive=False, durable=False)
    for number in range(len(blobs)):
        store.read(f"through/{number}")
    seconds = time.perf_counter() - start
    store.delete("through")
    return seconds


def render(result: dict[str, Any]) -> str:
    """The parts, the whole, and the plain copy."""
    seconds = result["seconds"]
    parts = "  ".join(f"{name.replace('_', ' ')} {seconds[name]:.2f}" for name in PARTS)
    return (
        f"{result['bytes'] / 1e6:.0f} MB on {result['store']}, median of {result['repeats']}, seconds:\n"
        f"  {parts}\n"
        f"  hand-over {seconds['total']:.2f}\n"
        f"  plain copy, file to file      {seconds['copy']:.2f}: {result['ratio']:.2f}x\n"
        f"  memory to file to memory      {seconds['write_and_read']:.2f}: {result['ratio_write_and_read']:.2f}x"
    )
