"""Which waiting group goes to which replica: first come first served, to the least loaded one that may have it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pa_core.errors import EngineError
from pa_core.rollout.hedge import Flight
from pa_core.rollout.replica import Replica


@dataclass
class _Waiter:
    """A group that wants a replica, but none that already failed it."""

    flight: Flight
    future: asyncio.Future[Replica]


class Dispatcher:
    """The queue of groups before the replicas. Belongs to one event loop.

    Args:
        replicas: those that serve.
        limit: groups in flight per replica.
        verdict: why a waiting group can never be served, or None while it can.
    """

    def __init__(
        self, replicas: Callable[[], Iterable[Replica]], limit: int, verdict: Callable[[Flight], EngineError | None]
    ) -> None:
        self._replicas = replicas
        self._limit = limit
        self._verdict = verdict
        self._waiters: deque[_Waiter] = deque()
        self.progress_at = 0.0

    def __len__(self) -> int:
        return len(self._waiters)

    def progress(self) -> None:
        """Note that something was loaded or answered, which is what waiting groups wait for; then dispatch."""
        self.progress_at = asyncio.get_running_loop().time()
        self.dispatch()

    async def acquire(self, flight: Flight) -> Replica:
        """The least loaded eligible replica with room, in turn; the group is already counted there.

        Raises:
            EngineError: the group can never be served.
        """
        loop = asyncio.get_running_loop()
        waiter = _Waiter(flight, loop.create_future())
        if not self._waiters:
            self.progress_at = loop.time()
        self._waiters.append(waiter)
        self.dispatch()
        try:
            return await waiter.future
        except asyncio.CancelledError:
            if waiter.future.done() and not waiter.future.cancelled() and waiter.future.exception() is None:
                waiter.future.result().release(flight.request.group_id)
            elif waiter in self._waiters:
                self._waiters.remove(waiter)
            self.dispatch()
            raise

    def best(self, flight: Flight) -> Replica | None:
        """The least loaded replica with room that may have the group and does not have it yet."""
        return min(
            (replica for replica in self._replicas() if flight.accepts(replica) and replica.in_flight < self._limit),
            key=lambda replica: replica.in_flight,
            default=None,
        )

    def dispatch(self) -> None:
        """Give waiting groups to replicas with room, in order; fail those that no replica will ever serve."""
        for waiter in list(self._waiters):
            if waiter.future.done():
                self._waiters.remove(waiter)
            elif (replica := self.best(waiter.flight)) is not None:
                replica.take(waiter.flight.request.group_id)
                self._waiters.remove(waiter)
                waiter.future.set_result(replica)
        self.fail(self._verdict)

    def fail(self, verdict: Callable[[Flight], EngineError | None]) -> None:
        """Fail the waiting groups for which ``verdict`` gives an error."""
        for waiter in list(self._waiters):
            error = verdict(waiter.flight)
            if error is not None:
                self._waiters.remove(waiter)
                if not waiter.future.done():
                    waiter.future.set_exception(error)
