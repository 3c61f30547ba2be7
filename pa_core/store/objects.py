"""Write-once objects below one URL: the only way the other rooms touch a file system.

Every object appears atomically under its final key. Nothing is renamed, appended to or found by listing, so a local
folder, an object store and memory behave alike:

============ ============================================================ =========================================
protocol     how an object is published                                   exclusive means
============ ============================================================ =========================================
``file``     temporary file in the same folder, fsync, link or replace    ``os.link`` fails where the key exists
``memory``   one assignment under a lock                                  check and assignment under that lock
``s3``       one PUT, or one completed multipart upload                   ``If-None-Match: *``
any other    ``put_file``                                                 ``mode="create"``, as far as it is kept
============ ============================================================ =========================================

Other processes get the URL, never this object: file-system objects do not survive a fork, and ``memory://`` is
visible within one process only.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from pa_core.errors import StoreError
from pa_core.store import local_files
from pa_core.store.fsspec_files import CHUNK_BYTES, Chunks, ExplainedError, FsspecFiles, KeyExistsError, MemoryFiles
from pa_core.store.keys import check_key, check_url
from pa_core.store.local_files import LocalFiles

__all__ = ["KeyExistsError", "ObjectStore"]

_MEMORY_LOCK = threading.Lock()
_FIXES = {
    errno.ENOSPC: "Free space there, lower store.keep_versions, or point store.url to a larger disk.",
    errno.EDQUOT: "Raise the quota, lower store.keep_versions, or point store.url elsewhere.",
    errno.EFBIG: "Raise the file size limit (ulimit -f), or point store.url elsewhere.",
    errno.EACCES: "Grant write access, or point store.url to a place you may write to.",
    errno.EPERM: "Grant write access, or point store.url to a place that allows writing and hard links.",
    errno.EROFS: "The file system is read-only; point store.url elsewhere.",
    errno.ENOTDIR: "A parent of it is a file; point store.url to a folder.",
    errno.ENOENT: "It cannot be created there; point store.url to a folder that can exist.",
    errno.EOPNOTSUPP: "The file system has no hard links; point store.url to a local disk or an s3:// URL.",
}


class ObjectStore:
    """Objects below ``url``, addressed by keys such as ``weights/v000012/manifest.json``.

    Safe to use from several threads. Every method raises :class:`StoreError` (store, key, cause and fix) when the
    store fails, and :class:`ValueError` for a key that is malformed or would leave the root.

    Attributes:
        url: absolute URL; opening it in another process gives the same objects (not for ``memory://``).
    """

    def __init__(self, files: FsspecFiles, root: str) -> None:
        self._files = files
        self._root = root.rstrip("/")
        self.url: str = files.url(self._root or "/")

    @classmethod
    def open(cls, url: str) -> ObjectStore:
        """Open a folder, ``file://``, ``memory://``, ``s3://`` or other fsspec URL; nothing is created yet.

        Credentials come from the environment or the protocol's own configuration, never from the URL.
        """
        url = check_url(url)
        try:
            if url.startswith(("s3://", "s3a://")):
                # Imported here because the S3 client takes a second, which local stores need not wait for.
                from pa_core.store.s3_files import open_s3
                from pa_core.store.s3_patience import Patience

                return cls(*open_s3(url, Patience()))
            filesystem, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
        except ValueError as error:
            raise StoreError(f"store.url={url!r}: {error}; use a folder, file:// or s3://") from None
        except ImportError as error:
            raise StoreError(f"store.url={url!r}: {error}") from None
        if isinstance(filesystem, LocalFileSystem):
            return cls(LocalFiles(filesystem), root)
        if type(filesystem) is MemoryFileSystem:
            return cls(MemoryFiles(filesystem, _MEMORY_LOCK), root)
        return cls(FsspecFiles(filesystem), root)

    def child(self, prefix: str) -> ObjectStore:
        """The store of all objects below ``prefix``."""
        return ObjectStore(self._files, self._path(prefix))

    def publish(self, key: str, data: bytes | Path, *, exclusive: bool = True, durable: bool = True) -> None:
        """Make an object visible, whole and in one step.

        Args:
            data: the content, or a local file that has it.
            exclusive: fail where the key exists; otherwise replace. On object stores, finding exactly this content
                counts as having written it, because a lost reply makes the client repeat the request.
            durable: survive a power failure, not just a crash of the process (local file systems).

        Raises:
            FileExistsError: ``exclusive``, and the key exists.
        """
        self.publish_stream(key, _chunks(data), exclusive=exclusive, durable=durable)

    def publish_stream(self, key: str, chunks: Chunks, *, exclusive: bool = True, durable: bool = True) -> None:
        """:meth:`publish` for content that is produced piece by piece and never held as a whole."""
        path = self._path(key)
        with self._explained("write", key):
            self._files.put(path, chunks, exclusive=exclusive, durable=durable)

    def read(self, key: str) -> bytes:
        """An object's content. A missing object is a :class:`StoreError`."""
        path = self._path(key)
        with self._explained("read", key):
            return self._files.read(path)

    def find(self, key: str) -> bytes | None:
        """An object's content, or None where there is no such object."""
        path = self._path(key)
        with self._explained("read", key):
            try:
                return self._files.read(path)
            except FileNotFoundError:
                return None

    def exists(self, key: str) -> bool:
        """Whether there is an object (not just a prefix) of this key."""
        path = self._path(key)
        with self._explained("look up", key):
            return self._files.exists(path)

    def local_path(self, key: str) -> Path | None:
        """The file that is the object, on a local store."""
        path = self._path(key)
        return Path(path) if isinstance(self._files, LocalFiles) else None

    def download(self, key: str, target: Path) -> tuple[int, str]:
        """Copy an object into a local file, a few megabytes at a time.

        Returns:
            size in bytes and sha256 in hex of what was written, taken on the way.
        """
        path = self._path(key)
        digest = hashlib.sha256()
        size = 0
        with self._explained("read", key):
            pieces = self._files.pieces(path)
            with contextlib.closing(pieces), _written_to(target) as file:
                for piece in pieces:
                    digest.update(piece)
                    size += file.write(piece)
        return size, digest.hexdigest()

    def sync(self, key: str) -> None:
        """Flush an object that was published with ``durable=False`` to the disk (local file systems)."""
        path = self.local_path(key)
        if path is not None:
            with self._explained("flush", key):
                local_files.sync(path)
                for folder in path.relative_to(self._root).parents:
                    local_files.sync(Path(self._root) / folder)

    def delete(self, key: str) -> None:
        """Remove an object, or every object below a prefix (``""``: all). Nothing there is no error.

        What is still being written there, by a writer at work or dead, goes too.
        """
        path = self._path(key) if key else self._root
        with self._explained("delete", key):
            self._files.delete(path)

    def list(self, prefix: str = "", *, unfinished: bool = False) -> list[str]:
        """Keys below a prefix, sorted. For retention and tools; a reader must know its key instead.

        ``unfinished`` also gives what is not visible yet, its writers being at work or dead: temporary files, and
        multipart uploads under the keys that they are meant for.
        """
        path = self._path(prefix) if prefix else self._root
        with self._explained("list", prefix):
            found = self._files.find(path, unfinished=unfinished)
        return sorted(name.removeprefix(self._root).lstrip("/") for name in found)

    def _path(self, key: str) -> str:
        check_key(key)
        return f"{self._root}/{key}"

    @contextlib.contextmanager
    def _explained(self, action: str, key: str) -> Iterator[None]:
        """Turn a failure of the file system into a :class:`StoreError` that says what to do."""
        try:
            yield
        except KeyExistsError:
            raise
        except OSError as error:
            raise StoreError(f"store {self.url}: cannot {action} {key!r}: {_cause_and_fix(action, error)}") from error


def _cause_and_fix(action: str, error: OSError) -> str:
    if isinstance(error, ExplainedError):
        return f"{error.cause}. {error.fix}"
    if action == "read" and isinstance(error, FileNotFoundError):
        return "there is no such object. Check store.url, or produce it again."
    number = error.errno or 0
    cause = error.strerror or str(error) or type(error).__name__
    name = f" ({errno.errorcode[number]})" if number in errno.errorcode else ""
    if isinstance(error, PermissionError):
        number = number or errno.EACCES
    return f"{cause}{name}. {_FIXES.get(number, 'Check store.url and that the store is reachable.')}"


@contextlib.contextmanager
def _written_to(target: Path) -> Iterator[BinaryIO]:
    """A new local file. That its disk is full is no fault of the store."""
    try:
        with target.open("wb") as file:
            yield file
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise ExplainedError(
            f"{os.strerror(error.errno)} ({errno.errorcode[error.errno]}) in {target.parent}",
            "Free space there, or set TMPDIR to a folder on a larger disk.",
        ) from error


def _chunks(data: bytes | Path) -> Iterator[bytes]:
    if isinstance(data, bytes):
        yield data
        return
    with data.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk
