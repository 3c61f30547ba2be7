"""Checkpoints: what is needed to go on exactly where a run stopped.

``checkpoints/v000012/`` holds the optimizer's tensors and the random generator's (:mod:`pa_core.store.dcp`: a layout of
processes may load what another one has stored), ``state.json`` (schedule, data cursor, record, …) and, written last and
exclusively, ``manifest.json``. The policy's weights are those of ``weights/v000012``, referred to by digest and not
copied. Everything is flushed to the disk.

``checkpoints/latest.json`` names versions to look at, newest first. It is written *before* a checkpoint, and a version
counts only if its manifest exists, so a crash at any moment leaves the last complete one in force.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pa_core.errors import StoreError
from pa_core.store.objects import ObjectStore
from pa_core.store.shards import StoredFile, verified_files
from pa_core.store.versions import version_name
from pa_core.store.weights import MANIFEST, WeightStore

LATEST = "latest.json"
STATE = "state.json"


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint, its state verified.

    Attributes:
        version: policy version, whose weights are ``WeightStore``'s.
        state: what :meth:`CheckpointStore.save` was given.
        url, folder: where the tensors are.
        files: their files, to be verified by who reads them.
    """

    version: int
    state: dict[str, Any]
    url: str
    folder: str
    files: list[StoredFile]


class CheckpointStore:
    """Checkpoints below a run's store; only the trainer's first process calls this."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store.child("checkpoints")
        self._weights = WeightStore(store)

    def save(
        self, version: int, write_tensors: Callable[[str, str], list[StoredFile]], state: Mapping[str, Any]
    ) -> None:
        """Write a checkpoint of a version whose weights are published.

        One that exists with the same weights is kept; one with other weights is replaced.

        Args:
            write_tensors: stores the tensors at a URL below a key prefix and returns the files that it has written.

        Raises:
            StoreError: the weights are not published, or the store cannot be written; nothing of it remains then.
            TypeError: ``state`` holds something JSON cannot express.
        """
        data = json.dumps(state).encode()
        weights = self._weights.require(version)
        existing = self._manifest(version)
        if existing is not None and existing["weights_sha256"] == weights.weights_sha256:
            return
        self._weights.sync(version)
        others = set(self.versions()) - {version}
        for unfinished in set(self._candidates()) - others:
            self._remove(unfinished)
        self._store.publish(LATEST, json.dumps(sorted(others | {version}, reverse=True)).encode(), exclusive=False)
        folder = version_name(version)
        try:
            files = write_tensors(self._store.url, folder)
            self._store.publish(f"{folder}/{STATE}", data)
            files.append(StoredFile(STATE, len(data), hashlib.sha256(data).hexdigest()))
            manifest = {
                "version": version,
                "weights_sha256": weights.weights_sha256,
                "files": [asdict(file) for file in files],
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

    def load(self, version: int) -> Checkpoint:
        """The checkpoint of a version.

        Raises:
            StoreError: there is none, its state fails size or sha256, or its weights are gone or others.
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
        files = [StoredFile(**file) for file in manifest["files"]]
        with verified_files(self._store, folder, [file for file in files if file.name == STATE]) as (path,):
            state = json.loads(path.read_bytes())
        tensors = [file for file in files if file.name != STATE]
        return Checkpoint(version, state, self._store.url, folder, tensors)

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
