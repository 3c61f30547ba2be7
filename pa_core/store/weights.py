"""Published policy versions: atomic, hashed, loadable in place.

``weights/v000012/`` holds safetensors files and, written last and exclusively, ``manifest.json``. A version exists if
and only if its manifest does, and whoever loads it checks size and sha256 of every file before using one byte.

Weights are published without fsync. A crash of the process cannot tear a version, because the kernel has the bytes
before the manifest gets its name; only a power failure could leave a manifest over lost bytes, and the digests tell.
A version that a checkpoint refers to is flushed by :meth:`WeightStore.sync`; the others are mostly replaced before
the disk would have seen them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from pa_core.errors import StoreError
from pa_core.store.objects import ObjectStore
from pa_core.store.shards import (
    Shard,
    StoredFile,
    TensorEntry,
    TensorTable,
    dtype_name,
    memory_of,
    plan_shards,
    read_shard,
    tensor_table,
    verified_files,
    write_shards,
)

MANIFEST = "manifest.json"
LATEST = "latest.json"
SHARD_BYTES = 512 << 20


def version_name(version: int) -> str:
    """``v000012``: how a policy version is written in keys."""
    return f"v{version:06d}"


def version_of(key: str) -> int:
    """The policy version that a key begins with, or -1."""
    match = re.match(r"v(\d+)(?=[/.])", key)
    return int(match[1]) if match else -1


@dataclass(frozen=True)
class Manifest:
    """What a version consists of.

    Attributes:
        version: the policy version.
        files: every file, with size and digest.
        table: every tensor, with file, dtype and shape; tied names.
        weights_sha256: one digest of all tensor files: equal weights in equal shards give equal digests.
    """

    version: int
    files: tuple[StoredFile, ...]
    table: TensorTable
    weights_sha256: str

    @property
    def shards(self) -> list[StoredFile]:
        """The files that hold tensors."""
        return [file for file in self.files if file.name.endswith(".safetensors")]

    def to_json(self) -> bytes:
        """The manifest as stored."""
        return json.dumps(asdict(self), indent=1).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Manifest:
        """Read a stored manifest."""
        tree = json.loads(data)
        entries = {
            name: TensorEntry(entry["file"], entry["dtype"], tuple(entry["shape"]))
            for name, entry in tree["table"]["entries"].items()
        }
        files = tuple(StoredFile(**file) for file in tree["files"])
        return cls(tree["version"], files, TensorTable(entries, tree["table"]["tied"]), tree["weights_sha256"])


def _weights_digest(digests: list[str]) -> str:
    return hashlib.sha256("".join(digests).encode()).hexdigest()


class WeightStore:
    """Policy versions below a run's store."""

    def __init__(self, store: ObjectStore, shard_bytes: int = SHARD_BYTES) -> None:
        self._store = store.child("weights")
        self._shard_bytes = shard_bytes

    def publish(
        self, version: int, tensors: Mapping[str, torch.Tensor], extra: Mapping[str, bytes] | None = None
    ) -> Manifest:
        """Store ``tensors`` (and ``extra`` files, for example ``config.json``) as ``version``.

        Tensors are read in place, tied ones once, and must not change meanwhile. Publishing the same weights again
        is no error and writes nothing.

        Raises:
            StoreError: the store cannot be written (nothing of the version remains, other versions are untouched), a
                dtype is unknown to safetensors, or the version exists with other weights.
        """
        extra = extra or {}
        for name in extra:
            if name == MANIFEST or name.endswith(".safetensors"):
                raise ValueError(f"extra file {name!r}: the name is reserved")
        shards, tied = plan_shards(tensors, self._shard_bytes)
        existing = self.manifest(version)
        if existing is not None:
            return self._same(existing, _weights_digest([shard.digest() for shard in shards]))
        # Names are unique per attempt: what a crashed or a competing publisher left never mixes with ours.
        attempt = uuid.uuid4().hex[:8]
        names = [
            f"model-{number:05d}-of-{len(shards):05d}-{attempt}.safetensors" for number in range(1, len(shards) + 1)
        ]
        try:
            manifest = self._write(version, names, shards, tied, extra)
            self._store.publish(self._key(version, MANIFEST), manifest.to_json(), durable=False)
        except BaseException as error:
            winner = self._clean_up(version, names, list(extra), error)
            if winner is None or not isinstance(error, FileExistsError):
                raise
            return self._same(winner, _weights_digest([shard.digest() for shard in shards]))
        self._point_to(version)
        return manifest

    def _point_to(self, version: int) -> None:
        self._store.publish(LATEST, json.dumps({"version": version}).encode(), exclusive=False, durable=False)

    def _write(
        self,
        version: int,
        names: list[str],
        shards: list[Shard],
        tied: Mapping[str, str],
        extra: Mapping[str, bytes],
    ) -> Manifest:
        files = write_shards(self._store, version_name(version), names, shards, durable=False)
        digest = _weights_digest([file.sha256 for file in files])
        for name, content in extra.items():
            self._store.publish(self._key(version, name), content, exclusive=False, durable=False)
            files.append(StoredFile(name, len(content), hashlib.sha256(content).hexdigest()))
        return Manifest(version, tuple(files), tensor_table(names, shards, tied), digest)

    def _clean_up(self, version: int, names: list[str], extra: list[str], error: BaseException) -> Manifest | None:
        """Remove what a failed attempt left; the manifest that another publisher has written meanwhile, if any."""
        try:
            winner = self.manifest(version)
            for name in names if winner is not None else [*names, *extra]:
                self._store.delete(self._key(version, name))
            return winner
        except StoreError as failure:
            error.add_note(f"and removing what was written failed: {failure}")
            return None

    def _same(self, existing: Manifest, digest: str) -> Manifest:
        if existing.weights_sha256 != digest:
            raise StoreError(
                f"store {self._store.url}: version {existing.version} is already published with other weights "
                f"({existing.weights_sha256[:12]}, not {digest[:12]}); remove it before publishing it anew"
            )
        return existing

    def _key(self, version: int, name: str) -> str:
        return f"{version_name(version)}/{name}"

    def manifest(self, version: int) -> Manifest | None:
        """The manifest of a version, or None while it is not published."""
        data = self._store.find(self._key(version, MANIFEST))
        return None if data is None else Manifest.from_json(data)

    def latest(self) -> int | None:
        """The newest version, or None before the first.

        ``latest.json`` says where to begin, the manifests decide: a version whose publisher died before it could
        write the former is found all the same.
        """
        data = self._store.find(LATEST)
        version = -1 if data is None else int(json.loads(data)["version"])
        while self._store.exists(self._key(version + 1, MANIFEST)):
            version += 1
        return version if version >= 0 and self._store.exists(self._key(version, MANIFEST)) else None

    def require(self, version: int) -> Manifest:
        """The manifest of a version that must exist."""
        manifest = self.manifest(version)
        if manifest is None:
            raise StoreError(f"store {self._store.url}: policy version {version} is not published")
        return manifest

    def extra(self, version: int, name: str) -> bytes:
        """An extra file of a version, verified."""
        listed = {file.name: file for file in self.require(version).files}
        if name not in listed:
            raise StoreError(f"store {self._store.url}: version {version} has no file {name!r}, only {sorted(listed)}")
        with verified_files(self._store, version_name(version), [listed[name]]) as (path,):
            return path.read_bytes()

    @contextlib.contextmanager
    def verified(self, version: int) -> Iterator[tuple[Manifest, list[Path]]]:
        """A version's manifest and local paths of its tensor files, once the digests of all of them agree."""
        manifest = self.require(version)
        with verified_files(self._store, version_name(version), manifest.shards) as paths:
            yield manifest, paths

    def shards(self, version: int) -> Iterator[dict[str, torch.Tensor]]:
        """The tensors file by file, each under its stored name, once every file of the version is verified."""
        with self.verified(version) as (_, paths):
            for path in paths:
                yield dict(read_shard(path))

    def load(self, version: int) -> dict[str, torch.Tensor]:
        """All tensors under all names they were published by (tied names give the same tensor), on the CPU."""
        manifest = self.require(version)
        tensors = {name: tensor for shard in self.shards(version) for name, tensor in shard.items()}
        return tensors | {name: tensors[owner] for name, owner in manifest.table.tied.items()}

    def load_into(self, version: int, targets: Mapping[str, torch.Tensor] | torch.nn.Module) -> Manifest:
        """Copy a version into existing tensors, or a model's parameters and buffers, one tensor at a time.

        Names, shapes, dtypes and digests are all checked before the first byte is copied, so a refused version
        leaves the model as it was. A tied tensor counts as present under any of its names.

        Raises:
            StoreError: the version is missing or damaged, or does not fit ``targets``.
        """
        places = _match(
            self.require(version), targets.state_dict() if isinstance(targets, torch.nn.Module) else targets
        )
        with self.verified(version) as (manifest, paths), torch.no_grad():
            for path in paths:
                for name, tensor in read_shard(path):
                    for target in places[name]:
                        target.copy_(tensor)
        return manifest

    def sync(self, version: int) -> None:
        """Flush a version to the disk, so that it survives a power failure."""
        for file in self.require(version).files:
            self._store.sync(self._key(version, file.name))
        self._store.sync(self._key(version, MANIFEST))

    def retain(self, keep: set[int]) -> list[int]:
        """Remove every version but ``keep``, and what crashed publishers left; the removed versions, in order."""
        found = self._found()
        return self._remove_all(found - keep, found & keep)

    def forget_after(self, version: int) -> list[int]:
        """Remove the versions later than ``version``, which will be made anew; the removed versions, in order."""
        found = self._found()
        later = {other for other in found if other > version}
        return self._remove_all(later, found - later)

    def _found(self) -> set[int]:
        """Versions of which anything is there, be it only what a crashed publisher left."""
        return {version_of(key) for key in self._store.list(unfinished=True)} - {-1}

    def _remove_all(self, versions: set[int], others: set[int]) -> list[int]:
        for version in sorted(versions, reverse=True):
            self.remove(version)
        newest = max((other for other in others if self.manifest(other) is not None), default=-1)
        if newest >= 0 and newest < max(versions, default=-1):
            self._point_to(newest)
        return sorted(versions)

    def remove(self, version: int) -> None:
        """Remove one version, manifest first, so that no reader takes it for whole."""
        self._store.delete(self._key(version, MANIFEST))
        self._store.delete(version_name(version))


def _match(manifest: Manifest, targets: Mapping[str, torch.Tensor]) -> dict[str, list[torch.Tensor]]:
    """Where each stored tensor goes. Names that share memory are one place and need one source."""
    table = manifest.table
    places: dict[str, list[torch.Tensor]] = {name: [] for name in table.entries}
    sources: dict[tuple[object, ...], str] = {}
    unmatched = []
    problems = []
    for name, target in targets.items():
        owner = table.tied.get(name, name)
        if owner not in table.entries:
            unmatched.append(name)
            continue
        entry = table.entries[owner]
        if (entry.shape, entry.dtype) != (tuple(target.shape), dtype_name(target.dtype)):
            problems.append(
                f"{name} is {entry.dtype}{list(entry.shape)} there and "
                f"{dtype_name(target.dtype)}{list(target.shape)} in the model"
            )
        source = sources.setdefault(memory_of(target), owner)
        if source != owner:
            problems.append(f"{name} and {source} are one tensor in the model and two there")
        elif not any(place is target for place in places[owner]):
            places[owner].append(target)
    problems += [f"{name} is not in it" for name in unmatched if memory_of(targets[name]) not in sources]
    problems += [f"{name} is not in the model" for name, found in places.items() if not found]
    if problems:
        shown = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
        raise StoreError(f"policy version {manifest.version} does not fit the model: {shown}")
    return places
