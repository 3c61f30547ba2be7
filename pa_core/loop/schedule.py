"""One schedule, two knobs: when the trainer gets an iteration's groups.

``stream: true`` (periodic) delivers groups as they finish; ``stream: false`` (sync) delivers all of them once the
last has finished. Nothing else differs between the two, so a comparison compares only the schedule.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pa_core.config import ScheduleConfig
from pa_core.records import Group, Prompt
from pa_core.store.rollouts import RolloutBuffer
from pa_core.tracking.timeline import TRAIN, Timeline


def mini_batches(prompts: Sequence[Prompt], steps: int) -> list[list[Prompt]]:
    """Split an iteration's prompts, in their order, into ``steps`` equal mini-batches: one optimizer step each."""
    size = len(prompts) // steps
    return [list(prompts[start : start + size]) for start in range(0, len(prompts), size)]


def deliveries(
    buffer: RolloutBuffer,
    timeline: Timeline,
    schedule: ScheduleConfig,
    version: int,
    batches: Sequence[Sequence[Prompt]],
    timeout_s: float,
) -> Iterator[tuple[int, list[Group]]]:
    """Yield ``(mini-batch number, groups)`` until every prompt's group was delivered exactly once.

    Mini-batches are fixed by prompt order and come one after the other, so that no optimizer step depends on which
    groups happened to finish first; within one, groups come in any order.

    Raises:
        EngineError: when nothing arrives within ``timeout_s``, or what the producer failed with.
    """
    home = {prompt.id: number for number, batch in enumerate(batches) for prompt in batch}
    waiting: list[list[Group]] = [[] for _ in batches]
    missing = [len(batch) for batch in batches]
    for number in range(len(batches)):
        while missing[number] or waiting[number]:
            while (missing[number] and not waiting[number]) if schedule.stream else sum(missing):
                with timeline.span("wait", TRAIN, version):
                    arrived = buffer.take(version, timeout_s)
                for group in arrived:
                    waiting[home[group.id]].append(group)
                    missing[home[group.id]] -= 1
            yield number, waiting[number]
            waiting[number] = []
