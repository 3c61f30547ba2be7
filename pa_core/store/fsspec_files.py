"""Whole objects of any fsspec file system, and the errors that every kind of store shares."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
import threading
from collections.abc import Generator, Iterable, Iterator
from typing import Any, cast

Chunks = Iterable[bytes | memoryview]
CHUNK_BYTES = 1 << 20


class KeyExistsError(FileExistsError):
    """An exclusive publish found its key taken."""

    def __init__(self, url: str) -> None:
        super().__init__(errno.EEXIST, "exists already", url)


class ExplainedError(OSError):
    """A failure whose cause is known well enough to say what to do.

    Attributes:
        cause: what went wrong.
        fix: what to do about it.
    """

    def __init__(self, cause: str, fix: str) -> None:
        super().__init__(f"{cause}. {fix}")
        self.cause = cause
        self.fix = fix


class FsspecFiles:
    """Objects by their paths in one fsspec file system. Safe to use from several threads.

    Methods raise ``OSError``, a missing object is ``FileNotFoundError``, a taken key :class:`KeyExistsError`.
    """

    def __init__(self, filesystem: Any) -> None:
        self._fs = filesystem

    def url(self, path: str) -> str:
        """The URL of a path."""
        return cast(str, self._fs.unstrip_protocol(path))

    def put(self, path: str, chunks: Chunks, *, exclusive: bool, durable: bool) -> None:
        """Make an object visible, whole and in one step; ``durable`` concerns local file systems."""
        with tempfile.NamedTemporaryFile(prefix="pa-upload-") as spool:
            for chunk in chunks:
                spool.write(chunk)
            spool.flush()
            with self._taken_key(path, exclusive):
                self._fs.put_file(spool.name, path, mode=_mode(exclusive))

    def read(self, path: str) -> bytes:
        """An object's content."""
        return cast(bytes, self._fs.cat_file(path))

    def pieces(self, path: str) -> Generator[bytes, None, None]:
        """An object's content in order, piece by piece."""
        with self._fs.open(path, "rb") as file:
            while piece := file.read(CHUNK_BYTES):
                yield piece

    def exists(self, path: str) -> bool:
        """Whether there is an object (not just a prefix) at this path."""
        try:
            return bool(self._fs.info(path)["type"] == "file")
        except (FileNotFoundError, NotADirectoryError):
            return False

    def delete(self, path: str) -> None:
        """Remove an object, or every object below a prefix. Nothing there is no error."""
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm(path, recursive=True)

    def find(self, path: str, *, unfinished: bool) -> list[str]:
        """Paths of the object at ``path`` and of all below it; ``unfinished``: also of those still being written."""
        try:
            return cast(list[str], self._fs.find(path))
        except FileNotFoundError:
            return []

    @contextlib.contextmanager
    def _taken_key(self, path: str, exclusive: bool) -> Iterator[None]:
        """Tell a taken key from a parent that is a file: file systems call both FileExistsError."""
        try:
            yield
        except FileExistsError:
            if exclusive and self.exists(path):
                raise KeyExistsError(self.url(path)) from None
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)) from None


class MemoryFiles(FsspecFiles):
    """Objects of fsspec's memory file system: one assignment under the lock of its store."""

    def __init__(self, filesystem: Any, lock: threading.Lock) -> None:
        super().__init__(filesystem)
        self._lock = lock

    def put(self, path: str, chunks: Chunks, *, exclusive: bool, durable: bool) -> None:
        """Make an object visible, whole and in one step."""
        content = b"".join(chunks)
        with self._lock, self._taken_key(path, exclusive):
            self._fs.pipe_file(path, content, mode=_mode(exclusive))


def _mode(exclusive: bool) -> str:
    return "create" if exclusive else "overwrite"
