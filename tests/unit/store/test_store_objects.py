from __future__ import annotations

import hashlib
import os
import threading
from pathlib import Path

import fsspec
import pytest

from pa_core.errors import StoreError
from pa_core.store.objects import ObjectStore


def test_what_was_published_is_read_back(store: ObjectStore, tmp_path: Path) -> None:
    file = tmp_path / "content"
    file.write_bytes(b"from a file")
    store.publish("a/b.json", b"bytes")
    store.publish("a/c.bin", file)
    store.publish_stream("a/d.bin", iter([b"one ", memoryview(b"two")]))
    assert [store.read(f"a/{name}") for name in ("b.json", "c.bin", "d.bin")] == [b"bytes", b"from a file", b"one two"]
    assert file.read_bytes() == b"from a file"


def test_published_objects_are_plain_files_at_the_url(tmp_path: Path) -> None:
    store = ObjectStore.open(str(tmp_path / "run"))
    store.publish("weights/x.json", b"{}")
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()] == [
        "run/weights/x.json"
    ]
    with fsspec.open(f"{store.url}/weights/x.json") as opened:
        assert opened.read() == b"{}"


def test_an_exclusive_publish_never_replaces(store: ObjectStore) -> None:
    store.publish("key", b"first")
    with pytest.raises(FileExistsError, match="key"):
        store.publish("key", b"second")
    with pytest.raises(FileExistsError):
        store.publish_stream("key", iter([b"second"]))
    assert store.read("key") == b"first"


def test_a_publish_that_is_not_exclusive_replaces(store: ObjectStore) -> None:
    store.publish("key", b"a longer first content", exclusive=False)
    store.publish("key", b"second", exclusive=False)
    assert store.read("key") == b"second"


def test_of_many_racing_writers_one_wins(store: ObjectStore) -> None:
    start = threading.Barrier(8)
    won: list[int] = []

    def write(number: int) -> None:
        start.wait(10)
        try:
            store.publish("key", str(number).encode() * 100_000)
            won.append(number)
        except FileExistsError:
            return

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(won) == 1
    assert store.read("key") == str(won[0]).encode() * 100_000
    assert store.list(unfinished=True) == ["key"]


def test_a_file_is_invisible_until_its_last_byte(tmp_path: Path) -> None:
    store = ObjectStore.open(str(tmp_path))

    def chunks() -> object:
        for _ in range(3):
            yield b"x" * 1000
            assert not store.exists("key")
            assert store.list() == []

    store.publish_stream("key", chunks())  # type: ignore[arg-type]
    assert len(store.read("key")) == 3000


def test_a_publish_that_fails_half_way_leaves_nothing(store: ObjectStore) -> None:
    def chunks() -> object:
        yield b"x"
        raise RuntimeError("the producer broke")

    with pytest.raises(RuntimeError, match="the producer broke"):
        store.publish_stream("folder/key", chunks())  # type: ignore[arg-type]
    assert store.list(unfinished=True) == []


def test_exists_and_find_tell_objects_from_prefixes_and_absence(store: ObjectStore) -> None:
    store.publish("a/b", b"x")
    assert store.exists("a/b")
    assert not store.exists("a")
    assert not store.exists("a/b/c")
    assert store.find("a/missing") is None
    with pytest.raises(StoreError, match=r"cannot read 'a/missing': there is no such object"):
        store.read("a/missing")


def test_delete_removes_an_object_a_prefix_or_all_and_forgives_absence(store: ObjectStore) -> None:
    for key in ("a/b", "a/c", "ab/d", "e"):
        store.publish(key, b"x")
    store.delete("a/b")
    assert store.list() == ["a/c", "ab/d", "e"]
    store.delete("a")
    assert store.list() == ["ab/d", "e"]
    store.delete("a")
    store.delete("never/there")
    store.delete("")
    assert store.list() == []


def test_list_gives_keys_below_a_prefix(store: ObjectStore) -> None:
    for key in ("v1/a", "v1/b/c", "v10/a"):
        store.publish(key, b"x")
    assert store.list("v1") == ["v1/a", "v1/b/c"]
    assert store.list("nothing") == []


def test_a_child_sees_its_own_keys_only(store: ObjectStore) -> None:
    child = store.child("weights").child("v1")
    child.publish("a", b"x")
    assert store.read("weights/v1/a") == b"x"
    assert child.list() == ["a"]
    assert child.url == f"{store.url}/weights/v1"


def test_the_url_opens_the_same_store_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = ObjectStore.open("runs/my run")
    store.publish("key", b"x")
    monkeypatch.chdir("/")
    assert store.url == f"file://{tmp_path}/runs/my run"
    assert ObjectStore.open(store.url).read("key") == b"x"


def test_the_local_path_is_the_object_itself_and_remote_objects_have_none(store: ObjectStore) -> None:
    store.publish("a/b.bin", b"content")
    path = store.local_path("a/b.bin")
    if store.url.startswith("file:"):
        assert path is not None
        assert path.read_bytes() == b"content"
    else:
        assert path is None


def test_a_download_tells_the_size_and_digest_of_what_it_wrote(store: ObjectStore, tmp_path: Path) -> None:
    for name, content in {"empty": b"", "small": b"content", "odd": bytes(range(256)) * 5000 + b"x"}.items():
        store.publish(name, content)
        assert store.download(name, tmp_path / name) == (len(content), hashlib.sha256(content).hexdigest())
        assert (tmp_path / name).read_bytes() == content
    with pytest.raises(StoreError, match="cannot read 'missing': there is no such object"):
        store.download("missing", tmp_path / "missing")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a disk without space")
def test_a_full_disk_under_a_download_is_named_with_the_fix(store: ObjectStore) -> None:
    store.publish("a", bytes(1 << 20))
    with pytest.raises(StoreError, match=r"cannot read 'a': No space left on device \(ENOSPC\) in /dev.*TMPDIR"):
        store.download("a", Path("/dev/full"))


def test_durable_objects_are_flushed_before_they_get_their_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    fsync, link = os.fsync, os.link
    monkeypatch.setattr(os, "fsync", lambda descriptor: (events.append("fsync"), fsync(descriptor)))
    monkeypatch.setattr(os, "link", lambda *paths: (events.append("link"), link(*paths)))
    store = ObjectStore.open(str(tmp_path))
    store.publish("fast", b"x", durable=False)
    assert events == ["link"]
    events.clear()
    store.publish("safe", b"x")
    assert events == ["fsync", "link", "fsync"]
