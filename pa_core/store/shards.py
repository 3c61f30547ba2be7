"""Tensors as hashed safetensors files: written without copying them, read back only if size and digest agree.

A safetensors file is an 8-byte little-endian header length, a JSON header padded with blanks to a multiple of 8, and
the tensors' bytes, larger items first so that every tensor is aligned (github.com/huggingface/safetensors, "Format").
The library would either build the whole file in memory or write it without its digest; here the bytes go straight
from the tensors through the hash into the store.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from pa_core.errors import StoreError
from pa_core.store.objects import ObjectStore

THREADS = 2
_CHUNK_BYTES = 1 << 20
_SPLIT_BYTES = 32 << 20
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class StoredFile:
    """A file of a version: name in its folder, size in bytes, sha256 in hex."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class TensorEntry:
    """Where a tensor is: file name, safetensors dtype (``F32``, ``BF16``, …) and shape."""

    file: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class TensorTable:
    """Tensors by name, and the names that share another's memory and are stored once."""

    entries: Mapping[str, TensorEntry]
    tied: Mapping[str, str]


@dataclass(frozen=True)
class DeferredTensor:
    """A tensor that exists as a whole only while it is written, because processes hold parts of it.

    Attributes:
        identity: equal for names that share one tensor.
        fetch: the tensor, on the CPU.
    """

    shape: torch.Size
    dtype: torch.dtype
    identity: object
    fetch: Callable[[], torch.Tensor]

    def numel(self) -> int:
        """Entries."""
        return self.shape.numel()

    def element_size(self) -> int:
        """Bytes per entry."""
        return self.dtype.itemsize

    def detach(self) -> DeferredTensor:
        """Itself: there is no gradient."""
        return self

    def cpu(self) -> torch.Tensor:
        """The tensor, made now."""
        return self.fetch()


Storable = torch.Tensor | DeferredTensor


def dtype_named(name: str) -> torch.dtype:
    """The dtype of a safetensors name; :class:`StoreError` for an unknown one."""
    try:
        return next(dtype for dtype, known in _DTYPES.items() if known == name)
    except StopIteration:
        raise StoreError(f"a stored tensor is of {name}, which is none of {', '.join(_DTYPES.values())}") from None


def dtype_name(dtype: torch.dtype) -> str:
    """The safetensors name of a dtype; :class:`StoreError` when it has none."""
    try:
        return _DTYPES[dtype]
    except KeyError:
        raise StoreError(f"tensors of {dtype} cannot be stored; use one of {', '.join(map(str, _DTYPES))}") from None


def memory_of(tensor: Storable) -> tuple[object, ...]:
    """What two tensors have in common exactly when they are one: device, address, dtype, shape, strides."""
    if isinstance(tensor, DeferredTensor):
        return (tensor.identity,)
    address = tensor.data_ptr() if tensor.numel() else id(tensor)
    return (tensor.device, address, tensor.dtype, tuple(tensor.shape), tensor.stride())


class Shard:
    """One safetensors file that is still tensors in memory; they must not change until it is written."""

    def __init__(self, tensors: Mapping[str, Storable]) -> None:
        order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
        self.tensors = {name: tensors[name].detach() for name in order}
        header: dict[str, object] = {}
        offset = 0
        for name, tensor in self.tensors.items():
            end = offset + tensor.numel() * tensor.element_size()
            header[name] = {
                "dtype": dtype_name(tensor.dtype),
                "shape": list(tensor.shape),
                "data_offsets": [offset, end],
            }
            offset = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._header = struct.pack("<Q", len(text)) + text

    def chunks(self) -> Iterator[bytes | memoryview]:
        """The file's bytes. Only a tensor that is not contiguous or not on the CPU is copied, one at a time.

        A deferred one is made here and gone when the next one is.
        """
        yield self._header
        for tensor in self.tensors.values():
            flat = tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
            data = flat.numpy().data
            for start in range(0, len(data), _CHUNK_BYTES):
                yield data[start : start + _CHUNK_BYTES]

    def digest(self) -> str:
        """The sha256 that the written file will have."""
        digest = hashlib.sha256()
        for chunk in self.chunks():
            digest.update(chunk)
        return digest.hexdigest()


def plan_shards(tensors: Mapping[str, Storable], shard_bytes: int) -> tuple[list[Shard], dict[str, str]]:
    """Split tensors into files of about ``shard_bytes``, evenly, and at least :data:`THREADS` once that pays.

    The split depends on names, shapes and dtypes alone, so that equal tensors give equal files.

    Returns:
        the shards, and ``{name: stored name}`` of tensors that are the same memory as another.
    """
    owners: dict[tuple[object, ...], str] = {}
    tied: dict[str, str] = {}
    for name in sorted(tensors):
        owner = owners.setdefault(memory_of(tensors[name]), name)
        if owner != name:
            tied[name] = owner
    sizes = {name: tensors[name].numel() * tensors[name].element_size() for name in owners.values()}
    total = sum(sizes.values())
    count = max(1, -(-total // shard_bytes))
    if total > _SPLIT_BYTES:
        count = -(-count // THREADS) * THREADS
    bins: list[list[str]] = [[] for _ in range(min(count, max(1, len(sizes))))]
    filled = [0] * len(bins)
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        target = filled.index(min(filled))
        bins[target].append(name)
        filled[target] += sizes[name]
    return [Shard({name: tensors[name] for name in names}) for names in bins], tied


def publish_hashed(store: ObjectStore, key: str, chunks: Iterator[bytes | memoryview], *, durable: bool) -> StoredFile:
    """Publish a file exclusively while its size and sha256 are taken."""
    digest = hashlib.sha256()
    size = 0

    def hashed() -> Iterator[bytes | memoryview]:
        nonlocal size
        for chunk in chunks:
            digest.update(chunk)
            size += len(chunk)
            yield chunk

    store.publish_stream(key, hashed(), durable=durable)
    return StoredFile(key.rsplit("/", 1)[-1], size, digest.hexdigest())


def write_shards(
    store: ObjectStore, folder: str, names: Sequence[str], shards: Sequence[Shard], *, durable: bool
) -> list[StoredFile]:
    """Write shards under ``folder``, :data:`THREADS` at a time; the caller removes them should one fail."""
    with ThreadPoolExecutor(THREADS, thread_name_prefix="shard") as threads:
        jobs = [
            threads.submit(publish_hashed, store, f"{folder}/{name}", shard.chunks(), durable=durable)
            for name, shard in zip(names, shards, strict=True)
        ]
    return [job.result() for job in jobs]


def tensor_table(names: Sequence[str], shards: Sequence[Shard], tied: Mapping[str, str]) -> TensorTable:
    """The table of contents of shards that are written under ``names``."""
    entries = {
        tensor_name: TensorEntry(name, dtype_name(tensor.dtype), tuple(tensor.shape))
        for name, shard in zip(names, shards, strict=True)
        for tensor_name, tensor in shard.tensors.items()
    }
    return TensorTable(entries, tied)


@contextlib.contextmanager
def verified_files(store: ObjectStore, folder: str, files: Sequence[StoredFile]) -> Iterator[list[Path]]:
    """Local paths of files whose size and sha256 all agree: the files themselves on a local store, else downloads.

    Downloads are hashed on their way and removed in the end.

    Raises:
        StoreError: names the bad file.
    """
    with (
        tempfile.TemporaryDirectory(prefix="pa-download-") as scratch,
        ThreadPoolExecutor(THREADS, thread_name_prefix="verify") as threads,
    ):
        found = threads.map(lambda file: _obtain(store, f"{folder}/{file.name}", Path(scratch) / file.name), files)
        paths = []
        for expected, (path, size, digest) in zip(files, found, strict=True):
            problem = None
            if size != expected.size:
                problem = f"has {size} bytes where its manifest says {expected.size}"
            elif digest != expected.sha256:
                problem = "does not have the sha256 that its manifest says"
            if problem is not None:
                raise StoreError(
                    f"store {store.url}: {folder}/{expected.name} {problem}; remove {folder} and publish it again"
                )
            paths.append(path)
        yield paths


def _obtain(store: ObjectStore, key: str, target: Path) -> tuple[Path, int, str]:
    """A local path with an object's content, its size and its sha256."""
    path = store.local_path(key)
    if path is None:
        return target, *store.download(key, target)
    try:
        with path.open("rb") as file:
            return path, path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise StoreError(f"store {store.url}: {key} cannot be read: {error.strerror}") from error


def read_shard(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a safetensors file, on the CPU, one at a time. The file is mapped, not read into memory."""
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
                yield name, file.get_tensor(name)
    except SafetensorError as error:
        raise StoreError(f"{path}: not a safetensors file: {error}") from None
