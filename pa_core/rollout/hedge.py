"""Hedging (Dean and Barroso, The Tail at Scale): a straggler is sent to a second replica; the first answer counts."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Coroutine
from typing import Any

from pa_core.errors import EngineError
from pa_core.rollout.protocol import GenerateRequest, GenerateResponse
from pa_core.rollout.replica import Replica

MIN_FINISHED = 2
MIN_SECONDS = 1.0
"""A group younger than this is never hedged: sending it again would cost more than waiting."""

Kind = tuple[int, int, float, int]


class Flight:
    """One group on its way to exactly one answer, by one attempt or several at once.

    Attributes:
        failures: replicas that could not serve the group, and why. A replica started again is another one.
        broken: attempts that ended with a lost connection or a dead replica.
        lost: the last of those errors.
        hedge: the replica that was asked besides, if one was.
    """

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self.failures: dict[Replica, EngineError] = {}
        self.broken = 0
        self.lost: EngineError | None = None
        self.hedge: Replica | None = None
        self._attempts: dict[asyncio.Task[GenerateResponse | None], Replica] = {}
        self._started: dict[Replica, float] = {}
        self._ended: asyncio.Queue[asyncio.Task[GenerateResponse | None]] = asyncio.Queue()

    @property
    def attempts(self) -> int:
        """Attempts under way."""
        return len(self._attempts)

    @property
    def kind(self) -> Kind:
        """What groups have in common whose durations compare."""
        request = self.request
        return request.version, request.samples, request.temperature, request.max_tokens

    def age(self, now: float) -> float:
        """Seconds since the oldest attempt under way began."""
        return max((now - self._started[replica] for replica in self._attempts.values()), default=0.0)

    def accepts(self, replica: Replica) -> bool:
        """Whether the replica has the version, has not failed the group, and does not have it already."""
        return (
            replica.serves
            and replica.version == self.request.version
            and replica not in self.failures
            and replica not in self._attempts.values()
        )

    def attempt(
        self, replica: Replica, work: Coroutine[Any, Any, GenerateResponse | None]
    ) -> asyncio.Task[GenerateResponse | None]:
        """Begin an attempt; ``work`` gives the answer, or None after it noted why there is none."""
        self._started[replica] = time.monotonic()
        task = asyncio.create_task(work, name=f"group {self.request.group_id} on {replica.id}")
        self._attempts[task] = replica
        task.add_done_callback(self._ended.put_nowait)
        return task

    async def next_end(self) -> tuple[GenerateResponse | None, Replica, float]:
        """Wait for the next attempt to end: its answer, if any, the replica, and the seconds that it took."""
        task = await self._ended.get()
        replica = self._attempts.pop(task)
        return task.result(), replica, time.monotonic() - self._started[replica]

    def abandon(self) -> None:
        """Cancel the attempts under way, whose answers nobody takes any more."""
        for task in self._attempts:
            task.cancel()


class Hedger:
    """Decides which groups are stragglers: those that take ``hedge_after`` times the median of their like."""

    def __init__(self, hedge_after: float | None) -> None:
        self._hedge_after = hedge_after
        self._durations: dict[Kind, list[float]] = {}

    def finished(self, flight: Flight, seconds: float) -> None:
        """Note how long a group took. Those of older versions are forgotten."""
        version = flight.request.version
        self._durations = {kind: times for kind, times in self._durations.items() if kind[0] >= version - 1}
        self._durations.setdefault(flight.kind, []).append(seconds)

    def is_straggler(self, flight: Flight, now: float) -> bool:
        """Whether the group, with one attempt under way, deserves a second one."""
        durations = self._durations.get(flight.kind, [])
        if self._hedge_after is None or flight.attempts != 1 or flight.hedge or len(durations) < MIN_FINISHED:
            return False
        return flight.age(now) > max(MIN_SECONDS, self._hedge_after * statistics.median(durations))
