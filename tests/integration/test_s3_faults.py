"""The store on a real S3 server behind a proxy that misbehaves: what passes is ridden out, what does not is told."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fault_proxy import FaultProxy, Kind
from s3 import S3Server

from pa_core.errors import StoreError
from pa_core.store.objects import ObjectStore
from pa_core.store.s3_files import open_s3
from pa_core.store.s3_patience import Patience
from pa_core.store.weights import WeightStore

PART = 16 << 20
CALM = Patience(connect_s=10.0, read_s=60.0, total_s=120.0, first_s=120.0)
HASTY = Patience(connect_s=10.0, read_s=2.0, total_s=120.0, first_s=120.0)
LARGE = bytes(range(256)) * ((2 * PART + 5120) // 256)


@pytest.fixture
def proxy(seaweedfs: S3Server) -> Iterator[FaultProxy]:
    with FaultProxy(seaweedfs.endpoint) as proxy:
        yield proxy


def _open(server: S3Server, proxy: FaultProxy, patience: Patience = CALM) -> ObjectStore:
    """A store behind the proxy that has spoken to the server before anything goes wrong."""
    with server.behind(proxy.endpoint).activated():
        store = ObjectStore(*open_s3(server.url(f"faults/{os.urandom(4).hex()}"), patience))
        assert not store.exists("nothing")
    proxy.heal()
    return store


@pytest.fixture
def store(seaweedfs: S3Server, proxy: FaultProxy) -> Iterator[ObjectStore]:
    store = _open(seaweedfs, proxy)
    yield store
    proxy.heal()
    store.delete("")
    assert seaweedfs.unfinished() == []


@pytest.mark.parametrize("kind", ["busy", "error", "bad_gateway", "reset", "stall"])
def test_what_passes_is_ridden_out_by_every_operation(seaweedfs: S3Server, proxy: FaultProxy, kind: Kind) -> None:
    store = _open(seaweedfs, proxy, HASTY if kind == "stall" else CALM)
    times = 1 if kind == "stall" else 2
    proxy.inject(kind, times, "PUT")
    store.publish("a", b"content")
    proxy.inject(kind, times, "GET")
    assert store.read("a") == b"content"
    proxy.inject(kind, times, "HEAD")
    assert store.exists("a")
    proxy.inject(kind, times, "GET", "list-type")
    assert store.list() == ["a"]
    proxy.inject(kind, times, "POST", "delete")
    store.delete("a")
    assert store.find("a") is None


@pytest.mark.parametrize("kind", ["busy", "reset", "lose_reply"])
def test_every_request_of_a_large_upload_is_repeated_by_itself(
    store: ObjectStore, proxy: FaultProxy, seaweedfs: S3Server, kind: Kind
) -> None:
    proxy.inject(kind, 1, "PUT", "partNumber=2")
    proxy.inject(kind, 1, "POST", "uploadId=")
    store.publish("large", LARGE)
    assert store.read("large") == LARGE
    parts = [path for method, path in proxy.seen if method == "PUT"]
    assert [sum(f"partNumber={number}" in path for path in parts) for number in (1, 2, 3)] == [1, 2, 1]
    assert seaweedfs.unfinished() == []


def test_a_truncated_body_is_read_again(store: ObjectStore, proxy: FaultProxy, tmp_path: Path) -> None:
    store.publish("small", b"content" * 1000)
    store.publish("large", LARGE)
    proxy.inject("truncate", 2, "GET", "small")
    assert store.read("small") == b"content" * 1000
    proxy.seen.clear()
    proxy.inject("truncate", 1, "GET", "large")
    proxy.inject("reset", 1, "GET", "large")
    size, _ = store.download("large", tmp_path / "large")
    assert size == len(LARGE)
    assert (tmp_path / "large").read_bytes() == LARGE
    assert [method for method, _ in proxy.seen].count("GET") == 5, "3 ranges, of which two were asked for twice"


@pytest.mark.parametrize("content", [b"ours", LARGE], ids=["one PUT", "multipart"])
def test_a_create_whose_reply_was_lost_counts_as_written(
    store: ObjectStore, proxy: FaultProxy, seaweedfs: S3Server, content: bytes
) -> None:
    proxy.inject("lose_reply", 1, "PUT" if len(content) < PART else "POST", "" if len(content) < PART else "uploadId=")
    store.publish("key", content)
    assert store.read("key") == content
    with pytest.raises(FileExistsError):
        store.publish("key", content[:-1] + b"!")
    assert seaweedfs.unfinished() == []


def test_a_lost_reply_does_not_hide_that_the_key_is_another_ones(store: ObjectStore, proxy: FaultProxy) -> None:
    store.publish("key", b"theirs")
    proxy.inject("lose_reply", 1, "PUT")
    with pytest.raises(FileExistsError):
        store.publish("key", b"ours")
    assert store.read("key") == b"theirs"


def test_an_upload_whose_beginning_got_no_reply_is_cleaned_up_with_its_prefix(
    store: ObjectStore, proxy: FaultProxy, seaweedfs: S3Server
) -> None:
    proxy.inject("lose_reply", 1, "POST", "?uploads")
    store.publish("v1/large", LARGE)
    assert store.read("v1/large") == LARGE
    assert len(seaweedfs.unfinished()) == 1, "the server began an upload that nobody knows of"
    store.delete("v1")
    assert seaweedfs.unfinished() == []
    assert store.list() == []


def test_overlapping_creates_are_repeated(store: ObjectStore, proxy: FaultProxy) -> None:
    proxy.inject("conflict", 2, "PUT")
    store.publish("key", b"ours")
    assert store.read("key") == b"ours"


def test_giving_up_names_store_key_cause_and_how_often_it_was_tried(seaweedfs: S3Server, proxy: FaultProxy) -> None:
    store = _open(seaweedfs, proxy, Patience(connect_s=1.0, read_s=1.0, total_s=2.0, first_s=2.0))
    proxy.inject("busy", 10_000)
    expected = rf"store {store.url}: cannot write 'key': SlowDown, says the proxy \(tried \d+ times in \d s\)\. Check"
    with pytest.raises(StoreError, match=expected):
        store.publish("key", b"x")
    assert 2 <= len(proxy.seen) < 100
    proxy.heal()
    proxy.inject("stall", 10_000)
    with pytest.raises(StoreError, match=r"(?i)cannot read 'key': read timeout.*\(tried \d+ times in \d s\)"):
        store.read("key")
    proxy.heal()
    store.publish("key", b"x")


def test_a_publish_that_gives_up_leaves_the_earlier_version_and_can_be_repeated(
    seaweedfs: S3Server, proxy: FaultProxy
) -> None:
    store = _open(seaweedfs, proxy, Patience(total_s=2.0, first_s=2.0))
    weights = WeightStore(store)
    weights.publish(0, {"w": torch.zeros(3)})
    proxy.inject("busy", 10_000, "PUT", "partNumber=2")
    with pytest.raises(StoreError, match=r"cannot write 'v000001/model-.*tried"):
        weights.publish(1, {"w": torch.ones(6_000_000)})
    assert seaweedfs.unfinished() == []
    assert [key for key in store.list(unfinished=True) if "v000001" in key] == []
    assert weights.latest() == 0
    proxy.heal()
    weights.publish(1, {"w": torch.ones(6_000_000)})
    assert weights.load(1)["w"].all()
    store.delete("")


def test_an_abort_that_fails_too_does_not_hide_the_first_error(seaweedfs: S3Server, proxy: FaultProxy) -> None:
    store = _open(seaweedfs, proxy, Patience(total_s=1.0, first_s=1.0))
    proxy.inject("busy", 10_000, "PUT", "partNumber")
    proxy.inject("error", 10_000, "DELETE")
    with pytest.raises(StoreError, match="cannot write 'large': SlowDown") as caught:
        store.publish("large", LARGE)
    assert "aborting its multipart upload failed" in "".join(getattr(caught.value.__cause__, "__notes__", []))
    proxy.heal()
    assert len(seaweedfs.unfinished()) == 1
    store.delete("large")
    assert seaweedfs.unfinished() == []


def test_a_server_that_never_answered_is_given_up_sooner(seaweedfs: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    store = ObjectStore(*open_s3(seaweedfs.url("nobody"), Patience(total_s=1000.0, first_s=1.0)))
    with pytest.raises(StoreError, match=r"127\.0\.0\.1:9.*tried \d+ times in [01] s.*AWS_ENDPOINT_URL"):
        store.publish("key", b"x")


def test_what_does_not_pass_is_not_tried_again(store: ObjectStore, proxy: FaultProxy, seaweedfs: S3Server) -> None:
    store.publish("key", b"theirs")
    proxy.seen.clear()
    assert store.find("missing") is None
    assert len(proxy.seen) == 1, "404"
    proxy.seen.clear()
    with pytest.raises(FileExistsError):
        store.publish("key", b"other!")
    assert [method for method, _ in proxy.seen].count("PUT") == 1, "412"
    with seaweedfs.behind(proxy.endpoint).activated(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
        stranger = ObjectStore.open(store.url)
        proxy.seen.clear()
        with pytest.raises(StoreError, match=r"secret key does not belong|access denied"):
            stranger.read("key")
        assert len(proxy.seen) == 1, "403"


def test_versions_are_published_and_loaded_without_a_single_listing(store: ObjectStore, proxy: FaultProxy) -> None:
    weights = WeightStore(store)
    for version in range(2):
        weights.publish(version, {"w": torch.full((5_000_000,), float(version))}, {"config.json": b"{}"})
    assert weights.latest() == 1
    assert weights.load(1)["w"].all()
    asked = [(method, path) for method, path in proxy.seen if "list-type" in path or "prefix" in path]
    assert asked == []
    assert not any("copy" in path for _, path in proxy.seen)
