"""Atomic files on a local file system: a reader sees nothing or the whole file, whenever the writer dies."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterable
from pathlib import Path

from pa_core.store.fsspec_files import Chunks, FsspecFiles

TEMPORARY_SUFFIX = ".pa-tmp"


class LocalFiles(FsspecFiles):
    """Objects that are plain files of a local file system."""

    def put(self, path: str, chunks: Chunks, *, exclusive: bool, durable: bool) -> None:
        """Make an object visible by :func:`write_atomically`."""
        with self._taken_key(path, exclusive):
            write_atomically(Path(path), chunks, exclusive=exclusive, durable=durable)

    def delete(self, path: str) -> None:
        """Remove a file, or a folder with everything in it. Nothing there is no error."""
        with contextlib.suppress(FileNotFoundError):
            if Path(path).is_dir():
                shutil.rmtree(path)
            else:
                Path(path).unlink()

    def find(self, path: str, *, unfinished: bool) -> list[str]:
        """Paths of all files at and below ``path``; ``unfinished``: also of temporary ones, at work or dead."""
        return [name for name in super().find(path, unfinished=unfinished) if unfinished or not is_temporary(name)]


def is_temporary(name: str) -> bool:
    """Whether a file name is one that :func:`write_atomically` uses before a file is complete."""
    return name.endswith(TEMPORARY_SUFFIX)


def write_atomically(path: Path, chunks: Iterable[bytes | memoryview], *, exclusive: bool, durable: bool) -> None:
    """Write ``chunks`` to a temporary file in the same folder, then give it its name in one step.

    Args:
        exclusive: use ``os.link``, which fails where the name is taken; otherwise ``os.replace``.
        durable: flush file and folder to the disk first. Without it the file survives a crash of the process, but
            after a power failure its name may be there and its content not.

    Raises:
        FileExistsError: ``exclusive``, and the name is taken.
        OSError: anything else; the temporary file is gone.
    """
    make_folders(path.parent, durable=durable)
    temporary = path.parent / f".{path.name[:120]}.{uuid.uuid4().hex}{TEMPORARY_SUFFIX}"
    try:
        with temporary.open("xb") as file:
            for chunk in chunks:
                file.write(chunk)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        if exclusive:
            os.link(temporary, path)
        else:
            os.replace(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
    if durable:
        sync(path.parent)


def make_folders(folder: Path, *, durable: bool) -> None:
    """Create ``folder`` and its parents; ``durable`` also flushes the new entries to the disk."""
    missing = []
    while not folder.exists():
        missing.append(folder)
        folder = folder.parent
    for new in reversed(missing):
        new.mkdir(exist_ok=True)
        if durable:
            sync(new.parent)


def sync(path: Path) -> None:
    """Flush a file's content, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
