"""The store on a real S3 server: races, large objects, other processes, forks, checkpoints."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from s3 import S3Server

from pa_core.errors import StoreError
from pa_core.store.checkpoints import CheckpointStore
from pa_core.store.dcp import load_tensors, save_tensors
from pa_core.store.ledger import Ledger
from pa_core.store.objects import ObjectStore
from pa_core.store.s3_files import S3Files
from pa_core.store.weights import WeightStore

PART = 16 << 20


@pytest.fixture
def store(seaweedfs: S3Server, request: pytest.FixtureRequest) -> Iterator[ObjectStore]:
    store = ObjectStore.open(seaweedfs.url(f"{request.node.name.split('[')[0]}/{os.urandom(4).hex()}"))
    yield store
    assert seaweedfs.unfinished() == [], "a multipart upload dangles"
    store.delete("")


def _child(script: str, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    """A fresh interpreter that has the server's environment."""
    return subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


# moto looks for the key and completes a multipart upload in two steps, so only one PUT is exclusive there.
@pytest.mark.parametrize(("which", "size"), [("moto_s3", 1000), ("seaweedfs", 1000), ("seaweedfs", PART + 1000)])
def test_of_many_racing_writers_one_wins(request: pytest.FixtureRequest, which: str, size: int) -> None:
    server = request.getfixturevalue(which)
    with server.activated():
        url = server.url(f"race/{os.urandom(4).hex()}")
        writers = 12 if size < PART else 3
        stores = [ObjectStore.open(url) for _ in range(3)]
        start = threading.Barrier(writers)

        def write(number: int) -> bool:
            store = stores[number % len(stores)]
            start.wait(60)
            try:
                store.publish("key", bytes([number]) * size)
            except FileExistsError:
                return False
            return True

        for each in stores:
            each.exists("key")
        with ThreadPoolExecutor(writers) as threads:
            won = list(threads.map(write, range(writers)))
        assert won.count(True) == 1
        store = ObjectStore.open(url)
        assert store.read("key") == bytes([won.index(True)]) * size
        assert server.unfinished() == []
        store.publish("key", bytes([won.index(True)]) * size)
        with pytest.raises(FileExistsError, match="key"):
            store.publish("key", b"\xff" * size)
        assert server.unfinished() == []


def test_a_large_object_that_another_writer_replaced_has_not_won(
    store: ObjectStore, seaweedfs: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What SeaweedFS lets happen when two uploads complete at the same time, here one right after the other."""
    key = f"{store.url.split('/', 3)[3]}/key"
    upload = S3Files._put_parts

    def overtaken(*arguments: Any) -> str:
        tag = upload(*arguments)
        seaweedfs.client().put_object(Bucket=seaweedfs.bucket, Key=key, Body=b"theirs")
        return tag

    monkeypatch.setattr(S3Files, "_put_parts", overtaken)
    with pytest.raises(FileExistsError, match="key"):
        store.publish("key", bytes(PART + 1000))
    assert store.read("key") == b"theirs"


def test_a_large_stream_goes_up_and_down_in_little_memory(store: ObjectStore, tmp_path: Path) -> None:
    script = """
import hashlib, resource, sys
from pathlib import Path
from pa_core.store.objects import ObjectStore

store = ObjectStore.open(sys.argv[1])
store.publish("warm", b"x")
store.read("warm")
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
digest = hashlib.sha256()
def chunks():
    for number in range(300):
        chunk = number.to_bytes(4, "big") * (1 << 18)
        digest.update(chunk)
        yield chunk
base = peak()
store.publish_stream("large", chunks())
store.publish_stream("large", chunks())
size, found = store.download("large", Path(sys.argv[2]))
assert size == 300 << 20, size
print(peak() - base, found)
"""
    child = _child(script, store.url, str(tmp_path / "copy"))
    output, errors = child.communicate(timeout=240)
    assert child.returncode == 0, errors
    grown, found = output.split()
    with (tmp_path / "copy").open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == found
    assert int(grown) < 200, f"{grown} MB more for an object of 300 MB"
    with pytest.raises(FileExistsError):
        store.publish_stream("large", iter([b"x" * PART, b"y"]))


def test_a_producer_that_fails_half_way_leaves_nothing(store: ObjectStore, seaweedfs: S3Server) -> None:
    def chunks() -> Iterator[bytes]:
        yield bytes(3 * PART)
        assert len(seaweedfs.unfinished()) == 1
        assert not store.exists("folder/key")
        raise RuntimeError("the producer broke")

    with pytest.raises(RuntimeError, match="the producer broke"):
        store.publish_stream("folder/key", chunks())
    assert store.list(unfinished=True) == []
    assert seaweedfs.unfinished() == []


SLOW_WRITER = """
import sys, time, torch
from pa_core.store import shards
from pa_core.store.objects import ObjectStore
from pa_core.store.weights import WeightStore

chunks = shards.Shard.chunks

def slowly(shard):
    for number, chunk in enumerate(chunks(shard)):
        yield chunk
        if number == 40:
            print("under way", flush=True)
            time.sleep(60)

shards.Shard.chunks = slowly
WeightStore(ObjectStore.open(sys.argv[1])).publish(1, {"w": torch.ones(14_000_000)})
"""


def test_what_a_killed_publisher_left_is_invisible_and_goes_with_retention(
    store: ObjectStore, seaweedfs: S3Server
) -> None:
    weights = WeightStore(store)
    weights.publish(0, {"w": torch.zeros(10)})
    with _child(SLOW_WRITER, store.url) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "under way\n"
        writer.send_signal(signal.SIGKILL)
        writer.wait(10)
    assert len(seaweedfs.unfinished()) == 1, "the kill came too late to leave an upload"
    assert weights.manifest(1) is None
    assert weights.latest() == 0
    assert [key for key in store.list() if "v000001" in key] == []
    assert len([key for key in store.list(unfinished=True) if "v000001" in key]) == 1
    weights.publish(1, {"w": torch.full((3,), 7.0)})
    assert torch.equal(weights.load(1)["w"], torch.full((3,), 7.0))
    assert weights.retain({0}) == [1]
    assert seaweedfs.unfinished() == []
    assert torch.equal(weights.load(0)["w"], torch.zeros(10))


READER = """
import sys
from pa_core.store.objects import ObjectStore
from pa_core.store.weights import WeightStore

store = ObjectStore.open(sys.argv[1])
weights = WeightStore(store)
for line in sys.stdin:
    version = int(line)
    manifest = weights.manifest(version)
    known = None if manifest is None else float(weights.load(version)["w"][0])
    print(known, weights.latest(), len(store.list()), store.exists(f"weights/v{version:06d}/manifest.json"), flush=True)
"""


class _Spied(dict[str, bytes]):
    """Extra files of a version; between the tensors and the manifest somebody looks."""

    def __init__(self, look: Callable[[], None]) -> None:
        super().__init__({"config.json": b"{}"})
        self.look = look

    def items(self) -> Any:
        self.look()
        return super().items()


def test_another_process_sees_a_version_at_its_next_look_and_nothing_of_it_before(store: ObjectStore) -> None:
    weights = WeightStore(store)
    with _child(READER, store.url) as reader:
        assert reader.stdin is not None
        assert reader.stdout is not None

        def look(version: int) -> list[str]:
            assert reader.stdin is not None
            assert reader.stdout is not None
            reader.stdin.write(f"{version}\n")
            reader.stdin.flush()
            return reader.stdout.readline().split()

        before: list[str] = []
        for version in range(4):
            # It has looked for the version in vain and has listed the folder: what a cache would remember.
            assert look(version)[0] == "None"
            latest = str(version - 1) if version else "None"
            weights.publish(
                version,
                {"w": torch.full((1000,), float(version))},
                _Spied(lambda version=version: before.extend(look(version))),
            )
            assert before[0:2] == ["None", latest]
            assert before[3] == "False"
            before.clear()
            value, newest, _, exists = look(version)
            assert (float(value), newest, exists) == (version, str(version), "True")
        _, errors = reader.communicate(timeout=30)
        assert reader.returncode == 0, errors


def test_threads_and_coroutines_share_a_store(store: ObjectStore) -> None:
    def round_trip(number: int) -> bool:
        store.publish(f"thread/{number}", str(number).encode())
        return store.read(f"thread/{number}") == str(number).encode() and store.find(f"none/{number}") is None

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(round_trip, range(40)))

    async def from_coroutines() -> list[bool]:
        assert round_trip(100), "called straight from a coroutine"
        return await asyncio.gather(*(asyncio.to_thread(round_trip, number) for number in range(101, 121)))

    assert all(asyncio.run(asyncio.wait_for(from_coroutines(), 60)))
    assert len(store.list("thread")) == 61


FORKED = """
import os, sys
from pa_core.errors import StoreError
from pa_core.store.objects import ObjectStore

store = ObjectStore.open(sys.argv[1])
store.publish("parent", b"x")
child = os.fork()
if child == 0:
    status = 1
    try:
        store.read("parent")
    except StoreError as error:
        print(error, flush=True)
        status = 0 if ObjectStore.open(sys.argv[1]).read("parent") == b"x" else 2
    finally:
        os._exit(status)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert store.read("parent") == b"x"
"""


def test_a_forked_child_is_refused_and_may_open_the_url_anew(store: ObjectStore) -> None:
    output, errors = _child(FORKED, store.url).communicate(timeout=60)
    assert f"store {store.url}: cannot read 'parent': it was opened by process" in output, errors
    assert "Open store.url anew" in output
    assert "Error" not in errors


def test_checkpoints_and_ledger_live_through_a_crash_at_any_point(store: ObjectStore) -> None:
    """Two lives of a run: what the first acknowledged, the second finds, from another session."""
    weights, checkpoints, ledger = WeightStore(store), CheckpointStore(store), Ledger(store)
    tensors = {"w": torch.arange(6_000_000, dtype=torch.float32), "b": torch.ones(3, dtype=torch.bfloat16)}
    moments = {"w.exp_avg": torch.full((6_000_000,), 0.5), "w.step": torch.tensor(3.0)}
    weights.publish(1, tensors, {"config.json": b"{}"})
    checkpoints.save(1, lambda url, folder: save_tensors(ObjectStore.open(url), folder, moments), {"iteration": 1})
    ledger.write(0, ["p1", "p0"], {"loss": 0.5})
    again = ObjectStore.open(store.url)
    found = CheckpointStore(again).load(1)
    assert found.state == {"iteration": 1}
    loaded = load_tensors(
        ObjectStore.open(found.url), found.folder, found.files, lambda _, shape, dtype: torch.empty(shape, dtype=dtype)
    )
    assert all(torch.equal(loaded[name], moments[name]) for name in moments)
    target = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    WeightStore(again).load_into(1, target)
    assert all(torch.equal(target[name], tensors[name]) for name in tensors)
    assert WeightStore(again).extra(1, "config.json") == b"{}"
    assert Ledger(again).write(0, ["p0", "p1"]).facts == {"loss": 0.5}
    with pytest.raises(StoreError, match="recorded with other groups"):
        Ledger(again).write(0, ["p0", "p2"])


def test_a_damaged_shard_is_refused_before_a_byte_is_used(store: ObjectStore) -> None:
    weights = WeightStore(store)
    manifest = weights.publish(0, {"w": torch.ones(5_000_000)})
    key = f"weights/v000000/{manifest.shards[0].name}"
    content = bytearray(store.read(key))
    content[-1] ^= 1
    store.publish(key, bytes(content), exclusive=False)
    target = {"w": torch.zeros(5_000_000)}
    with pytest.raises(StoreError, match=f"{manifest.shards[0].name} does not have the sha256"):
        weights.load_into(0, target)
    assert not target["w"].any()
    store.publish(key, bytes(content[:-1]), exclusive=False)
    with pytest.raises(StoreError, match="bytes where its manifest says"):
        weights.load_into(0, target)


def test_delete_takes_more_than_one_request_can_name(store: ObjectStore) -> None:
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda number: store.publish(f"many/{number}", b"x"), range(1010)))
    store.publish("many-others", b"x")
    assert len(store.list("many")) == 1010
    store.delete("many")
    assert store.list() == ["many-others"]


def test_an_object_and_a_prefix_of_the_same_name_do_not_harm_each_other(store: ObjectStore) -> None:
    store.publish("a", b"object")
    try:
        store.publish("a/b", b"below")
    except StoreError:
        assert store.find("a/b") is None
    assert store.read("a") == b"object"
    assert store.exists("a")
    store.delete("a/b")
    assert store.read("a") == b"object"
    store.delete("a")
    assert store.list() == []
