"""Deliveries to a server that may be away: handed over at once, made in order by a thread of their own, kept if
they fail, and counted if they never arrive."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Delivery:
    """One call and what to call it in a warning; one that ``replaces`` makes earlier ones of its name needless."""

    what: str
    call: Callable[[], object]
    replaces: bool = False


class Outbox:
    """A queue of deliveries and the thread that makes them.

    A delivery that fails for a passing reason goes to the end of the queue and is tried again after a pause that
    grows from ``first_pause_s`` to ``longest_pause_s``; one that can never succeed is dropped with a warning. So one
    that fails again and again, for want of space say, holds up no other; the price is that an outage changes the order.

    Args:
        is_passing: tells from an exception whether trying again can help.
        on_recovery: called in the outbox's thread when a delivery succeeds after failures.
    """

    def __init__(
        self,
        is_passing: Callable[[Exception], bool],
        on_recovery: Callable[[], None] = lambda: None,
        *,
        first_pause_s: float = 1.0,
        longest_pause_s: float = 30.0,
    ) -> None:
        self._is_passing = is_passing
        self._on_recovery = on_recovery
        self._first_pause_s = first_pause_s
        self._longest_pause_s = longest_pause_s
        self._queue: deque[Delivery] = deque()
        self._changed = threading.Condition()
        self._trying: Delivery | None = None
        self._closing = False
        self._patient = False
        self._expired = False
        self._failures = 0
        self._undelivered: list[str] = []
        self._thread = threading.Thread(target=self._run, name="tracking-outbox", daemon=True)
        self._thread.start()

    def put(self, what: str, call: Callable[[], object], *, replaces: bool = False) -> None:
        """Hand over a delivery; returns at once. ``call`` may run more than once, so it must be repeatable.

        Args:
            replaces: it overwrites what earlier deliveries of the same name wrote, so those that still wait are
                dropped: an outage then neither piles them up nor puts an older one over a newer one.
        """
        with self._changed:
            if replaces:
                kept = [one for one in self._queue if one.what != what or one is self._trying]
                self._queue = deque(kept)
            self._queue.append(Delivery(what, call, replaces))
            self._changed.notify_all()

    def close(self, timeout_s: float, *, patient: bool = False) -> list[str]:
        """Deliver what is left, for at most ``timeout_s``; return what could not be.

        The thread is a daemon: a call that still hangs after the deadline does not keep the process alive.

        Args:
            patient: go on trying until the deadline, instead of once more for each.
        """
        with self._changed:
            self._closing, self._patient = True, patient
            if patient and self._failures:
                log.warning("tracking: waiting up to %.0f s for %d deliveries", timeout_s, len(self._queue))
            self._changed.notify_all()
        self._thread.join(timeout_s)
        with self._changed:
            self._expired = True
            left = [delivery.what for delivery in self._queue]
            return [*self._undelivered, *left]

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closing)
                if self._expired or not self._queue:
                    return
                self._trying = delivery = self._queue[0]
            error = self._attempt(delivery)
            with self._changed:
                if self._expired:
                    return
                self._queue.popleft()
                self._trying = None
                if error is not None:
                    self._keep_or_drop(delivery, error)
                    self._pause()

    def _attempt(self, delivery: Delivery) -> Exception | None:
        """One try. Any exception counts: a tracking failure must not end training."""
        try:
            delivery.call()
        except Exception as error:
            return error
        if self._failures:
            log.info("tracking: deliveries go through again")
            self._failures = 0
            self._on_recovery()
        return None

    def _keep_or_drop(self, delivery: Delivery, error: Exception) -> None:
        passing = self._is_passing(error)
        if passing and self._persistent:
            if not self._failures:
                log.warning("tracking: %s failed, will be tried again: %s", delivery.what, _first_line(error))
            self._failures += 1
            if not delivery.replaces or all(one.what != delivery.what for one in self._queue):
                self._queue.append(delivery)
            return
        if not passing:
            log.warning("tracking: %s was refused: %s", delivery.what, _first_line(error))
        self._undelivered.append(delivery.what)

    def _pause(self) -> None:
        """Wait before the next try, unless that is the last one."""
        if not self._failures or not self._persistent:
            return
        was_closing = self._closing
        longest = self._first_pause_s if was_closing else self._longest_pause_s
        pause = min(longest, self._first_pause_s * 2 ** min(self._failures - 1, 16))
        deadline = time.monotonic() + pause
        self._changed.wait_for(
            lambda: self._expired or self._closing != was_closing or time.monotonic() >= deadline, timeout=pause
        )

    @property
    def _persistent(self) -> bool:
        """Whether what fails is tried again."""
        return self._patient or not self._closing


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:300] if text else ''}"
