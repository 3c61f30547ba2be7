"""One schedule, two knobs: when the trainer gets an iteration's groups.

``stream: true`` (periodic) delivers groups as they finish; ``stream: false`` (sync) delivers all of them once the
last has finished. Nothing else differs between the two, so a comparison compares only the schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate

from pa_core.config import ScheduleConfig
from pa_core.loop.draws import Quota
from pa_core.records import Group
from pa_core.store.rollouts import RolloutBuffer
from pa_core.tracking.timeline import TRAIN, Timeline


class Selection:
    """Which groups of an iteration are trained on, and in which of its optimizer steps.

    The groups that count are ranked by their place in the prompt stream; rank // (N / steps) is a group's mini-batch.
    So no optimizer step depends on which groups finish first. With dynamic sampling the rank of a group depends on
    what comes of the prompts before it: it is held back as long as it may belong to a later mini-batch, which with one
    step per iteration is never.

    Args:
        quota: what the iteration asks for.
        first: place of its first prompt in the stream; the others follow.
        steps: optimizer steps, a divisor of ``quota.groups``.

    Attributes:
        arrived: all groups so far, in the order of arrival.
        trained: those of them that were taken.
    """

    def __init__(self, quota: Quota, first: int, steps: int) -> None:
        self.quota = quota
        self.steps = steps
        self.arrived: list[Group] = []
        self.trained: list[Group] = []
        self._first = first
        self._size = quota.groups // steps
        self._counts: dict[int, bool] = {}
        self._held: list[Group] = []
        self._taken = [0] * steps

    @property
    def uninformative(self) -> list[Group]:
        """Groups so far that do not count; none without dynamic sampling."""
        return [group for group in self.arrived if not self._counts[group.prompt.index]]

    @property
    def drawn(self) -> int:
        """Prompts drawn because of what has arrived so far; each of them arrives."""
        return min(self.quota.draws, self.quota.groups + len(self._counts) - sum(self._counts.values()))

    @property
    def missing(self) -> int:
        """Groups to wait for."""
        return self.drawn - len(self.arrived)

    @property
    def most(self) -> int:
        """Groups that the iteration may come to have."""
        return self.quota.draws if self.missing else self.drawn

    def add(self, groups: Sequence[Group]) -> None:
        """Note what has arrived."""
        for group in groups:
            self.arrived.append(group)
            self._counts[group.prompt.index] = self.quota.counts(group)
            if self._counts[group.prompt.index]:
                self._held.append(group)

    def take(self, number: int) -> list[Group]:
        """Groups of mini-batch ``number``, not taken before; every earlier mini-batch must be complete."""
        places = range(self._first, self._first + self.drawn)
        # Of each place, were all those before it that have not arrived to count. It only falls.
        ranks = [0, *accumulate(self._counts.get(place, True) for place in places)]
        end = self._size * (number + 1)
        taken = [group for group in self._held if ranks[group.prompt.index - self._first] < end]
        self._held = [group for group in self._held if ranks[group.prompt.index - self._first] >= end]
        self._taken[number] += len(taken)
        self.trained += taken
        return taken

    def complete(self, number: int) -> bool:
        """Whether nothing more will come for mini-batch ``number``, once :meth:`take` has been called for it."""
        return self._taken[number] == self._size or not self.missing


def deliveries(
    buffer: RolloutBuffer,
    timeline: Timeline,
    schedule: ScheduleConfig,
    version: int,
    selection: Selection,
    timeout_s: float,
) -> Iterator[tuple[int, list[Group]]]:
    """Yield ``(mini-batch number, groups)`` until every group to train on was delivered exactly once.

    Mini-batches come one after the other, each number once at least; within one, groups come in any order. Something
    is yielded for every arrival, if only an empty list, so that the caller can judge what has arrived.

    Raises:
        EngineError: when nothing arrives within ``timeout_s``, or what the producer failed with.
    """

    def due(number: int) -> list[Group]:
        return selection.take(number) if schedule.stream or not selection.missing else []

    for number in range(selection.steps):
        yield number, due(number)
        while not selection.complete(number):
            with timeline.span("wait", TRAIN, version):
                arrived = buffer.take(version, timeout_s)
            selection.add(arrived)
            yield number, due(number)


def between_steps(arrivals: Iterable[tuple[int, list[Group]]], step: Callable[[], None]) -> Iterator[list[Group]]:
    """The groups of :func:`deliveries`, with ``step`` called when a further mini-batch begins, not after the last."""
    current = 0
    for number, groups in arrivals:
        if number != current:
            step()
            current = number
        yield groups
