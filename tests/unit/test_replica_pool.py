"""The pool over real HTTP servers in this process, with engines that the test controls."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import aiohttp
import pytest
from manual_replicas import KEY, ManualEngine, group, house, run, until

from pa_core.errors import ConfigError, EngineError, StoreError
from pa_core.rollout.config import EngineConfig
from pa_core.rollout.pool import ReplicaPool
from pa_core.rollout.server import ReplicaServer, read_run_config, serve_replica
from pa_core.store.objects import ObjectStore
from pa_core.store.registry import ReplicaRegistry
from pa_core.store.weights import WeightStore


def test_a_replica_gets_work_the_moment_it_acknowledged_while_another_still_loads() -> None:
    async def test() -> None:
        async with house() as place:
            place.engines[1].may_load.clear()
            loading = asyncio.create_task(place.pool.load(0))
            answers = await asyncio.gather(*(place.pool.generate(group(f"g{i}")) for i in range(6)))
            assert {answer.replica for answer in answers} == {"r0"}
            assert not loading.done() and place.pool.versions == {"r0": 0, "r1": None}
            place.engines[1].may_load.set()
            assert [ack.replica for ack in await loading] == ["r0", "r1"]
            assert place.pool.versions == {"r0": 0, "r1": 0}
            assert await place.pool.load(0) == [], "nobody loads what it has"
            assert (await place.pool.generate(group("g9"))).version == 0

    run(test)


def test_a_replica_that_is_slow_to_load_does_not_hold_up_the_next_version() -> None:
    async def test() -> None:
        async with house() as place:
            slow = place.engines[1]
            slow.may_load.clear()
            first = asyncio.create_task(place.pool.load(0))
            assert (await place.pool.generate(group("g0"))).replica == "r0"
            second = asyncio.create_task(place.pool.load(1))
            assert (await place.pool.generate(group("g0", version=1))).replica == "r0"
            assert place.pool.versions == {"r0": 1, "r1": None}
            slow.may_load.set()
            await first
            assert {ack.replica for ack in await second} == {"r0", "r1"}
            assert place.pool.versions == {"r0": 1, "r1": 1} and slow.version == 1

    run(test)


def test_groups_go_to_the_least_loaded_replica_and_queue_in_order_beyond_two_batches() -> None:
    async def test() -> None:
        async with house(automatic=False) as place:
            await place.pool.load(0)
            tasks = [asyncio.create_task(place.pool.generate(group(f"g{i}"))) for i in range(7)]
            first, second = place.engines
            await until(lambda: len(first.pending) == len(second.pending) == 2, "both replicas are full")
            assert place.pool.in_flight == {"r0": 2, "r1": 2}
            assert place.pool.queued == 3
            second.answer()
            await until(lambda: len(second.pending) == 2, "the freed place is taken")
            assert second.pending[-1][0].group_id == "g4"
            for engine in place.engines:
                engine.automatic = True
                while engine.pending:
                    engine.answer()
            await asyncio.gather(*tasks)
            assert sorted(first.served + second.served) == [f"g{i}" for i in range(7)]
            assert place.pool.in_flight == {"r0": 0, "r1": 0}

    run(test)


def test_a_replica_whose_weights_have_another_digest_gets_no_work() -> None:
    async def test() -> None:
        async with house() as place:
            place.engines[0].digest = "0" * 64
            assert [ack.replica for ack in await place.pool.load(0)] == ["r1"]
            answers = await asyncio.gather(*(place.pool.generate(group(f"g{i}")) for i in range(5)))
            assert {answer.replica for answer in answers} == {"r1"}
            place.engines[1].digest = "0" * 64
            with pytest.raises(
                EngineError, match=r"no replica has loaded policy version 1.*r0 failed to load.*digest 000"
            ):
                await place.pool.load(1)

    run(test)


def test_loading_waits_until_groups_in_flight_are_answered() -> None:
    async def test() -> None:
        async with house(count=1, automatic=False) as place:
            await place.pool.load(0)
            task = asyncio.create_task(place.pool.generate(group("g0")))
            await until(lambda: place.engines[0].pending, "the group is in flight")
            loading = asyncio.create_task(place.pool.load(1))
            await asyncio.sleep(0.2)
            assert place.engines[0].version == 0
            place.engines[0].answer()
            assert (await task).version == 0
            await loading
            assert place.engines[0].version == 1

    run(test)


def test_a_version_that_is_not_published_is_named() -> None:
    async def test() -> None:
        async with house() as place:
            with pytest.raises(StoreError, match="policy version 7 is not published"):
                await place.pool.load(7)

    run(test)


def test_an_answer_of_another_version_is_never_passed_on() -> None:
    async def test() -> None:
        async with house() as place:
            await place.pool.load(0)
            place.engines[0].wrong_version = 1
            answers = await asyncio.gather(*(place.pool.generate(group(f"g{i}")) for i in range(6)))
            assert {answer.replica for answer in answers} == {"r1"}
            place.engines[1].wrong_version = 1
            with pytest.raises(EngineError, match="no living replica has policy version 0"):
                await place.pool.generate(group("g7"))

    run(test)


def test_an_error_on_one_replica_is_retried_on_another_and_raised_when_all_fail() -> None:
    async def test() -> None:
        async with house() as place:
            await place.pool.load(0)
            place.engines[0].failure = EngineError("out of memory")
            answers = await asyncio.gather(*(place.pool.generate(group(f"g{i}")) for i in range(3)))
            assert {answer.replica for answer in answers} == {"r1"}
            assert 1 <= place.pool.retries <= 3
            place.engines[1].failure = EngineError("out of memory too")
            with pytest.raises(
                EngineError, match=r"r0: generate failed .* out of memory; replica r1: .* out of memory too"
            ):
                await place.pool.generate(group("g9"))

    run(test)


def test_a_replica_that_accepts_and_never_answers_is_found_by_the_deadline_and_replaced() -> None:
    async def test() -> None:
        async with house(automatic=False, request_timeout_s=0.5) as place:
            place.engines[1].automatic = True
            await place.pool.load(0)
            answers = await asyncio.gather(*(place.pool.generate(group(f"g{i}")) for i in range(2)))
            assert {answer.replica for answer in answers} == {"r1"}
            assert "did not answer group g0 within engine.request_timeout_s=0.5 s" in place.pool.dead["r0"]

    run(test)


def test_a_silent_heartbeat_and_a_silent_server_are_a_death_but_a_slow_store_is_not() -> None:
    async def test() -> None:
        async with house(heartbeat_timeout_s=1.5) as place:
            await place.pool.load(0)
            place.beats[0].cancel()
            await asyncio.sleep(3)
            assert place.pool.dead == {}, "the server answers, so only its way to the store is slow"
            await place.vanish(0)
            started = time.monotonic()
            await until(lambda: "r0" in place.pool.dead, "the death is noticed")
            assert time.monotonic() - started < 15
            assert "no heartbeat for" in place.pool.dead["r0"]
            assert (await place.pool.generate(group("g0"))).replica == "r1"

    run(test)


def test_a_refused_connection_is_a_death_and_without_replicas_generation_fails_at_once() -> None:
    async def test() -> None:
        async with house() as place:
            await place.pool.load(0)
            await place.vanish(0)
            await place.vanish(1)
            started = time.monotonic()
            with pytest.raises(EngineError, match=r"no replica is left: replica r0 is dead: connection to replica r0"):
                await place.pool.generate(group("g0"))
            assert time.monotonic() - started < 10

    run(test)


def test_a_cancelled_group_is_dropped_by_the_replica_and_frees_its_place() -> None:
    async def test() -> None:
        async with house(count=1, automatic=False) as place:
            await place.pool.load(0)
            tasks = [asyncio.create_task(place.pool.generate(group(f"g{i}"))) for i in range(4)]
            engine = place.engines[0]
            await until(lambda: len(engine.pending) == 2, "the replica is full")
            tasks[0].cancel()
            tasks[3].cancel()
            await until(lambda: engine.pending[0][1].cancelled(), "the replica drops the group")
            await until(lambda: len(engine.pending) == 3, "its place is taken")
            assert engine.pending[2][0].group_id == "g2"
            assert place.pool.in_flight == {"r0": 2} and place.pool.queued == 0
            engine.pending.pop(0)
            engine.answer()
            engine.answer()
            await asyncio.gather(*tasks[1:3])

    run(test)


def test_a_replica_that_never_appears_is_named_after_the_start_deadline() -> None:
    async def test() -> None:
        settings = EngineConfig(startup_timeout_s=0.5)
        pool = ReplicaPool(ObjectStore.open("memory://nobody"), ["r0"], KEY, settings)
        with pytest.raises(EngineError, match=r"startup_timeout_s=0.5 s: replica r0 is not announced"):
            await pool.start()

    run(test)


def test_the_record_that_a_dead_replica_left_is_not_taken_for_a_replica() -> None:
    async def test() -> None:
        store = ObjectStore.open("memory://stale")
        server = ReplicaServer("r0", ReplicaRegistry(store), KEY)
        await server.start()
        server.attach(ManualEngine("r0", WeightStore(store)))
        await server.announce()
        record = ReplicaRegistry(store).read("r0")
        await server.stop()
        assert record is not None
        ReplicaRegistry(store).announce(record)
        pool = ReplicaPool(store, ["r0"], KEY, EngineConfig(startup_timeout_s=1.0))
        with pytest.raises(EngineError, match="replica r0 is not answering at http://127"):
            await pool.start()

    run(test)


def test_without_the_key_no_route_answers_and_bad_bodies_are_explained() -> None:
    async def test() -> None:
        async with house(count=1) as place, aiohttp.ClientSession() as session:
            record = ReplicaRegistry(place.store).read("r0")
            assert record is not None and record.url.startswith("http://127.0.0.1:")
            routes = (("GET", "/health"), ("POST", "/generate"), ("POST", "/load"), ("GET", "/nothing"))
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": KEY}):
                for method, path in routes:
                    async with session.request(method, record.url + path, headers=headers, json={}) as response:
                        assert response.status == 401, (method, path)
            authorized = {"Authorization": f"Bearer {KEY}"}
            for path, body, status, message in (
                ("/generate", "{", 400, "not JSON"),
                ("/generate", "[]", 400, "not a JSON object"),
                ("/generate", "{}", 400, "lacks 'group_id'"),
                ("/load", '{"version": "new"}', 400, "version must be an integer"),
            ):
                async with session.post(record.url + path, headers=authorized, data=body) as response:
                    assert response.status == status
                    assert message in (await response.json())["error"]
            body = group("g0", version=5).to_json()
            async with session.post(record.url + "/generate", headers=authorized, json=body) as response:
                assert response.status == 409
                assert "has loaded None" in (await response.json())["error"]

    run(test)


def test_serving_without_a_key_or_without_a_run_is_a_clear_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("PA_API_KEY", raising=False)
    with pytest.raises(ConfigError, match="set PA_API_KEY"):
        serve_replica(str(tmp_path), "r0")
    store = ObjectStore.open(str(tmp_path))
    with pytest.raises(ConfigError, match=r"run\.json does not exist; is this the URL of a run\?"):
        read_run_config(store)
    store.publish("run.json", b"[]")
    with pytest.raises(ConfigError, match=r"run\.json has no readable config"):
        read_run_config(store)
