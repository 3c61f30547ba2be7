"""The timeline as a Chrome trace: open it at ui.perfetto.dev or chrome://tracing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pa_core.tracking.timeline import SCORE, TRAIN, Span, rows

ITERATION_PID = 1
Window = tuple[int, float, float]


def lanes_of(spans: Iterable[Span]) -> list[str]:
    """Lanes from top to bottom: replicas by name, rewards, the trainer."""
    names = {span.lane for span in spans}
    replicas = sorted(names - {TRAIN, SCORE}, key=lambda name: (len(name), name))
    return [*replicas, *(name for name in (SCORE, TRAIN) if name in names)]


def title_of(lane: str) -> str:
    """A lane's name for people."""
    return {TRAIN: "trainer", SCORE: "rewards"}.get(lane, f"replica {lane}")


def chrome_trace(spans: Sequence[Span], iterations: Sequence[Window] = ()) -> dict[str, Any]:
    """A trace in the Trace Event Format (complete events, ``ph: X``; microseconds since the first span).

    One process per lane; its threads are slots, since slices of one thread may not overlap and a replica generates
    several groups at once.

    Args:
        spans: what happened.
        iterations: ``(iteration, start, end)``, shown on a track of their own.
    """
    origin = min([span.start for span in spans] + [start for _, start, _ in iterations], default=0.0)
    events: list[dict[str, Any]] = []
    if iterations:
        events += _names(ITERATION_PID, "iterations", 0, "iteration")
    for number, start, end in iterations:
        events.append(_slice(f"iteration {number}", "iteration", ITERATION_PID, 0, start - origin, end - start, {}))
    for pid, lane in enumerate(lanes_of(spans), start=ITERATION_PID + 1):
        for tid, row in enumerate(rows([span for span in spans if span.lane == lane])):
            events += _names(pid, title_of(lane), tid, f"slot {tid}")
            for span in row:
                arguments = {"iteration": span.iteration, **span.attrs}
                events.append(_slice(span.name, span.name, pid, tid, span.start - origin, span.duration, arguments))
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"origin_epoch_s": origin}}


def _slice(
    name: str, category: str, pid: int, tid: int, start: float, duration: float, arguments: dict[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": pid,
        "tid": tid,
        "ts": round(start * 1e6, 1),
        "dur": round(duration * 1e6, 1),
        "args": arguments,
    }


def _names(pid: int, process: str, tid: int, thread: str) -> list[dict[str, Any]]:
    """Metadata events that name and order a track."""
    return [
        {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": process}},
        {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}},
        {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": thread}},
        {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}},
    ]
