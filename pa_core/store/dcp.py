"""Tensors that are spread over processes, stored through torch.distributed.checkpoint and loaded into any layout.

Every process writes what it holds of each tensor into safetensors files of its own; ``tensors.json`` says which file
has which part of what. A process that loads reads the parts that overlap with its own. Metadata is JSON where torch's
own file-system writer pickles it, and nothing that is read from the store is ever unpickled.

Planning (who writes a tensor that several have, who reads what) is torch's; between processes of one run it travels
over their process group, pickled by torch. A single process takes the same path without one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from pa_core.errors import StoreError
from pa_core.store.objects import ObjectStore
from pa_core.store.shards import (
    StoredFile,
    dtype_name,
    dtype_named,
    plan_shards,
    read_shard,
    verified_files,
    write_shards,
)

TABLE = "tensors.json"
SHARD_BYTES = 512 << 20


def save_tensors(
    store: ObjectStore, folder: str, tensors: Mapping[str, torch.Tensor], shard_bytes: int = SHARD_BYTES
) -> list[StoredFile]:
    """Store ``tensors``, flushed to the disk; with a process group, all of its processes call this together.

    Args:
        folder: key prefix of the files, below which nothing is yet.
        tensors: plain ones, the same on every process, or DTensors.

    Returns:
        Every file that was written, on the first process; on the others an empty list.

    Raises:
        StoreError: some process cannot write.
    """
    writer = _Writer(store, folder, shard_bytes)
    with _plain_errors():
        dcp.save(dict(tensors), storage_writer=writer, no_dist=not dist.is_initialized())
    return writer.files


def load_tensors(
    store: ObjectStore,
    folder: str,
    files: Sequence[StoredFile],
    empty: Callable[[str, torch.Size, torch.dtype], torch.Tensor],
) -> dict[str, torch.Tensor]:
    """Load what :func:`save_tensors` has stored into the tensors that ``empty`` makes of name, whole shape and dtype.

    With a process group, all of its processes call this together; each verifies the files that it reads.

    Raises:
        StoreError: a file is missing or fails its size or sha256.
    """
    reader = _Reader(store, folder, files)
    tensors = {
        name: empty(name, entry.size, entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    with _plain_errors():
        dcp.load(tensors, storage_reader=reader, no_dist=not dist.is_initialized())
    return tensors


@contextlib.contextmanager
def _plain_errors() -> Iterator[None]:
    """Raise a process's own error instead of torch's account of what failed on which process."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
            yield
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from None


def _key(index: MetadataIndex) -> str:
    """Name of a part in its file: the tensor's, with its offsets unless it begins where the tensor does."""
    offsets = list(index.offset or ())
    return f"{index.fqn}@{','.join(map(str, offsets))}" if any(offsets) else index.fqn


class _Writer(StorageWriter):
    def __init__(self, store: ObjectStore, folder: str, shard_bytes: int) -> None:
        self._store = store
        self._folder = folder
        self._shard_bytes = shard_bytes
        self.files: list[StoredFile] = []

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return checkpoint_id is None

    def reset(self, checkpoint_id: Any = None) -> None:
        self.files = []

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        return None

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        parts: dict[str, torch.Tensor] = {}
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO:
                raise TypeError(f"{item.index.fqn} is no tensor, and only tensors are stored")
            part = planner.resolve_data(item)
            assert isinstance(part, torch.Tensor)
            parts[_key(item.index)] = part.detach()
        found: dict[str, StoredFile] = {}
        if parts:
            shards, tied = plan_shards(parts, self._shard_bytes)
            rank = dist.get_rank() if dist.is_initialized() else 0
            names = [f"optimizer-{rank:05d}-{number:05d}.safetensors" for number in range(len(shards))]
            files = write_shards(self._store, self._folder, names, shards, durable=True)
            found = {key: file for shard, file in zip(shards, files, strict=True) for key in shard.tensors}
            places = {key: tied.get(key, key) for key in parts}
        results = [
            WriteResult(
                index=item.index,
                size_in_bytes=parts[key].numel() * parts[key].element_size(),
                storage_data=asdict(found[places[key]]) | {"key": places[key], "shape": list(parts[key].shape)},
            )
            for item, key in zip(plan.items, parts, strict=True)
        ]
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        chunks: dict[str, list[dict[str, Any]]] = defaultdict(list)
        files: dict[str, StoredFile] = {}
        for result in (result for part in results for result in part):
            place = result.storage_data
            file = StoredFile(place["name"], place["size"], place["sha256"])
            files[file.name] = file
            chunks[result.index.fqn].append(
                {
                    "offsets": list(result.index.offset or [0] * len(place["shape"])),
                    "shape": place["shape"],
                    "file": file.name,
                    "key": place["key"],
                }
            )
        table: dict[str, dict[str, Any]] = {
            name: {
                "dtype": dtype_name(entry.properties.dtype),
                "shape": list(entry.size),
                "chunks": sorted(chunks[name], key=lambda chunk: chunk["offsets"]),
            }
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        data = json.dumps(table).encode()
        self._store.publish(f"{self._folder}/{TABLE}", data)
        self.files = [*files.values(), StoredFile(TABLE, len(data), hashlib.sha256(data).hexdigest())]


class _Reader(StorageReader):
    def __init__(self, store: ObjectStore, folder: str, files: Sequence[StoredFile]) -> None:
        self._store = store
        self._folder = folder
        self._files = {file.name: file for file in files}

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return checkpoint_id is None

    def reset(self, checkpoint_id: Any = None) -> None:
        return None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with verified_files(self._store, self._folder, [self._file(TABLE)]) as (path,):
            table = json.loads(path.read_bytes())
        entries: dict[str, Any] = {}
        places: dict[MetadataIndex, tuple[str, str]] = {}
        for name, entry in table.items():
            chunks = [
                ChunkStorageMetadata(torch.Size(chunk["offsets"]), torch.Size(chunk["shape"]))
                for chunk in entry["chunks"]
            ]
            properties = TensorProperties(dtype=dtype_named(entry["dtype"]))
            entries[name] = TensorStorageMetadata(properties, torch.Size(entry["shape"]), chunks)
            places |= {
                MetadataIndex(name, found.offsets): (chunk["file"], chunk["key"])
                for found, chunk in zip(chunks, entry["chunks"], strict=True)
            }
        return Metadata(entries, storage_data=places)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._places: dict[MetadataIndex, tuple[str, str]] = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        wanted: dict[str, list[tuple[Any, str]]] = defaultdict(list)
        for item in plan.items:
            file, key = self._places[item.storage_index]
            wanted[file].append((item, key))
        for name, items in wanted.items():
            with verified_files(self._store, self._folder, [self._file(name)]) as (path,):
                stored = dict(read_shard(path))
                for item, key in items:
                    part = stored[key]
                    for dimension, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                        part = part.narrow(dimension, start, length)
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(part)
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _file(self, name: str) -> StoredFile:
        try:
            return self._files[name]
        except KeyError:
            raise StoreError(f"store {self._store.url}: the manifest lists no {name}") from None
