"""The producer: order of dispatch, what it makes of answers, and failures that reach who waits for groups."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from manual_replicas import KEY, ManualEngine, plain_client

from pa_core.config import SamplingConfig
from pa_core.errors import EngineError
from pa_core.loop.producer import Producer
from pa_core.records import Group, Prompt
from pa_core.rollout.config import EngineConfig
from pa_core.rollout.membership import Membership
from pa_core.rollout.pool import ReplicaPool
from pa_core.rollout.protocol import GenerateRequest, GenerateResponse, Generation
from pa_core.rollout.server import ReplicaServer
from pa_core.store.objects import ObjectStore
from pa_core.store.registry import ReplicaRegistry
from pa_core.store.rollouts import RolloutBuffer
from pa_core.store.weights import WeightStore
from pa_core.tracking.timeline import Timeline


class Scores:
    """Gives every sample the reward 1."""

    async def score(self, group: Group) -> None:
        for sample in group.samples:
            sample.reward, sample.rewards = 1.0, {"one": 1.0}


class RecordingPool:
    """Answers each prompt at once with responses as long as its text says; notes the order in which it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.on_failure: Callable[[BaseException], None]
        self.on_late_load: Callable[[Any], None]

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def load(self, version: int) -> list[Any]:
        return []

    def status(self) -> str:
        return "the replica is fine"

    async def generate(self, request: GenerateRequest) -> GenerateResponse:
        self.asked.append(request.group_id)
        length = int(request.token_ids[0])
        one = Generation(
            np.ones(length, np.int32),
            np.zeros(length, np.float32),
            "stop",
            versions=((request.version, 1), (request.version, length - 1)) if length > 1 else ((request.version, 1),),
            routed_experts=np.zeros((length, 2, 1), np.int32),
            sampling_mask=tuple(np.arange(3, dtype=np.int32) for _ in range(length)),
        )
        return GenerateResponse(request.group_id, request.version, [one] * request.samples, 1.0, 2.0, "r0")


def prompt(index: int, length: int) -> Prompt:
    """A prompt whose responses have ``length`` tokens; equal lengths are equal texts."""
    return Prompt(f"p{index}", index, f"of {length}", np.array([length], np.int32), "")


def producer(pool: Any, buffer: RolloutBuffer, **settings: Any) -> Producer:
    return Producer(pool, Scores(), buffer, Timeline(), lambda ids: "", seed=0, **settings)  # type: ignore[arg-type]


def iterate(maker: Producer, buffer: RolloutBuffer, version: int, prompts: list[Prompt]) -> list[Group]:
    buffer.expect(version, [each.id for each in prompts])
    maker.begin(version, prompts, SamplingConfig(), 2)
    return [buffer.next(version, 20) for _ in prompts]


@pytest.mark.parametrize("longest_first", [True, False])
def test_prompts_are_sent_longest_expected_first_and_in_stream_order_without_history(longest_first: bool) -> None:
    pool, buffer = RecordingPool(), RolloutBuffer(ObjectStore.open(f"memory://order-{longest_first}"))
    maker = producer(pool, buffer, longest_first=longest_first)
    maker.start(5)
    iterate(maker, buffer, 0, [prompt(0, 1), prompt(1, 7), prompt(2, 4)])
    assert pool.asked == ["p0", "p1", "p2"], "nothing is known yet"
    # 9 is unknown and counts as the mean of 1, 7 and 4; so it ties with 4, and keeps its place before it
    iterate(maker, buffer, 1, [prompt(3, 1), prompt(4, 9), prompt(5, 4), prompt(6, 7)])
    maker.close()
    assert pool.asked[3:] == (["p6", "p4", "p5", "p3"] if longest_first else ["p3", "p4", "p5", "p6"])


def test_the_group_carries_what_the_engine_reported() -> None:
    pool, buffer = RecordingPool(), RolloutBuffer(ObjectStore.open("memory://carried"))
    maker = producer(pool, buffer)
    maker.start(5)
    (group,) = maker.evaluate(3, [prompt(0, 4)], temperature=0.0, max_tokens=8, samples=1, timeout_s=10)
    maker.close()
    (sample,) = group.samples
    assert sample.versions == [(3, 1), (3, 3)], "as the engine told, not as the producer thinks"
    assert sample.routed_experts is not None and sample.routed_experts.shape == (4, 2, 1)
    assert sample.sampling_mask is not None and len(sample.sampling_mask) == 4


def test_an_evaluation_tells_how_far_it_is_in_the_thread_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pa_core.loop.producer.SHOW_EVERY_S", 0.01)
    first_shown = threading.Event()

    class PatientPool(RecordingPool):
        async def generate(self, request: GenerateRequest) -> GenerateResponse:
            if request.group_id == "p1":
                await asyncio.to_thread(first_shown.wait, 20)
            return await super().generate(request)

    told: list[tuple[int, int]] = []

    def show(done: int, total: int) -> None:
        assert threading.current_thread() is threading.main_thread()
        told.append((done, total))
        if done:
            first_shown.set()

    maker = producer(PatientPool(), RolloutBuffer(ObjectStore.open("memory://shown")))
    maker.start(5)
    prompts = [prompt(0, 1), prompt(1, 1)]
    maker.evaluate(0, prompts, temperature=0.0, max_tokens=8, samples=1, timeout_s=20, show=show)
    maker.close()
    assert (1, 2) in told


class Served:
    """A replica that never answers a group, in a thread of its own."""

    def __init__(self) -> None:
        self.store = ObjectStore.open(f"memory://served-{time.monotonic_ns()}")
        self.weights = WeightStore(self.store)
        import torch

        self.weights.publish(0, {"w": torch.zeros(1)}, {})
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.server = ReplicaServer("r0", ReplicaRegistry(self.store), KEY)
        self.on_loop(self.server.start())
        self.server.attach(ManualEngine("r0", self.weights, automatic=False))
        self.beat = asyncio.run_coroutine_threadsafe(self.server.beat(), self.loop)

    def on_loop(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(10)

    def stop(self) -> None:
        self.beat.cancel()
        self.on_loop(self.server.stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(5)


@pytest.fixture
def served() -> Iterator[Served]:
    place = Served()
    yield place
    place.stop()


def in_iteration(served: Served) -> tuple[Producer, RolloutBuffer]:
    """A producer with a group on its way that is never answered."""
    buffer = RolloutBuffer(served.store)
    pool = ReplicaPool(served.store, ["r0"], KEY, EngineConfig(), make_client=plain_client)
    maker = producer(pool, buffer)
    maker.start(20)
    buffer.expect(0, ["p0"])
    maker.begin(0, [prompt(0, 1)], SamplingConfig(), 2)
    return maker, buffer


def test_a_monitor_that_fails_reaches_the_trainer_within_seconds(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    maker, buffer = in_iteration(served)

    async def broken(_members: Membership) -> None:
        raise RuntimeError("the monitor is broken")

    monkeypatch.setattr(Membership, "look_at_lives", broken)
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="the monitor is broken"):
        buffer.next(0, 60)
    with pytest.raises(RuntimeError, match="the monitor is broken"):
        maker.evaluate(0, [prompt(1, 1)], temperature=0.0, max_tokens=8, samples=1, timeout_s=60)
    assert time.monotonic() - started < 10
    maker.close()


def test_an_event_loop_that_stops_reaches_the_trainer_within_seconds(served: Served) -> None:
    maker, buffer = in_iteration(served)
    started = time.monotonic()
    maker._loop.call_soon_threadsafe(maker._loop.stop)
    with pytest.raises(EngineError, match="the producer's event loop stopped"):
        buffer.next(0, 60)
    with pytest.raises(EngineError, match="the producer's event loop stopped"):
        maker.evaluate(0, [prompt(1, 1)], temperature=0.0, max_tokens=8, samples=1, timeout_s=60)
    assert time.monotonic() - started < 10
    maker.close()


def test_an_evaluation_that_does_not_end_names_what_is_missing_and_what_the_replicas_do(served: Served) -> None:
    maker, _ = in_iteration(served)
    with pytest.raises(
        EngineError,
        match=r"2 of 2 problems were not finished within 1 s \(engine.request_timeout_s.*replica r0 is ready",
    ):
        maker.evaluate(0, [prompt(1, 1), prompt(2, 1)], temperature=0.0, max_tokens=8, samples=1, timeout_s=1)
    maker.close()
