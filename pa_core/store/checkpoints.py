"""Checkpoints: what is needed to go on exactly where a run stopped.

``checkpoints/v000012/`` holds the optimizer's tensors (safetensors), ``state.json`` (schedule, random generators, data
cursor, ledger, …) and, written last and exclusively, ``manifest.json``. The policy's weights are those of
``weights/v000012``, referred to by digest and not copied. Everything is flushed to the disk.

``checkpoints/latest.json`` names versions to look at, newest first. It is written *before* a checkpoint, and a version
counts only if its manifest exists, so a crash at any moment leaves the last complete one in force.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from pa_core.errors import StoreError
from pa_core.store.objects import ObjectStore
from pa_core.store.shards import StoredFile, plan_shards, read_shard, verified_files, write_shards
from pa_core.store.weights import MANIFEST, SHARD_BYTES, WeightStore, version_name

LATEST = "latest.json"
STATE = "state.json"


class CheckpointStore:
    """Checkpoints below a run's store; only the trainer's first process writes them."""

    def __init__(self, store: ObjectStore, shard_bytes: int = SHARD_BYTES) -> None:
        self._store = store.child("checkpoints")
        self._weights = WeightStore(store, shard_bytes)
        self._shard_bytes = shard_bytes

    def save(self, version: int, optimizer_tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> None:
        """Write a checkpoint of a version whose weights are published.

        One that exists with the same weights is kept; one with other weights is replaced.

        Raises:
            StoreError: the weights are not published, or the store cannot be written; nothing of it remains then.
            TypeError: ``state`` holds something JSON cannot express.
        """
        data = json.dumps(state).encode()
        shards, tied = plan_shards(optimizer_tensors, self._shard_bytes)
        weights = self._weights.require(version)
        existing = self._manifest(version)
        if existing is not None and existing["weights_sha256"] == weights.weights_sha256:
            return
        self._weights.sync(version)
        others = set(self.versions()) - {version}
        for unfinished in set(self._candidates()) - others:
            self._remove(unfinished)
        self._store.publish(LATEST, json.dumps(sorted(others | {version}, reverse=True)).encode(), exclusive=False)
        names = [f"optimizer-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
        folder = version_name(version)
        try:
            files = write_shards(self._store, folder, names, shards, durable=True)
            self._store.publish(f"{folder}/{STATE}", data)
            files.append(StoredFile(STATE, len(data), hashlib.sha256(data).hexdigest()))
            manifest = {
                "version": version,
                "weights_sha256": weights.weights_sha256,
                "files": [asdict(file) for file in files],
                "tied": tied,
            }
            self._store.publish(f"{folder}/{MANIFEST}", json.dumps(manifest, indent=1).encode())
        except BaseException as error:
            try:
                self._remove(version)
            except StoreError as failure:
                error.add_note(f"and removing what was written failed: {failure}")
            raise

    def versions(self) -> list[int]:
        """Versions with a complete checkpoint, newest first."""
        return [version for version in self._candidates() if self._store.exists(f"{version_name(version)}/{MANIFEST}")]

    def _manifest(self, version: int) -> dict[str, Any] | None:
        data = self._store.find(f"{version_name(version)}/{MANIFEST}")
        manifest: dict[str, Any] | None = None if data is None else json.loads(data)
        return manifest

    def _candidates(self) -> list[int]:
        data = self._store.find(LATEST)
        return [] if data is None else [int(version) for version in json.loads(data)]

    def latest(self) -> int | None:
        """The newest version with a complete checkpoint, or None."""
        return next(iter(self.versions()), None)

    def load(self, version: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """The optimizer's tensors (on the CPU) and the state of a checkpoint; its weights are ``WeightStore``'s.

        Raises:
            StoreError: there is none, a file fails its size or sha256, or its weights are gone or others.
        """
        folder = version_name(version)
        manifest = self._manifest(version)
        if manifest is None:
            raise StoreError(f"store {self._store.url}: there is no checkpoint of version {version}")
        weights = self._weights.require(version)
        if weights.weights_sha256 != manifest["weights_sha256"]:
            raise StoreError(
                f"store {self._store.url}: the weights of version {version} are not those of its checkpoint "
                f"({weights.weights_sha256[:12]}, not {manifest['weights_sha256'][:12]})"
            )
        tensors: dict[str, torch.Tensor] = {}
        state: dict[str, Any] = {}
        files = [StoredFile(**file) for file in manifest["files"]]
        with verified_files(self._store, folder, files) as paths:
            for path, file in zip(paths, files, strict=True):
                if file.name == STATE:
                    state = json.loads(path.read_bytes())
                else:
                    tensors |= dict(read_shard(path))
        tensors |= {name: tensors[owner].clone() for name, owner in manifest["tied"].items()}
        return tensors, state

    def retain(self, keep: int) -> list[int]:
        """Remove all but the newest ``keep`` checkpoints, manifest first; the kept versions, newest first."""
        versions = self.versions()
        for version in versions[keep:]:
            self._remove(version)
        if versions[keep:]:
            self._store.publish(LATEST, json.dumps(versions[:keep]).encode(), exclusive=False)
        return versions[:keep]

    def _remove(self, version: int) -> None:
        self._store.delete(f"{version_name(version)}/{MANIFEST}")
        self._store.delete(version_name(version))
