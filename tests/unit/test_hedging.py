"""Stragglers are asked of a second replica; every group is answered exactly once, whatever fails in between."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest
from manual_replicas import House, ManualEngine, group, house, run, until

from pa_core.rollout import hedge
from pa_core.rollout.client import HttpReplicaClient
from pa_core.rollout.protocol import GenerateRequest, GenerateResponse


async def with_history(place: House) -> None:
    """Version 0 loaded, and two groups finished, so that a median is known."""
    await place.pool.load(0)
    for engine in place.engines:
        engine.automatic = True
    await asyncio.gather(*(place.pool.generate(group(f"quick{i}")) for i in range(2)))
    for engine in place.engines:
        engine.automatic = False


async def hedged(place: House) -> tuple[asyncio.Task[GenerateResponse], ManualEngine, ManualEngine]:
    """A group on its way at two replicas: its task, the first replica, the second one."""
    await with_history(place)
    task = asyncio.create_task(place.pool.generate(group("slow")))
    await until(lambda: any(engine.pending for engine in place.engines), "a replica has the group")
    first = next(engine for engine in place.engines if engine.pending)
    await until(lambda: all(engine.pending for engine in place.engines), "the group is sent to a second replica")
    return task, first, next(engine for engine in place.engines if engine is not first)


def test_a_straggler_is_sent_to_an_idle_replica_and_the_loser_is_dropped_and_holds_nothing_up() -> None:
    async def test() -> None:
        async with house(automatic=False) as place:
            task, first, second = await hedged(place)
            assert place.pool.in_flight == {"r0": 1, "r1": 1} and place.pool.hedged == 1
            lost = first.pending[0][1]
            second.answer()
            assert (await task).replica == second.name
            await until(lambda: place.pool.in_flight == {"r0": 0, "r1": 0}, "the loser's place is free")
            assert [ack.version for ack in await place.pool.load(1)] == [1, 1], "nobody waits for the loser"
            assert lost.cancelled(), "the replica stopped working on it before its weights changed"
            assert (place.pool.hedged, place.pool.hedges_won) == (1, 1)

    run(test)


def test_when_the_first_replica_answers_after_all_its_answer_counts_and_the_hedge_is_dropped() -> None:
    async def test() -> None:
        async with house(automatic=False) as place:
            task, first, second = await hedged(place)
            first.answer()
            assert (await task).replica == first.name
            await until(lambda: second.pending[0][1].cancelled(), "the hedge is dropped")
            assert (place.pool.hedged, place.pool.hedges_won) == (1, 0)
            assert len(second.pending) == 1, "a group is hedged once"

    run(test)


def test_two_answers_at_the_same_moment_are_one_answer() -> None:
    async def test() -> None:
        async with house(automatic=False) as place:
            task, first, second = await hedged(place)
            first.answer()
            second.answer()
            assert (await task).group_id == "slow"
            await until(lambda: place.pool.in_flight == {"r0": 0, "r1": 0}, "both places are free")
            assert place.pool.queued == 0

    run(test)


def test_an_answer_that_comes_although_nobody_wants_it_any_more_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica behind a client that does not let go when it is cancelled."""
    ask = HttpReplicaClient.generate

    async def stubborn(client: HttpReplicaClient, request: GenerateRequest) -> GenerateResponse:
        task = asyncio.ensure_future(ask(client, request))
        while not task.done():
            try:
                await asyncio.shield(task)
            except asyncio.CancelledError:
                continue
        return task.result()

    monkeypatch.setattr(HttpReplicaClient, "generate", stubborn)

    async def test() -> None:
        async with house(automatic=False) as place:
            task, first, second = await hedged(place)
            second.answer()
            assert (await task).replica == second.name, "the winner does not wait for the loser"
            loading = asyncio.create_task(place.pool.load(1))
            await asyncio.sleep(0.3)
            assert first.version == 0, "no weights change under a request in flight"
            first.answer()
            await loading
            assert first.version == 1 and first.served.count("slow") == 1
            assert place.pool.in_flight == {"r0": 0, "r1": 0}

    run(test)


@pytest.mark.parametrize("lost", ["first", "second"])
def test_when_one_of_the_two_dies_the_other_goes_on_alone(lost: str) -> None:
    async def test() -> None:
        async with house(automatic=False) as place:
            task, first, second = await hedged(place)
            gone, left = (first, second) if lost == "first" else (second, first)
            await place.vanish(place.engines.index(gone))
            await until(lambda: gone.name in place.pool.dead, "the death is noticed")
            assert not task.done() and len(left.pending) == 1, "it is not sent a second time to who has it"
            left.answer()
            assert (await task).replica == left.name

    run(test)


def test_nothing_is_hedged_while_groups_wait_or_without_a_median_or_when_switched_off() -> None:
    async def test() -> None:
        async with house(automatic=False) as place:
            await place.pool.load(0)
            lone = asyncio.create_task(place.pool.generate(group("lone")))
            await asyncio.sleep(2)
            assert place.pool.hedged == 0, "nobody knows yet what is slow"
            place.engines[0].answer()
            await lone
            await with_history(place)
            tasks = [asyncio.create_task(place.pool.generate(group(f"g{i}"))) for i in range(5)]
            await until(lambda: place.pool.queued == 1, "all replicas are full")
            await asyncio.sleep(2)
            assert place.pool.hedged == 0, "those that wait come first"
            for task in tasks:
                task.cancel()
        async with house(automatic=False, hedge_after=None) as place:
            await with_history(place)
            task = asyncio.create_task(place.pool.generate(group("slow")))
            await asyncio.sleep(2)
            assert place.pool.hedged == 0
            task.cancel()

    run(test)


class Chaos:
    """Answers, kills, restarts and adds at random until every group of some versions is answered."""

    def __init__(self, place: House, seed: int) -> None:
        self.place = place
        self.random = random.Random(seed)
        self.gone: set[int] = set()
        self.added = 0

    def there(self) -> list[int]:
        return [index for index in range(len(self.place.engines)) if index not in self.gone]

    async def step(self) -> None:
        await asyncio.sleep(self.random.choice((0.0, 0.0, 0.01, 0.03)))
        dice = self.random.random()
        there = self.there()
        if dice < 0.06 and len(there) > 1:
            index = self.random.choice(there)
            self.gone.add(index)
            await (self.place.vanish if self.random.random() < 0.5 else self.place.leave)(index)
        elif dice < 0.14 and len(there) < 4:
            names = {self.place.engines[index].name for index in there}
            name = self.random.choice([name for name in ("r0", "r1", "r2", "x0", "x1") if name not in names])
            await self.place.add(name, automatic=False)
        else:
            engine = self.place.engines[self.random.choice(there)]
            if engine.pending:
                self.random.shuffle(engine.pending)
                engine.answer()


@pytest.mark.parametrize("seed", range(6))
def test_every_group_is_answered_once_under_kills_restarts_and_hedges(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hedge, "MIN_SECONDS", 0.05)

    async def test() -> None:
        async with house(count=3, automatic=False, hedge_after=1.01, heartbeat_timeout_s=6) as place:
            chaos = Chaos(place, seed)
            place.publish(2)
            for version in range(3):
                loading = asyncio.create_task(place.pool.load(version))
                names = [f"g{i}" for i in range(12)]
                tasks = [asyncio.create_task(place.pool.generate(group(name, version))) for name in names]
                while not all(task.done() for task in tasks):
                    await chaos.step()
                answers = await asyncio.gather(*tasks)
                assert Counter(answer.group_id for answer in answers) == Counter(names)
                assert {answer.version for answer in answers} == {version}
                await loading
            await until(lambda: not any(place.pool.in_flight.values()), "every place is free")
            assert place.pool.queued == 0

    run(test)
