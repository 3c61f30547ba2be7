"""Spans of both sides of the loop, and what an iteration's time was spent on.

A span says what one *lane* did from when to when. Lanes are ``train`` (the trainer), ``score`` (reward workers) and
one per replica, named after it. Times are seconds since the epoch, so that spans of several processes fit together.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

TRAIN = "train"
SCORE = "score"

GENERATE_NAMES = ("generate", "load")
TRAIN_NAMES = ("wait", "forward_backward", "step", "publish", "checkpoint", "log")
SPAN_NAMES = (*GENERATE_NAMES, "score", *TRAIN_NAMES)

Interval = tuple[float, float]


@dataclass(frozen=True)
class Span:
    """One lane doing one thing.

    Attributes:
        name: one of ``SPAN_NAMES``.
        lane: ``train``, ``score``, or the id of a replica.
        start: seconds since the epoch.
        end: seconds since the epoch, not before ``start``.
        iteration: the iteration it belongs to; for ``load`` the version that was loaded.
        attrs: anything worth seeing in the trace, JSON values only.
    """

    name: str
    lane: str
    start: float
    end: float
    iteration: int
    attrs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def duration(self) -> float:
        """Seconds."""
        return self.end - self.start

    def to_dict(self) -> dict[str, Any]:
        """The span as JSON values."""
        return asdict(self)


class Timeline:
    """Collects spans from any thread.

    Attributes:
        on_span: told of every span, in the thread that recorded it; must neither raise nor take long.
    """

    def __init__(self) -> None:
        self.on_span: Callable[[Span], None] = lambda span: None
        self._lock = threading.Lock()
        self._spans: list[Span] = []

    def add(self, name: str, lane: str, start: float, end: float, iteration: int, **attrs: Any) -> Span:
        """Record a span measured elsewhere; one that a clock set back left with a negative length gets length 0.

        Raises:
            ValueError: for a name that is not one of ``SPAN_NAMES``.
        """
        if name not in SPAN_NAMES:
            raise ValueError(f"span {name!r} is none of {', '.join(SPAN_NAMES)}")
        span = Span(name, lane, start, max(start, end), iteration, attrs)
        with self._lock:
            self._spans.append(span)
        self.on_span(span)
        return span

    @contextmanager
    def span(self, name: str, lane: str, iteration: int, **attrs: Any) -> Iterator[dict[str, Any]]:
        """Record the block, also when it raises; attributes put into the yielded dict are kept."""
        start, clock = time.time(), time.perf_counter()
        try:
            yield attrs
        finally:
            self.add(name, lane, start, start + time.perf_counter() - clock, iteration, **attrs)

    def spans(self, start: float = float("-inf"), end: float = float("inf")) -> list[Span]:
        """A snapshot of the spans that touch the window, by start."""
        with self._lock:
            chosen = [span for span in self._spans if span.end >= start and span.start <= end]
        return sorted(chosen, key=lambda span: (span.start, span.end))

    def forget(self, before: float) -> None:
        """Drop the spans that ended earlier, so that long runs stay small."""
        with self._lock:
            self._spans = [span for span in self._spans if span.end >= before]


class Shares(BaseModel):
    """What one side did with the wall time, in seconds; the four add up to the wall time."""

    model_config = ConfigDict(frozen=True)

    work: float = Field(description="Generating, or computing gradients and steps.")
    sync: float = Field(description="Loading a version (replica) or publishing one (trainer), while not working.")
    other: float = Field(description="Anything else on record: checkpoints, logging.")
    idle: float = Field(description="The rest: waiting for the other side.")


class IterationTimes(BaseModel):
    """Where one iteration's time went, in seconds. See :func:`iteration_times` for the definitions."""

    model_config = ConfigDict(frozen=True)

    wall: float = Field(description="Length of the window.")
    t_generate: float = Field(description="Time in which a replica generates, mean over replicas.")
    t_train: float = Field(description="Time in which the trainer computes gradients or steps.")
    t_sync: float = Field(description="Publishing the new version, and loading it until the first replica is ready.")
    both: float = Field(description="Time in which a replica generates while the trainer works, mean over replicas.")
    generate: Shares = Field(description="The generating side, mean over replicas.")
    train: Shares = Field(description="The trainer.")

    @property
    def overlap(self) -> float:
        """Share of the shorter side's work that was hidden behind the other's: 0 synchronous, 1 perfect."""
        shorter = min(self.t_generate, self.t_train)
        return self.both / shorter if shorter > 0 else 0.0

    @property
    def bound(self) -> float:
        """Largest speed-up over the synchronous schedule that these times allow, at least 1.

        (T_generate + T_train + T_sync) / (max(T_generate, T_train) + T_sync): perfect overlap of the same work
        (Periodic Asynchrony, arXiv 2511.18871, section 3).
        """
        overlapped = max(self.t_generate, self.t_train) + self.t_sync
        return (self.t_generate + self.t_train + self.t_sync) / overlapped if overlapped > 0 else 1.0

    def metrics(self) -> dict[str, float]:
        """The ``perf/`` metrics of this iteration."""
        return {
            "perf/wall": self.wall,
            "perf/t_generate": self.t_generate,
            "perf/t_train": self.t_train,
            "perf/t_sync": self.t_sync,
            "perf/idle_generate": self.generate.idle,
            "perf/idle_train": self.train.idle,
            "perf/overlap": self.overlap,
            "perf/bound": self.bound,
        }


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """The union of intervals as disjoint intervals in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        elif end > start:
            merged.append((start, end))
    return merged


def measure(intervals: Iterable[Interval]) -> float:
    """Total length of a union of intervals, in their unit."""
    return sum(end - start for start, end in merge(intervals))


def intersection(left: Iterable[Interval], right: Iterable[Interval]) -> float:
    """Length of the part that two unions of intervals have in common."""
    first, second = list(left), list(right)
    return measure(first) + measure(second) - measure([*first, *second])


def iteration_times(spans: Iterable[Span], start: float, end: float, replicas: Sequence[str]) -> IterationTimes:
    """Split the window between ``start`` and ``end`` (seconds since the epoch) into what each side did.

    Concurrent spans of a lane count once: all lengths are lengths of unions, clipped to the window.

    * ``t_generate``: union of a replica's ``generate`` spans; the mean over ``replicas``.
    * ``t_train``: union of the trainer's ``forward_backward`` and ``step`` spans.
    * ``t_sync``: union of the trainer's ``publish`` spans and, for every version loaded in the window, the stretch
      from the first start of a load to the first end of a load. The gate is per replica, so the pipeline moves again
      with the first replica; a slower one shows up in its own ``sync`` share only. The version that an iteration
      generates with is loaded at the window's beginning, the next one published at its end.
    * shares, each in seconds and together exactly the wall time: ``work``; ``sync``, the lane's own loading or
      publishing outside of work; ``other``, any further spans on the lane except ``wait``; ``idle``, the rest.
    * ``both``: time in which a replica generates while the trainer works; the mean over replicas.

    Raises:
        ValueError: for an empty window or no replicas.
    """
    if end <= start or not replicas:
        raise ValueError(f"iteration_times: need a window and replicas, got [{start}, {end}] and {list(replicas)}")
    clipped = [
        (span, (max(span.start, start), min(span.end, end))) for span in spans if span.end > start and span.start < end
    ]

    def of(lane: str, *names: str) -> list[Interval]:
        return [part for span, part in clipped if span.lane == lane and span.name in names]

    wall = end - start
    train_work = of(TRAIN, "forward_backward", "step")
    train_other = of(TRAIN, "checkpoint", "log")
    train = _shares(wall, train_work, of(TRAIN, "publish"), train_other)
    sides = [_shares(wall, of(name, "generate"), of(name, "load"), []) for name in replicas]
    generate = Shares(
        **{key: sum(getattr(side, key) for side in sides) / len(sides) for key in ("work", "sync", "other", "idle")}
    )
    loads = [(span.iteration, part) for span, part in clipped if span.name == "load" and span.lane in replicas]
    return IterationTimes(
        wall=wall,
        t_generate=generate.work,
        t_train=train.work,
        t_sync=measure([*of(TRAIN, "publish"), *_first_ready(loads)]),
        both=sum(intersection(of(name, "generate"), train_work) for name in replicas) / len(replicas),
        generate=generate,
        train=train,
    )


def _shares(wall: float, work: list[Interval], sync: list[Interval], other: list[Interval]) -> Shares:
    """Exclusive shares: an instant counts for the first of work, sync and other that covers it."""
    worked = measure(work)
    synced = measure([*work, *sync])
    busy = measure([*work, *sync, *other])
    return Shares(work=worked, sync=synced - worked, other=busy - synced, idle=wall - busy)


def _first_ready(loads: Iterable[tuple[int, Interval]]) -> list[Interval]:
    """Per version: from the first start of a load to the first end of one."""
    by_version: dict[int, list[Interval]] = {}
    for version, part in loads:
        by_version.setdefault(version, []).append(part)
    return [(min(begin for begin, _ in parts), min(ready for _, ready in parts)) for parts in by_version.values()]


def rows(spans: Sequence[Span]) -> list[list[Span]]:
    """Distribute spans over as few rows as possible so that none overlap within a row, earliest first."""
    packed: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: (span.start, span.end)):
        free = next((row for row in packed if row[-1].end <= span.start), None)
        if free is None:
            packed.append([span])
        else:
            free.append(span)
    return packed
