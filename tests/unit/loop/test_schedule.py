"""One schedule, two knobs: what the trainer gets, and when."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable

import numpy as np
import pytest

from pa_core.config import ScheduleConfig
from pa_core.errors import EngineError
from pa_core.loop.draws import Quota
from pa_core.loop.schedule import Selection, deliveries
from pa_core.records import Group, Prompt, Sample
from pa_core.store.objects import ObjectStore
from pa_core.store.rollouts import RolloutBuffer
from pa_core.tracking.timeline import Timeline


def prompt(index: int) -> Prompt:
    return Prompt(f"p{index:08d}", index, f"question {index}", np.array([1, 2], dtype=np.int32), "a")


def group(index: int, version: int = 0) -> Group:
    sample = Sample(
        token_ids=np.array([3], dtype=np.int32),
        logprobs=np.array([-0.5], dtype=np.float32),
        versions=[(version, 1)],
        loss_mask=np.array([1], dtype=np.uint8),
        finish_reason="stop",
        reward=1.0,
    )
    return Group(prompt(index), [sample], version, "r0")


@pytest.fixture
def buffer() -> RolloutBuffer:
    return RolloutBuffer(ObjectStore.open(f"memory://schedule-{uuid.uuid4().hex}"))


def consume(
    buffer: RolloutBuffer, stream: bool, steps: int, count: int, after: Callable[[int], None] = lambda _: None
) -> list[tuple[int, list[str]]]:
    """What arrives, by mini-batch and ids; ``after`` is called with the number of groups so far."""
    selection = Selection(Quota(groups=count, draws=count, dynamic=False), first=0, steps=steps)
    received: list[tuple[int, list[str]]] = []
    for number, groups in deliveries(buffer, Timeline(), ScheduleConfig(stream=stream), 0, selection, 5.0):
        if groups:
            received.append((number, [each.id for each in groups]))
            after(sum(len(ids) for _, ids in received))
    return received


def test_periodic_delivers_a_group_before_the_next_one_exists(buffer: RolloutBuffer) -> None:
    order = [2, 0, 1]
    buffer.put(group(order[0]))

    def put_next(seen: int) -> None:
        if seen < len(order):
            buffer.put(group(order[seen]))

    received = consume(buffer, stream=True, steps=1, count=3, after=put_next)
    assert received == [(0, ["p00000002"]), (0, ["p00000000"]), (0, ["p00000001"])]


def test_sync_delivers_nothing_until_all_groups_are_there(buffer: RolloutBuffer) -> None:
    release = threading.Event()

    def produce() -> None:
        for index in (1, 0):
            buffer.put(group(index))
        release.wait(5)
        buffer.put(group(2))

    thread = threading.Thread(target=produce)
    thread.start()
    threading.Timer(0.3, release.set).start()
    received = consume(buffer, stream=False, steps=1, count=3)
    thread.join()
    assert received == [(0, ["p00000001", "p00000000", "p00000002"])]


@pytest.mark.parametrize("stream", [True, False])
def test_mini_batches_follow_prompt_order_whatever_finishes_first(buffer: RolloutBuffer, stream: bool) -> None:
    for index in (3, 1, 2, 0):
        buffer.put(group(index))
    received = consume(buffer, stream=stream, steps=2, count=4)
    assert [(number, sorted(ids)) for number, ids in received] == [
        (0, ["p00000000", "p00000001"]),
        (1, ["p00000002", "p00000003"]),
    ]


def test_every_group_is_delivered_exactly_once_in_any_order(buffer: RolloutBuffer) -> None:
    order = np.random.default_rng(7).permutation(12)
    for index in order:
        buffer.put(group(int(index)))
        buffer.put(group(int(index)))
    received = [each for _, ids in consume(buffer, stream=True, steps=3, count=12) for each in ids]
    assert sorted(received) == [f"p{index:08d}" for index in range(12)]
    assert buffer.duplicates_of(0) == 12


def test_a_producer_failure_reaches_the_trainer_as_itself(buffer: RolloutBuffer) -> None:
    threading.Timer(0.1, buffer.fail, [EngineError("replica r0 is dead: killed")]).start()
    with pytest.raises(EngineError, match="replica r0 is dead"):
        consume(buffer, stream=True, steps=1, count=2)
