"""Published policy versions: atomic, hashed, loadable in place.

``weights/v000012/`` holds safetensors files and, written last and exclusively, ``manifest.json``. A version exists if
and only if its manifest does, and whoever loads it checks size and sha256 of every file before using one byte.

Weights are published without fsync. A crash of the process cannot tear a version, because the kernel has the bytes
before the manifest gets its name; only a power failure could leave a manifest over lost bytes, and the digests tell.
A version that a checkpoint refers to is flushed by :meth:`WeightStore.sync`; the others are mostly replaced before
the disk would have seen them.

With LoRA, ``weights/base/v000000/`` holds the weights that are not trained, once per run, and a version holds its
adapter only; its manifest's field ``adapter`` says what it adds to, and its digest covers the base's.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from pa_core.errors import StoreError
from pa_core.store.objects import ObjectStore
from pa_core.store.policy import AdapterTable, PolicyReader
from pa_core.store.shards import (
    Shard,
    Storable,
    StoredFile,
    TensorEntry,
    TensorTable,
    plan_shards,
    read_shard,
    tensor_table,
    verified_files,
    write_shards,
)
from pa_core.store.versions import version_name, version_of

MANIFEST = "manifest.json"
LATEST = "latest.json"
BASE = "weights/base"
SHARD_BYTES = 512 << 20


@dataclass(frozen=True)
class Manifest:
    """What a version consists of.

    Attributes:
        version: the policy version.
        files: every file, with size and digest.
        table: every tensor, with file, dtype and shape; tied names.
        weights_sha256: one digest of all tensor files: equal weights in equal shards give equal digests. That of an
            adapter covers ``adapter`` too, hence its base: it stands for the whole policy.
        adapter: what the tensors add to; None for a version that is whole by itself.
    """

    version: int
    files: tuple[StoredFile, ...]
    table: TensorTable
    weights_sha256: str
    adapter: AdapterTable | None = None

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
        adapter = tree.get("adapter")
        if adapter is not None:
            pairs = {name: (a, b) for name, (a, b) in adapter["pairs"].items()}
            adapter = AdapterTable(adapter["base_sha256"], adapter["scaling"], pairs)
        table = TensorTable(entries, tree["table"]["tied"])
        return cls(tree["version"], files, table, tree["weights_sha256"], adapter)


def _weights_digest(digests: list[str], adapter: AdapterTable | None) -> str:
    text = "".join(digests) + ("" if adapter is None else json.dumps(asdict(adapter), sort_keys=True))
    return hashlib.sha256(text.encode()).hexdigest()


class WeightStore:
    """Policy versions below a run's store.

    Args:
        store: the run's store.
        shard_bytes: size of the files that tensors are split into.
        folder: key prefix of the versions.
    """

    def __init__(self, store: ObjectStore, shard_bytes: int = SHARD_BYTES, folder: str = "weights") -> None:
        self._run_store = store
        self._store = store.child(folder)
        self._shard_bytes = shard_bytes

    @property
    def base(self) -> WeightStore:
        """Where the weights are, as version 0, that the run's adapter versions add to. No retention touches it."""
        return WeightStore(self._run_store, self._shard_bytes, BASE)

    def publish(
        self,
        version: int,
        tensors: Mapping[str, Storable],
        extra: Mapping[str, bytes] | None = None,
        adapter: AdapterTable | None = None,
    ) -> Manifest:
        """Store ``tensors`` (and ``extra`` files, for example ``config.json``) as ``version``.

        With ``adapter`` they are an adapter's, and :attr:`base` must hold the weights that it names.

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
            return self._same(existing, _weights_digest([shard.digest() for shard in shards], adapter))
        # Names are unique per attempt: what a crashed or a competing publisher left never mixes with ours.
        attempt = uuid.uuid4().hex[:8]
        names = [
            f"model-{number:05d}-of-{len(shards):05d}-{attempt}.safetensors" for number in range(1, len(shards) + 1)
        ]
        try:
            files = self._write(version, names, shards, extra)
            digest = _weights_digest([file.sha256 for file in files[: len(shards)]], adapter)
            manifest = Manifest(version, tuple(files), tensor_table(names, shards, tied), digest, adapter)
            self._store.publish(self._key(version, MANIFEST), manifest.to_json(), durable=False)
        except BaseException as error:
            winner = self._clean_up(version, names, list(extra), error)
            if winner is None or not isinstance(error, FileExistsError):
                raise
            return self._same(winner, _weights_digest([shard.digest() for shard in shards], adapter))
        self._point_to(version)
        return manifest

    def _point_to(self, version: int) -> None:
        self._store.publish(LATEST, json.dumps({"version": version}).encode(), exclusive=False, durable=False)

    def _write(
        self, version: int, names: list[str], shards: list[Shard], extra: Mapping[str, bytes]
    ) -> list[StoredFile]:
        """Write everything but the manifest; tensor files come first, in the order of ``shards``."""
        files = write_shards(self._store, version_name(version), names, shards, durable=False)
        for name, content in extra.items():
            self._store.publish(self._key(version, name), content, exclusive=False, durable=False)
            files.append(StoredFile(name, len(content), hashlib.sha256(content).hexdigest()))
        return files

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
            digests = [file.sha256 for file in manifest.shards]
            # What an adapter adds to, and how, is in no file whose digest would tell.
            if manifest.adapter and manifest.weights_sha256 != _weights_digest(digests, manifest.adapter):
                raise StoreError(
                    f"store {self._store.url}: the manifest of version {version} does not have the digest that it "
                    f"says; remove {version_name(version)} and publish it again"
                )
            yield manifest, paths

    def shards(self, version: int) -> Iterator[dict[str, torch.Tensor]]:
        """The tensors file by file, each under its stored name, once every file of the version is verified."""
        with self.verified(version) as (_, paths):
            for path in paths:
                yield dict(read_shard(path))

    def load(self, version: int) -> dict[str, torch.Tensor]:
        """All tensors under all names they were published by (tied names give the same tensor), on the CPU.

        Of an adapter version these are the adapter's.
        """
        manifest = self.require(version)
        tensors = {name: tensor for shard in self.shards(version) for name, tensor in shard.items()}
        return tensors | {name: tensors[owner] for name, owner in manifest.table.tied.items()}

    def load_into(self, version: int, targets: Mapping[str, torch.Tensor] | torch.nn.Module) -> Manifest:
        """Copy a whole policy into existing tensors, or a model's parameters and buffers, one tensor at a time.

        Names, shapes, dtypes and digests are all checked before the first byte is copied, so a refused version
        leaves the model as it was. A tied tensor counts as present under any of its names. An adapter is merged.

        Raises:
            StoreError: the version is missing or damaged, or does not fit ``targets``.
        """
        tensors = targets.state_dict() if isinstance(targets, torch.nn.Module) else targets
        return PolicyReader(self).load_into(version, tensors)

    def sync(self, version: int) -> None:
        """Flush a version to the disk, with the base it adds to, so that it survives a power failure."""
        manifest = self.require(version)
        for name in (*(file.name for file in manifest.files), MANIFEST):
            self._store.sync(self._key(version, name))
        if manifest.adapter is not None:
            self.base.sync(0)

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
