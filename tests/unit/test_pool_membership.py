"""Replicas that join, leave, die and come back while the pool is used, as their records in the registry tell."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace

import pytest
from manual_replicas import KEY, ManualEngine, group, house, mute, run, unmute, until

from pa_core.errors import EngineError
from pa_core.rollout.server import ReplicaServer
from pa_core.store.objects import ObjectStore
from pa_core.store.registry import GIVEN_UP, RESTARTING, ReplicaRecord, ReplicaRegistry
from pa_core.store.weights import WeightStore


def test_a_replica_that_announces_itself_in_mid_run_loads_the_current_version_and_gets_work() -> None:
    async def test() -> None:
        async with house(count=1, automatic=False) as place:
            late: list[tuple[str, int]] = []
            place.pool.on_late_load = lambda ack: late.append((ack.replica, ack.version))
            await place.pool.load(0)
            await place.pool.load(1)
            tasks = [asyncio.create_task(place.pool.generate(group(f"g{i}", 1))) for i in range(4)]
            await until(lambda: place.pool.in_flight == {"r0": 2}, "the only replica is full")
            engine = await place.add("r7", automatic=False)
            await until(lambda: len(engine.pending) == 2, "the new replica got the groups that waited")
            assert place.pool.versions == {"r0": 1, "r7": 1} and late == [("r7", 1)]
            for each in place.engines:
                each.automatic = True
                while each.pending:
                    each.answer()
            assert {answer.version for answer in await asyncio.gather(*tasks)} == {1}
            assert sorted(engine.served) == ["g2", "g3"]
            assert place.pool.restarts == 0

    run(test)


def test_a_replica_that_joins_while_the_version_changes_ends_up_with_the_new_one() -> None:
    async def test() -> None:
        async with house(count=1) as place:
            await place.pool.load(0)
            engine = await place.add("r1")
            engine.may_load.clear()
            await until(lambda: "r1" in place.pool.versions, "the replica has joined")
            loading = asyncio.create_task(place.pool.load(1))
            assert (await place.pool.generate(group("g0", 1))).replica == "r0"
            engine.may_load.set()
            await loading
            assert place.pool.versions == {"r0": 1, "r1": 1} and engine.version == 1

    run(test)


def test_a_replica_that_withdraws_leaves_and_its_groups_go_elsewhere() -> None:
    async def test() -> None:
        async with house(automatic=False) as place:
            await place.pool.load(0)
            tasks = [asyncio.create_task(place.pool.generate(group(f"g{i}"))) for i in range(4)]
            await until(lambda: place.pool.in_flight == {"r0": 2, "r1": 2}, "both are full")
            place.engines[0].automatic = True
            for _ in range(2):
                place.engines[0].answer()
            await place.leave(1)
            assert {answer.replica for answer in await asyncio.gather(*tasks)} == {"r0"}
            await until(lambda: place.pool.versions == {"r0": 0}, "the replica is out")
            assert place.pool.dead == {}, "leaving is no death"
            assert [ack.replica for ack in await place.pool.load(1)] == ["r0"]
            await place.leave(0)
            await until(lambda: place.pool.versions == {}, "the last replica is out")
            with pytest.raises(EngineError, match=r"no replica is left: replica r0 is gone, because it withdrew"):
                await place.pool.generate(group("g9", 1))

    run(test)


def test_a_replica_that_withdraws_may_finish_what_it_has() -> None:
    async def test() -> None:
        async with house(automatic=False) as place:
            await place.pool.load(0)
            task = asyncio.create_task(place.pool.generate(group("g0")))
            await until(lambda: place.engines[0].pending, "the group is in flight")
            place.beats[0].cancel()
            ReplicaRegistry(place.store).withdraw("r0")
            await until(lambda: place.pool.versions == {"r1": 0}, "it is out")
            place.engines[0].answer()
            assert (await task).replica == "r0"

    run(test)


def test_a_replica_that_died_and_came_back_is_a_new_one_and_is_used_again() -> None:
    async def test() -> None:
        async with house(heartbeat_timeout_s=1.5) as place:
            await place.pool.load(0)
            await place.vanish(1)
            await until(lambda: "r1" in place.pool.dead, "the death is noticed")
            await place.pool.load(1)
            again = await place.add("r1")
            await until(lambda: place.pool.versions == {"r0": 1, "r1": 1}, "it is back with the current version")
            assert place.pool.dead == {} and place.pool.restarts == 1
            await asyncio.gather(*(place.pool.generate(group(f"g{i}", 1)) for i in range(6)))
            assert again.served

    run(test)


def test_a_new_incarnation_replaces_a_replica_whose_death_nobody_noticed() -> None:
    async def test() -> None:
        async with house(automatic=False) as place:
            await place.pool.load(0)
            tasks = [asyncio.create_task(place.pool.generate(group(f"g{i}"))) for i in range(2)]
            await until(lambda: place.engines[1].pending, "it works")
            place.beats[1].cancel()
            again = await place.add("r1", automatic=True)
            await until(lambda: len(place.engines[0].pending) == 2, "the group of the old process goes elsewhere")
            tasks.append(asyncio.create_task(place.pool.generate(group("g2"))))
            await until(lambda: again.served == ["g2"], "the new process works")
            place.engines[0].answer()
            place.engines[0].answer()
            assert [answer.group_id for answer in await asyncio.gather(*tasks)] == ["g0", "g1", "g2"]
            assert place.pool.restarts == 1

    run(test)


def test_a_replica_that_was_only_silent_is_used_again_when_it_is_heard() -> None:
    async def test() -> None:
        async with house(heartbeat_timeout_s=1.0) as place:
            await place.pool.load(0)
            place.beats[1].cancel()
            port = await mute(place.servers[1])
            await until(lambda: "r1" in place.pool.dead, "the silence is noticed")
            await unmute(place.servers[1], port)
            place.beats[1] = asyncio.create_task(place.servers[1].beat())
            await until(lambda: place.pool.versions == {"r0": 0, "r1": 0}, "it is back")

    run(test)


def test_groups_wait_for_a_replica_that_is_being_restarted_and_fail_when_it_is_given_up() -> None:
    async def test() -> None:
        async with house(count=1, heartbeat_timeout_s=4.0) as place:
            registry = ReplicaRegistry(place.store)
            await place.pool.load(0)
            await place.vanish(0)
            record = registry.read("r0")
            assert record is not None
            registry.announce(replace(record, state=RESTARTING, detail="its process ended (killed by SIGKILL)"))
            await until(lambda: "killed by SIGKILL" in place.pool.dead.get("r0", ""), "the record tells the cause")
            task = asyncio.create_task(place.pool.generate(group("g0")))
            await asyncio.sleep(5.0)
            assert not task.done(), "longer than any heartbeat takes: it is known to come back"
            again = await place.add("r0")
            assert (await task).version == 0 and again.served == ["g0"]
            await place.vanish(1)
            record = registry.read("r0")
            assert record is not None
            registry.announce(replace(record, state=GIVEN_UP, detail="(exit code 9) once too often"))
            with pytest.raises(EngineError, match=r"no replica is left: replica r0 is dead: it died \(exit code 9\)"):
                await place.pool.generate(group("g1"))

    run(test)


def test_the_start_goes_on_without_a_replica_that_is_late_and_names_it(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with house(count=1, start=False, replicas=2, startup_timeout_s=1.0) as place:
            registry = ReplicaRegistry(place.store)
            registry.announce(ReplicaRecord("r1", "", None, 1, "starting", detail="loading weights"))
            with caplog.at_level(logging.WARNING):
                await place.pool.start()
            assert "going on without" in caplog.text
            assert "engine.startup_timeout_s=1 s: replica r1 is starting (loading weights)" in caplog.text
            await place.pool.load(0)
            await place.add("r1")
            await until(lambda: place.pool.versions == {"r0": 0, "r1": 0}, "the late one has joined")

    run(test)


def test_a_replica_given_up_at_start_ends_the_wait_at_once_with_its_cause() -> None:
    async def test() -> None:
        async with house(count=1, start=False, replicas=2) as place:
            registry = ReplicaRegistry(place.store)
            registry.announce(ReplicaRecord("r1", "", None, 1, GIVEN_UP, detail="(exit code 2): no such model"))
            started = time.monotonic()
            with pytest.raises(EngineError, match=r"replica r1 died at start \(exit code 2\): no such model"):
                await place.pool.start()
            assert time.monotonic() - started < 5

    run(test)


def test_a_hung_replica_is_condemned_for_its_supervisor_to_end() -> None:
    async def test() -> None:
        async with house(automatic=False, request_timeout_s=0.5) as place:
            place.engines[1].automatic = True
            await place.pool.load(0)
            record = ReplicaRegistry(place.store).read("r0")
            assert record is not None
            assert (await place.pool.generate(group("g0"))).replica == "r1"
            await until(lambda: ReplicaRegistry(place.store).is_condemned(record), "the hung process is named")
            await asyncio.sleep(3)
            assert "r0" in place.pool.dead, "its heartbeat alone does not bring it back"

    run(test)


def test_servers_named_by_url_are_used_while_they_answer_and_again_when_they_come_back() -> None:
    async def test() -> None:
        registry = ReplicaRegistry(ObjectStore.open("memory://not-the-run"))
        server = ReplicaServer("u0", registry, KEY)
        url = await server.start()
        async with house(count=0, start=False, kind="vllm", replicas=0, urls=[url]) as place:
            engine = ManualEngine("u0", WeightStore(place.store))
            server.attach(engine)
            await place.pool.start()
            await place.pool.load(0)
            assert (await place.pool.generate(group("g0"))).replica == "u0"
            port = await mute(server)
            with pytest.raises(EngineError, match="no replica is left: replica u0 is dead: connection to"):
                await place.pool.generate(group("g1"))
            engine.version = None
            await unmute(server, port)
            await until(lambda: place.pool.versions == {"u0": 0}, "the server is back and has caught up")
            assert (await place.pool.generate(group("g2"))).replica == "u0"
            assert place.pool.restarts == 1
        await server.stop()

    run(test)


def test_a_server_that_was_restarted_unseen_loads_again_instead_of_staying_out() -> None:
    async def test() -> None:
        async with house(count=1) as place:
            await place.pool.load(0)
            place.engines[0].version = None
            assert (await place.pool.generate(group("g0"))).version == 0
            assert place.pool.versions == {"r0": 0}

    run(test)


def test_a_run_without_replicas_of_its_own_waits_for_the_first_and_for_the_next_when_none_is_left() -> None:
    async def test() -> None:
        async with house(count=0, start=False, replicas=0) as place:
            starting = asyncio.create_task(place.pool.start())
            await place.add("x1")
            await starting
            await place.pool.load(0)
            assert (await place.pool.generate(group("g0"))).replica == "x1"
            await place.leave(0)
            await until(lambda: not place.pool.versions, "the only replica has left")
            waiting = asyncio.create_task(place.pool.generate(group("g1")))
            await place.add("x2")
            assert (await waiting).replica == "x2"

    run(test)


def test_a_run_that_no_replica_joins_says_how_to_start_one() -> None:
    async def test() -> None:
        async with house(count=0, start=False, replicas=0, startup_timeout_s=0.3) as place:
            with pytest.raises(
                EngineError, match=r"no replica serves .*none has announced itself; start one with pa serve"
            ):
                await place.pool.start()

    run(test)
