"""Stopping on SIGINT and SIGTERM without tearing a step in two."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from pa_core.errors import Stopped


class StopSignals:
    """Turns the first SIGINT or SIGTERM into :class:`Stopped`, raised once, in the main thread.

    Inside :meth:`uninterrupted` the exception waits until the outermost block ends, so that weights, optimizer state
    and published version always belong together. A second signal acts at once. A long loop calls :meth:`check`: Python
    prints and drops an exception that comes while a destructor or a weak reference's callback happens to run.

    Attributes:
        pending: a stop waits for an uninterrupted block to end.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._received: str | None = None
        self.pending = False

    def __enter__(self) -> StopSignals:
        self._previous = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        repeated = self._received is not None
        self._received = signal.Signals(number).name
        self.pending = True
        if not self._depth or repeated:
            self._stop()

    def check(self) -> None:
        """Raise the stop once more whose exception got lost."""
        if self._received is not None:
            self._stop()

    def _stop(self) -> None:
        self.pending = False
        raise Stopped(f"stopped by {self._received}")

    @contextmanager
    def uninterrupted(self) -> Iterator[None]:
        """Hold a stop back until the block is through."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
        if self.pending and not self._depth:
            self._stop()
