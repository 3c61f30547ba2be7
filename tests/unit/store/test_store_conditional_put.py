"""Stores without links or renames: one conditional PUT, whose refusal servers report in different ways."""

from __future__ import annotations

import errno
from typing import Any

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from pa_core.errors import StoreError
from pa_core.store.objects import ObjectStore
from pa_core.store.weights import WeightStore


class _ClientError(Exception):
    """Shape of botocore's error: a parsed response."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.response = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": 412}}


class BucketFileSystem(MemoryFileSystem):
    """An object store as fsspec shows it: PUT and GET of whole objects, nothing else."""

    protocol = "bucket"
    store: dict[str, Any] = {}  # noqa: RUF012
    pseudo_dirs: list[str] = [""]  # noqa: RUF012
    refusal: OSError | None = None
    conflicts = 0
    lose_reply = False

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        if self.conflicts > 0:
            self.conflicts -= 1
            raise OSError(errno.EIO, "overlapping") from _ClientError("ConditionalRequestConflict")
        if mode == "create" and self.exists(path):
            if self.refusal is None:
                raise OSError(errno.EINVAL, "At least one of the pre-conditions failed") from _ClientError(
                    "PreconditionFailed"
                )
            raise self.refusal
        super().pipe_file(path, value)
        if self.lose_reply:
            self.lose_reply = False
            self.pipe_file(path, value, mode)

    def put_file(self, lpath: str, rpath: str, mode: str = "overwrite", **_: Any) -> None:  # type: ignore[override]
        with open(lpath, "rb") as file:
            self.pipe_file(rpath, file.read(), mode)

    def mv(self, *_: Any, **__: Any) -> None:
        raise AssertionError("object stores have no rename")

    def ls(self, *_: Any, **__: Any) -> list[Any]:
        raise AssertionError("nothing may be discovered by listing")


@pytest.fixture
def bucket() -> tuple[ObjectStore, BucketFileSystem]:
    filesystem = BucketFileSystem(skip_instance_cache=True)
    filesystem.store = {}
    filesystem.pseudo_dirs = [""]
    return ObjectStore(filesystem, "/runs/one"), filesystem


@pytest.mark.parametrize("refusal", [None, FileExistsError("exists")])
def test_a_lost_race_is_file_exists_error_however_the_server_says_it(
    bucket: tuple[ObjectStore, BucketFileSystem], refusal: OSError | None
) -> None:
    store, filesystem = bucket
    filesystem.refusal = refusal
    store.publish("key", b"theirs")
    with pytest.raises(FileExistsError):
        store.publish("key", b"ours")
    assert store.read("key") == b"theirs"


def test_a_put_repeated_after_a_lost_reply_counts_as_written(bucket: tuple[ObjectStore, BucketFileSystem]) -> None:
    store, filesystem = bucket
    filesystem.lose_reply = True
    store.publish("key", b"ours")
    assert store.read("key") == b"ours"


def test_overlapping_writers_try_again(bucket: tuple[ObjectStore, BucketFileSystem]) -> None:
    store, filesystem = bucket
    filesystem.conflicts = 2
    store.publish("key", b"ours")
    assert store.read("key") == b"ours"


def test_other_refusals_are_store_errors(bucket: tuple[ObjectStore, BucketFileSystem]) -> None:
    store, filesystem = bucket
    store.publish("key", b"theirs")
    filesystem.refusal = PermissionError("Access Denied")
    with pytest.raises(StoreError, match=r"store bucket:///?runs/one: cannot write 'key': Access Denied.*Grant write"):
        store.publish("key", b"ours")


def test_weights_are_published_and_loaded_without_rename_or_listing(
    bucket: tuple[ObjectStore, BucketFileSystem],
) -> None:
    store, _ = bucket
    weights = WeightStore(store)
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)}
    weights.publish(0, tensors)
    weights.publish(1, {name: tensor + 1 for name, tensor in tensors.items()})
    assert weights.latest() == 1
    assert torch.equal(weights.load(0)["a"], tensors["a"])
    target = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    weights.load_into(1, target)
    assert torch.equal(target["b"], tensors["b"] + 1)
