"""Write-once objects below one URL: the only way the other rooms touch a file system.

Every object appears atomically under its final key. Nothing is renamed, appended to or found by listing, so a local
folder, an object store and memory behave alike:

============ ============================================================ =========================================
protocol     how an object is published                                   exclusive means
============ ============================================================ =========================================
``file``     temporary file in the same folder, fsync, link or replace    ``os.link`` fails where the key exists
``memory``   one assignment under a lock                                  check and assignment under that lock
any other    one PUT (``pipe_file`` or ``put_file``)                      ``mode="create"`` (If-None-Match: *)
============ ============================================================ =========================================

Other processes get the URL, never this object: file-system objects do not survive a fork, and ``memory://`` is
visible within one process only.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import shutil
import tempfile
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast
from urllib.parse import urlsplit

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_random_exponential

from pa_core.errors import StoreError
from pa_core.store import local_files

_CHUNK_BYTES = 1 << 20
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


class KeyExistsError(FileExistsError):
    """An exclusive publish found its key taken."""


class ObjectStore:
    """Objects below ``url``, addressed by keys such as ``weights/v000012/manifest.json``.

    Safe to use from several threads. Every method raises :class:`StoreError` (store, key, cause and fix) when the
    store fails, and :class:`ValueError` for a key that is malformed or would leave the root.

    Attributes:
        url: absolute URL; opening it in another process gives the same objects (not for ``memory://``).
    """

    def __init__(self, filesystem: Any, root: str) -> None:
        self._fs = filesystem
        self._root = root.rstrip("/")
        self.url: str = filesystem.unstrip_protocol(self._root or "/")
        self._local = isinstance(filesystem, LocalFileSystem)
        self._memory = type(filesystem) is MemoryFileSystem
        self._failures = _failures_of(filesystem)

    @classmethod
    def open(cls, url: str) -> ObjectStore:
        """Open a folder, ``file://``, ``memory://``, ``s3://`` or other fsspec URL; nothing is created yet.

        Credentials come from the environment or the protocol's own configuration, never from the URL.
        """
        if "://" not in url:
            url = str(Path(url).expanduser().resolve())
        elif urlsplit(url).username is not None:
            raise StoreError("store.url contains credentials; leave them out and set them in the environment")
        try:
            filesystem, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
        except ValueError as error:
            raise StoreError(f"store.url={url!r}: {error}; use a folder, file:// or s3://") from None
        except ImportError as error:
            raise StoreError(f"store.url={url!r}: {error}") from None
        return cls(filesystem, root)

    def child(self, prefix: str) -> ObjectStore:
        """The store of all objects below ``prefix``."""
        return ObjectStore(self._fs, self._path(prefix))

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
        path = self._path(key)
        with self._explained("write", key):
            if self._local:
                write = local_files.write_atomically
                with self._taken_key(key, path, exclusive):
                    write(Path(path), _chunks(data), exclusive=exclusive, durable=durable)
            elif self._memory:
                content = data if isinstance(data, bytes) else data.read_bytes()
                with _MEMORY_LOCK, self._taken_key(key, path, exclusive):
                    self._fs.pipe_file(path, content, mode=_mode(exclusive))
            else:
                self._put(key, path, data, exclusive)

    def publish_stream(
        self, key: str, chunks: Iterable[bytes | memoryview], *, exclusive: bool = True, durable: bool = True
    ) -> None:
        """:meth:`publish` for content that is produced piece by piece and never held in memory as a whole.

        Remote stores take it by way of a temporary file.
        """
        path = self._path(key)
        if self._local:
            with self._explained("write", key), self._taken_key(key, path, exclusive):
                local_files.write_atomically(Path(path), chunks, exclusive=exclusive, durable=durable)
        elif self._memory:
            self.publish(key, b"".join(chunks), exclusive=exclusive)
        else:
            with tempfile.NamedTemporaryFile(prefix="pa-upload-") as spool:
                with self._explained(f"write (by way of {tempfile.gettempdir()})", key):
                    for chunk in chunks:
                        spool.write(chunk)
                    spool.flush()
                self.publish(key, Path(spool.name), exclusive=exclusive)

    def _put(self, key: str, path: str, data: bytes | Path, exclusive: bool) -> None:
        """One PUT. Servers report a lost race in different ways, and ask to repeat it when two writers overlap."""
        put = self._fs.pipe_file if isinstance(data, bytes) else self._fs.put_file
        arguments = (path, data) if isinstance(data, bytes) else (str(data), path)
        try:
            for attempt in Retrying(
                retry=retry_if_exception(_is_conflict),
                stop=stop_after_attempt(5),
                wait=wait_random_exponential(multiplier=0.1, max=2),
                reraise=True,
            ):
                with attempt:
                    put(*arguments, mode=_mode(exclusive))
        except OSError as error:
            if not exclusive or not _is_lost_race(error):
                raise
            content = data if isinstance(data, bytes) else data.read_bytes()
            if self._fs.cat_file(path) != content:
                raise KeyExistsError(errno.EEXIST, "exists already", f"{self.url}/{key}") from None

    def read(self, key: str) -> bytes:
        """An object's content. A missing object is a :class:`StoreError`."""
        with self._explained("read", key):
            return cast(bytes, self._fs.cat_file(self._path(key)))

    def find(self, key: str) -> bytes | None:
        """An object's content, or None where there is no such object."""
        with self._explained("read", key):
            try:
                return cast(bytes, self._fs.cat_file(self._path(key)))
            except FileNotFoundError:
                return None

    def exists(self, key: str) -> bool:
        """Whether there is an object (not just a prefix) of this key."""
        with self._explained("look up", key):
            try:
                return bool(self._fs.info(self._path(key))["type"] == "file")
            except (FileNotFoundError, NotADirectoryError):
                return False

    @contextlib.contextmanager
    def local_copy(self, key: str) -> Iterator[Path]:
        """A local file with the object's content: the object itself on a local store, else a temporary download."""
        path = self._path(key)
        if self._local:
            yield Path(path)
            return
        with tempfile.TemporaryDirectory(prefix="pa-download-") as folder:
            file = Path(folder) / key.rsplit("/", 1)[-1]
            with self._explained("read", key):
                self._fs.get_file(path, str(file))
            yield file

    def sync(self, key: str) -> None:
        """Flush an object that was published with ``durable=False`` to the disk (local file systems)."""
        if self._local:
            with self._explained("flush", key):
                path = Path(self._path(key))
                local_files.sync(path)
                for folder in path.relative_to(self._root).parents:
                    local_files.sync(Path(self._root) / folder)

    def delete(self, key: str) -> None:
        """Remove an object, or every object below a prefix (``""``: all). Nothing there is no error."""
        path = self._path(key) if key else self._root
        with self._explained("delete", key), contextlib.suppress(FileNotFoundError):
            if not self._local:
                self._fs.rm(path, recursive=True)
            elif Path(path).is_dir():
                shutil.rmtree(path)
            else:
                Path(path).unlink()

    def list(self, prefix: str = "", *, unfinished: bool = False) -> list[str]:
        """Keys below a prefix, sorted. For retention and tools; a reader must know its key instead.

        ``unfinished`` also gives the temporary files of local writers, whether at work or dead.
        """
        path = self._path(prefix) if prefix else self._root
        with self._explained("list", prefix):
            try:
                found = self._fs.find(path)
            except FileNotFoundError:
                return []
        keys = [name.removeprefix(self._root).lstrip("/") for name in found]
        return sorted(key for key in keys if unfinished or not local_files.is_temporary(key))

    def _path(self, key: str) -> str:
        parts = key.split("/")
        if any(part in ("", ".", "..") for part in parts) or "\\" in key or "\0" in key:
            raise ValueError(f"store key {key!r}: expected names joined by '/', without '.', '..' or empty parts")
        return f"{self._root}/{key}"

    @contextlib.contextmanager
    def _taken_key(self, key: str, path: str, exclusive: bool) -> Iterator[None]:
        """Tell a taken key from a parent that is a file: file systems call both FileExistsError."""
        try:
            yield
        except FileExistsError:
            if exclusive and self._fs.exists(path):
                raise KeyExistsError(errno.EEXIST, "exists already", f"{self.url}/{key}") from None
            raise NotADirectoryError(errno.ENOTDIR, "Not a directory") from None

    @contextlib.contextmanager
    def _explained(self, action: str, key: str) -> Iterator[None]:
        """Turn a failure of the file system into a :class:`StoreError` that says what to do."""
        try:
            yield
        except KeyExistsError:
            raise
        except self._failures as error:
            number = getattr(error, "errno", None)
            cause = getattr(error, "strerror", None) or str(error) or type(error).__name__
            name = f" ({errno.errorcode[number]})" if number else ""
            if isinstance(error, PermissionError):
                number = number or errno.EACCES
            fix = _FIXES.get(number or 0, "Check store.url and that the store is reachable.")
            if action == "read" and isinstance(error, FileNotFoundError):
                cause, name, fix = "there is no such object", "", "Check store.url, or produce it again."
            raise StoreError(f"store {self.url}: cannot {action} {key!r}: {cause}{name}. {fix}") from error


def _chunks(data: bytes | Path) -> Iterator[bytes | memoryview]:
    if isinstance(data, bytes):
        yield data
        return
    with data.open("rb") as file:
        yield from _read_chunks(file)


def _read_chunks(file: BinaryIO) -> Iterator[bytes]:
    while chunk := file.read(_CHUNK_BYTES):
        yield chunk


def _mode(exclusive: bool) -> str:
    return "create" if exclusive else "overwrite"


def _failures_of(filesystem: Any) -> tuple[type[Exception], ...]:
    """What the file system raises when it fails; the S3 client has errors that are no OSError (no credentials)."""
    if "s3" in filesystem.protocol:
        return (OSError, importlib.import_module("botocore.exceptions").BotoCoreError)
    return (OSError,)


def _response_code(error: BaseException) -> str | None:
    """The S3 error code behind a translated error."""
    response = getattr(error.__cause__, "response", None) or getattr(error, "response", None)
    return str(response["Error"].get("Code")) if isinstance(response, dict) and "Error" in response else None


def _is_lost_race(error: BaseException) -> bool:
    """Whether an exclusive PUT found the key taken; servers differ in how fsspec gets to report it."""
    return isinstance(error, FileExistsError) or _response_code(error) in ("PreconditionFailed", "412")


def _is_conflict(error: BaseException) -> bool:
    """Whether the server asks to repeat a conditional PUT that overlapped with another one."""
    return _response_code(error) in ("ConditionalRequestConflict", "409")
