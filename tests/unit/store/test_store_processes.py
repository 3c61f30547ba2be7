"""Versions as other processes see them: nothing or the whole, whoever dies when."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

from pa_core.store.objects import ObjectStore
from pa_core.store.weights import WeightStore

READER = """
import sys, time
from pa_core.store.objects import ObjectStore
from pa_core.store.weights import WeightStore

weights = WeightStore(ObjectStore.open(sys.argv[1]))
print("polling", flush=True)
deadline = time.monotonic() + 60
for version in range(int(sys.argv[2])):
    misses = 0
    while weights.manifest(version) is None:
        misses += 1
        assert time.monotonic() < deadline, f"version {version} never came"
    loaded = weights.load(version)
    values = {float(value) for tensor in loaded.values() for value in tensor.unique()}
    assert len(loaded) == 6 and values == {float(version)}, (version, values)
    print(f"{version} {misses}", flush=True)
"""

SLOW_WRITER = """
import sys, time, torch
from pa_core.store import shards
from pa_core.store.objects import ObjectStore
from pa_core.store.weights import WeightStore

chunks = shards.Shard.chunks

def slowly(shard):
    for chunk in chunks(shard):
        yield chunk
        print("wrote", flush=True)
        time.sleep(0.5)

weights = WeightStore(ObjectStore.open(sys.argv[1]))
weights.publish(0, {"w": torch.zeros(1000)})
shards.Shard.chunks = slowly
weights.publish(1, {f"w{index}": torch.ones(1000) for index in range(100)})
"""


def _tensors(version: int) -> dict[str, torch.Tensor]:
    return {f"w{index}": torch.full((300_000,), float(version)) for index in range(6)}


def test_a_reader_in_another_process_sees_nothing_or_the_whole_version(tmp_path: Path) -> None:
    versions = 12
    weights = WeightStore(ObjectStore.open(str(tmp_path)), shard_bytes=2_000_000)
    with subprocess.Popen(
        [sys.executable, "-c", READER, str(tmp_path), str(versions)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "polling\n"
        for version in range(versions):
            weights.publish(version, _tensors(version))
            time.sleep(0.02)
        output, errors = reader.communicate(timeout=90)
    assert reader.returncode == 0, errors
    seen = [tuple(map(int, line.split())) for line in output.splitlines()]
    assert [version for version, _ in seen] == list(range(versions))
    assert sum(misses for _, misses in seen) > 0, "the reader never looked while a version was being written"


def test_a_publisher_killed_half_way_leaves_the_earlier_version_and_can_be_repeated(tmp_path: Path) -> None:
    store = ObjectStore.open(str(tmp_path))
    weights = WeightStore(store)
    with subprocess.Popen(
        [sys.executable, "-c", SLOW_WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout is not None
        assert [writer.stdout.readline() for _ in range(3)] == ["wrote\n"] * 3
        writer.send_signal(signal.SIGKILL)
        writer.wait(10)
    assert store.list("weights/v000001", unfinished=True), "the kill came too late to leave a torn version"
    assert weights.manifest(1) is None
    assert weights.latest() == 0
    assert torch.equal(weights.load(0)["w"], torch.zeros(1000))
    weights.publish(1, {"w": torch.full((3,), 7.0)})
    assert torch.equal(weights.load(1)["w"], torch.full((3,), 7.0))
    weights.retain({0})
    assert store.list("weights/v000001", unfinished=True) == []
