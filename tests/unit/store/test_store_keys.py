"""Keys and URLs that must not be taken: nothing may leave its store, nothing secret may be repeated."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pa_core.errors import StoreError
from pa_core.store.objects import ObjectStore

BAD_KEYS = [
    "../x",
    "a/../../x",
    "..",
    "/etc/passwd",
    "a//b",
    "a/./b",
    "",
    "a/",
    "a\\b",
    "a\0b",
    "a\nb",
    " a",
    "a ",
    "%2e%2e/x",
    "%2e%2e%2fx",
    "s3://other/x",
    "file:///etc/passwd",
    "simplecache::s3://other/x",
    "a?versionId=1",
    "a#b",
    "a*",
    "a[bc]",
    "~/x*",
    "\u2024\u2024/x",  # one-dot leaders
    "\u2025/x",  # a two-dot leader
    "\uff0e\uff0e/x",  # full-width dots
    "..\u2215x",  # a division slash
    "..\u200b/x",  # a space of no width
    "a" * 256,
    "/".join(["a" * 200] * 6),
]
GOOD_KEYS = [
    "v000001/p-1.arrow",
    "model-00001-of-00002-ab12cd34.safetensors",
    ".hidden",
    "a b.txt",
    "x@y=z+1,2~",
    "..a",
]


@pytest.mark.parametrize("key", BAD_KEYS)
def test_keys_cannot_leave_the_root(store: ObjectStore, tmp_path: Path, key: str) -> None:
    uses: list[Callable[[str], Any]] = [
        lambda key: store.publish(key, b"x"),
        lambda key: store.publish_stream(key, iter([b"x"]), exclusive=False),
        store.read,
        store.find,
        store.exists,
        store.child,
        store.sync if store.url.startswith("file:") else store.read,
        lambda key: store.download(key, tmp_path / "target"),
    ]
    if key:
        uses += [store.delete, store.list]
    for use in uses:
        with pytest.raises(ValueError, match="store key"):
            use(key)
    assert store.list(unfinished=True) == []
    assert list(tmp_path.rglob("*")) == []


@pytest.mark.parametrize("key", GOOD_KEYS)
def test_ordinary_names_are_kept_as_they_are(store: ObjectStore, key: str) -> None:
    store.publish(key, b"x")
    assert store.list() == [key]
    assert store.read(key) == b"x"
    store.delete(key)
    assert store.list() == []


def test_a_key_of_the_greatest_length_is_kept(store: ObjectStore) -> None:
    key = f"{'a' * 255}/{'b' * 255}"
    store.publish(key, b"x")
    assert store.list() == [key]


@pytest.mark.parametrize(
    "url",
    [
        "s3://id:very-secret@bucket/runs",
        "s3://id:very/secret@bucket/runs",
        "s3://very-secret@bucket/runs",
        "s3://bucket/runs?secret=very-secret",
        "s3://bucket/runs?key=id&secret=very-secret",
        "gs://bucket/runs?token=very-secret",
        "s3://id:very-secret/runs",
        "simplecache::s3://id:very-secret@bucket/runs",
    ],
)
def test_secrets_in_the_url_are_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(StoreError, match=r"store\.url") as caught:
        ObjectStore.open(url)
    assert "secret" not in str(caught.value).replace("secrets", "")
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("simplecache::s3://bucket/runs", "chain"),
        ("/tmp/a::b", "chain"),
        ("zip://x.zip::s3://bucket/runs", "chain"),
        ("s3://", "bucket"),
        ("s3:///runs", "bucket"),
        ("s3://ab/runs", "bucket"),
        ("s3://bucket/../other", r"leave out '\.'"),
        ("s3://bucket//runs", "empty names"),
        ("s3:/bucket/runs", "two slashes"),
        ("nonsense://x", r"store\.url='nonsense://x'"),
    ],
)
def test_urls_that_name_no_single_place_are_refused(url: str, reason: str) -> None:
    with pytest.raises(StoreError, match=reason):
        ObjectStore.open(url)


def test_a_folder_may_have_an_odd_name(tmp_path: Path) -> None:
    store = ObjectStore.open(str(tmp_path / "a ?*[b] é"))
    store.publish("key", b"x")
    assert (tmp_path / "a ?*[b] é" / "key").read_bytes() == b"x"
    assert store.list() == ["key"]
    store.delete("")
    assert store.list() == []
