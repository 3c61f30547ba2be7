"""Dynamic sampling: N informative groups per iteration, the same ones whatever finishes first."""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pa_core.config import RewardConfig, SamplingConfig, ScheduleConfig, ScoringConfig
from pa_core.config_files import parse_config
from pa_core.data.stream import PromptStream
from pa_core.errors import ConfigError, RewardError
from pa_core.loop.draws import Draws, Quota, informative
from pa_core.loop.iteration import rollout_metrics
from pa_core.loop.producer import Producer
from pa_core.loop.progress import ProgressState
from pa_core.loop.schedule import Selection, deliveries
from pa_core.records import Group, Prompt, Sample
from pa_core.rewards.pool import RewardPool
from pa_core.rollout.protocol import GenerateRequest, GenerateResponse, Generation
from pa_core.store.objects import ObjectStore
from pa_core.store.rollouts import RolloutBuffer
from pa_core.tracking.timeline import Timeline

Batches = list[set[int]]


def prompts(dull: Sequence[bool]) -> list[Prompt]:
    """One epoch of prompts; an answer of ``dull`` means that all of its samples score alike."""
    return [
        Prompt("", 0, f"question {number}", np.array([1 + number], np.int32), "dull" if each else "telling")
        for number, each in enumerate(dull)
    ]


def stream(dull: Sequence[bool]) -> PromptStream:
    """Prompts in this order; place ``i`` of the stream is the ``i``-th of them."""
    return PromptStream(prompts(dull), seed=0, shuffle=False)


def sample(reward: float | None, version: int = 0) -> Sample:
    ones = np.ones(1, np.uint8)
    return Sample(ones.astype(np.int32), -ones.astype(np.float32), [(version, 1)], ones, "stop", "", reward)


def group(prompt: Prompt, version: int = 0) -> Group:
    rewards = [1.0, 1.0] if prompt.answer == "dull" else [0.0, 1.0]
    return Group(prompt, [sample(reward, version) for reward in rewards], version, "r0")


def new_store() -> ObjectStore:
    return ObjectStore.open(f"memory://dynamic-{uuid.uuid4().hex}")


class Arrivals(RolloutBuffer):
    """A buffer whose producer finishes groups in random order, some more whenever the trainer waits.

    Attributes:
        generated: the places of the stream that were generated, in the order in which they finished.
    """

    def __init__(self, store: ObjectStore, draws: Draws, order: random.Random) -> None:
        super().__init__(store)
        self._draws, self._order = draws, order
        self._in_flight = draws.missing(lambda ids: self.restore(0, ids))
        self.generated: list[int] = []

    def take(self, version: int, timeout_s: float) -> list[Group]:
        for _ in range(self._order.randint(0 if self._available else 1, 3)):
            if self._in_flight:
                self.finish(self._in_flight.pop(self._order.randrange(len(self._in_flight))))
        return super().take(version, 0.0)

    def finish(self, prompt: Prompt) -> None:
        finished = group(prompt)
        self.put(finished)
        self.generated.append(prompt.index)
        another = self._draws.replacement(finished)
        if another is not None:
            self.admit(0, [another.id])
            self._in_flight.append(another)


def train(arrivals: Arrivals, quota: Quota, steps: int, streamed: bool) -> tuple[Batches, Selection]:
    """What each optimizer step gets, by place in the stream."""
    selection = Selection(quota, 0, steps)
    batches: Batches = [set() for _ in range(steps)]
    for number, groups in deliveries(arrivals, Timeline(), ScheduleConfig(stream=streamed), 0, selection, 0.0):
        assert all(informative(each) for each in groups)
        batches[number] |= {each.prompt.index for each in groups}
    return batches, selection


def expected(dull: Sequence[bool], quota: Quota, steps: int) -> tuple[Batches, int]:
    """By definition: the first N informative places of the stream in N / steps at a time, and how many were drawn."""
    chosen: list[int] = []
    drawn = 0
    while drawn < quota.draws and len(chosen) < quota.groups:
        if not dull[drawn]:
            chosen.append(drawn)
        drawn += 1
    size = quota.groups // steps
    return [set(chosen[start : start + size]) for start in range(0, quota.groups, size)], drawn


@settings(max_examples=60, deadline=None)
@given(
    dull=st.lists(st.booleans(), min_size=16, max_size=16),
    steps=st.sampled_from([1, 2, 4]),
    streamed=st.booleans(),
    draws=st.integers(5, 16),
    order=st.integers(0, 2**32),
)
def test_invariant_2_the_first_informative_groups_of_the_stream_are_trained_on_whatever_finishes_first(
    dull: list[bool], steps: int, streamed: bool, draws: int, order: int
) -> None:
    quota = Quota(groups=4, draws=draws, dynamic=True)
    position = stream(dull)
    arrivals = Arrivals(new_store(), Draws(position, quota), random.Random(order))
    batches, selection = train(arrivals, quota, steps, streamed)
    chosen, drawn = expected(dull, quota, steps)
    assert batches == chosen
    assert sorted(arrivals.generated) == list(range(drawn)), "no prompt is left out, none is drawn in surplus"
    assert position.state()["position"] == drawn, "the next iteration goes on right there"
    trained, uninformative = ({each.id for each in part} for part in (selection.trained, selection.uninformative))
    assert not trained & uninformative
    assert len(trained | uninformative) == drawn == selection.drawn == selection.most


@settings(max_examples=40, deadline=None)
@given(
    dull=st.lists(st.booleans(), min_size=12, max_size=12),
    before=st.integers(0, 12),
    steps=st.sampled_from([1, 2]),
    order=st.integers(0, 2**32),
)
def test_invariant_4_a_resumed_iteration_generates_nothing_again_and_ends_with_the_same_groups(
    dull: list[bool], before: int, steps: int, order: int
) -> None:
    quota = Quota(groups=4, draws=12, dynamic=True)
    store = new_store()
    first = Arrivals(store, Draws(stream(dull), quota), random.Random(order))
    for _ in range(before):  # then it is killed
        if first._in_flight:
            first.finish(first._in_flight.pop(first._order.randrange(len(first._in_flight))))
    position = stream(dull)
    again = Arrivals(store, Draws(position, quota), random.Random(order + 1))
    batches, selection = train(again, quota, steps, streamed=True)
    chosen, drawn = expected(dull, quota, steps)
    assert batches == chosen
    assert sorted(first.generated + again.generated) == list(range(drawn)), "each once, over both lives"
    assert {each.prompt.index for each in selection.arrived} == set(range(drawn))
    assert position.state()["position"] == drawn


def test_without_dynamic_sampling_groups_that_scored_alike_stay() -> None:
    quota = Quota(groups=4, draws=4, dynamic=False)
    position = stream([True] * 8)
    draws = Draws(position, quota)
    assert draws.replacement(group(draws.prompts[0])) is None
    selection = Selection(quota, 0, 1)
    selection.add([group(prompt) for prompt in draws.prompts])
    assert (len(selection.take(0)), selection.uninformative, selection.missing) == (4, [], 0)
    assert position.state()["position"] == 4


@pytest.mark.parametrize(
    ("rewards", "verdict"),
    [
        ([0.0, 1.0], True),
        ([1.0, 1.0, 1.0], False),
        ([0.1 + 0.2, 0.3], False),  # differ in the last bit only: the advantages are exactly 0
        ([None, 1.0], False),
        ([None, 1.0, 0.0], True),
        ([None, 1.0, 1.0], False),
        ([None, None], False),
    ],
)
def test_a_group_is_informative_if_it_has_an_advantage(rewards: list[float | None], verdict: bool) -> None:
    assert informative(Group(stream([False]).take(1)[0], [sample(each) for each in rewards], 0, "r0")) is verdict


def test_the_reward_is_that_of_all_groups_not_of_the_selected_ones() -> None:
    quota = Quota(groups=2, draws=4, dynamic=True)
    groups = [group(prompt) for prompt in stream([True, True, True, False]).take(4)]
    found = rollout_metrics(groups, quota)
    assert found["reward/mean"] == pytest.approx(7 / 8)
    assert found["reward/zero_variance_groups"] == 3
    assert (found["rollout/draws"], found["reward/zero_variance_groups"]) == (4, 3)
    assert (found["rollout/uninformative_share"], found["rollout/unfilled_groups"]) == (0.75, 1)
    assert rollout_metrics(groups, Quota(4, 4, dynamic=False))["rollout/unfilled_groups"] == 0


def test_too_many_unscored_samples_stop_the_run_once_no_replacement_can_make_up_for_them() -> None:
    rewards = RewardPool([RewardConfig(name="exact")], ScoringConfig(max_unscored=0.2))
    first, second, third = stream([False] * 3).take(3)
    nothing = Group(first, [replace(sample(None), unscored="none:exact") for _ in range(2)], 0, "r0")
    selection = Selection(Quota(groups=2, draws=8, dynamic=True), 0, 1)
    selection.add([nothing, group(second)])
    rewards.check(selection.arrived, expected=2 * selection.most)  # 2 of 16 at best
    selection.add([group(third)])
    with pytest.raises(RewardError, match="2 of 6 have no score"):
        rewards.check(selection.arrived, expected=2 * selection.most)


def test_progress_tells_of_uninformative_groups() -> None:
    state = ProgressState(groups=4, groups_consumed=3, groups_replaced=2, groups_in_flight=1)
    assert "groups 3/4, 2 uninformative, 1 in flight" in state.line()


def test_a_limit_that_allows_no_replacement_is_refused_with_the_fix() -> None:
    tree: dict[str, Any] = {"data": {"name": "chain_sum"}, "prompts_per_iteration": 4}
    assert parse_config(tree).max_draws == 4
    assert parse_config(tree | {"sampling": {"dynamic": {}}}).max_draws == 16
    assert Quota.of(parse_config(tree | {"sampling": {"dynamic": {"max_draws": 1.5}}})) == Quota(4, 6, True)
    with pytest.raises(ConfigError, match=r"max_draws=1.1 leaves no prompt.*prompts_per_iteration=4; raise it"):
        parse_config(tree | {"sampling": {"dynamic": {"max_draws": 1.1}}})


class ScriptedPool:
    """Answers every prompt at once, but those in ``held`` when they are released; notes what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []
        self._answers: dict[str, asyncio.Event] = {}
        self.on_failure: Callable[[BaseException], None]
        self.on_late_load: Callable[[Any], None]
        self.held: set[str] = set()

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()

    async def close(self) -> None: ...

    async def load(self, version: int) -> list[Any]:
        return []

    def status(self) -> str:
        return "the replica is fine"

    def release(self, group_id: str) -> None:
        self.held.discard(group_id)
        self._loop.call_soon_threadsafe(self._answers[group_id].set)

    async def generate(self, request: GenerateRequest) -> GenerateResponse:
        self.asked.append((request.group_id, request.version))
        self._answers[request.group_id] = asyncio.Event()
        if request.group_id in self.held:
            await self._answers[request.group_id].wait()
        one = Generation(np.ones(1, np.int32), np.zeros(1, np.float32), "stop", versions=((request.version, 1),))
        return GenerateResponse(request.group_id, request.version, [one] * request.samples, 1.0, 2.0, "r0")


class ScoresByAnswer:
    """All samples alike for a dull prompt, one of them right otherwise."""

    async def score(self, group: Group) -> None:
        for number, each in enumerate(group.samples):
            each.reward = 1.0 if group.prompt.answer == "dull" else float(number == 0)


Made = tuple[ScriptedPool, RolloutBuffer, Producer]


@pytest.fixture
def store() -> ObjectStore:
    return new_store()


@pytest.fixture
def made(store: ObjectStore) -> Iterator[Made]:
    """A started producer between a scripted pool and a real buffer."""
    pool, buffer = ScriptedPool(), RolloutBuffer(store)
    maker = Producer(pool, ScoresByAnswer(), buffer, Timeline(), lambda ids: "", seed=0)  # type: ignore[arg-type]
    maker.start(5)
    yield pool, buffer, maker
    maker.close()


def begin(made: Made, draws: Draws, version: int = 0) -> None:
    _, buffer, maker = made
    missing = draws.missing(lambda ids: buffer.restore(version, ids))
    maker.begin(version, missing, SamplingConfig(), 2, draws.replacement)


def test_a_slow_informative_group_is_waited_for_and_never_replaced(made: Made) -> None:
    pool, buffer, _ = made
    quota = Quota(groups=3, draws=12, dynamic=True)
    pool.held = {"p00000001"}
    begin(made, Draws(stream([True, False, False, True, False, False, False]), quota))
    selection = Selection(quota, 0, 1)
    received: list[str] = []
    for _, groups in deliveries(buffer, Timeline(), ScheduleConfig(), 0, selection, 20):
        received += [each.id for each in groups]
        if len(received) == 2 and pool.held:
            assert sorted(received) == ["p00000002", "p00000004"], "0 gave way to 3, and 3 to 4; 1 is still under way"
            assert selection.missing == 1
            pool.release("p00000001")
    assert received[2:] == ["p00000001"]
    assert sorted(pool.asked) == [(f"p{place:08d}", 0) for place in range(5)]


def test_replacements_go_out_while_the_trainer_is_busy_and_for_the_same_version(made: Made) -> None:
    """Invariant 1. Nobody takes anything from the buffer here, as while the trainer computes."""
    pool, buffer, _ = made
    begin(made, Draws(stream([True, True, False, False]), Quota(groups=2, draws=8, dynamic=True)), version=3)
    deadline = time.monotonic() + 20
    while buffer.accepted < 4:
        assert time.monotonic() < deadline, pool.asked
        time.sleep(0.01)
    assert sorted(pool.asked) == [(f"p{place:08d}", 3) for place in range(4)]
    assert sorted(each.id for each in buffer.take(3, 1)) == [f"p{place:08d}" for place in range(4)]


@pytest.mark.parametrize("streamed", [True, False])
def test_an_iteration_without_any_informative_group_ends_at_the_limit(made: Made, streamed: bool) -> None:
    pool, buffer, _ = made
    quota = Quota(groups=2, draws=5, dynamic=True)
    begin(made, Draws(stream([True] * 8), quota))
    selection = Selection(quota, 0, 2)
    steps = [number for number, _ in deliveries(buffer, Timeline(), ScheduleConfig(stream=streamed), 0, selection, 20)]
    assert sorted(set(steps)) == [0, 1], "both optimizer steps are still taken, so that the learning rate stays on plan"
    assert (selection.trained, len(selection.uninformative), len(pool.asked)) == ([], 5, 5)


def test_the_group_that_the_trainer_gets_decides_not_one_generated_again(made: Made, store: ObjectStore) -> None:
    pool, buffer, maker = made
    draws = Draws(stream([False, False]), Quota(groups=1, draws=2, dynamic=True))
    stored = group(draws.prompts[0])
    stored.samples[0].reward = 1.0  # all alike, other than what is generated now
    RolloutBuffer(store).put(stored)
    buffer.expect(0, [stored.id])
    maker.begin(0, draws.prompts, SamplingConfig(), 2, draws.replacement)
    ids = [buffer.next(0, 20).id for _ in range(2)]
    assert ids == ["p00000000", "p00000001"]
    assert [each for each, _ in pool.asked] == ids
