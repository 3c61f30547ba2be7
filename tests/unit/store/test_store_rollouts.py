from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from pa_core.errors import EngineError, RewardError, StoreError
from pa_core.records import Group
from pa_core.store.objects import ObjectStore
from pa_core.store.rollouts import RolloutBuffer, StalenessError

Make = Callable[..., Group]


def test_a_group_put_by_one_thread_reaches_another(store: ObjectStore, make_group: Make) -> None:
    buffer = RolloutBuffer(store)
    timer = threading.Timer(0.05, buffer.put, [make_group("p0")])
    timer.start()
    assert buffer.next(3, timeout_s=30).id == "p0"
    timer.join(10)
    assert buffer.accepted == 1


def test_take_gives_all_that_is_there(store: ObjectStore, make_group: Make) -> None:
    buffer = RolloutBuffer(store)
    for name in ("b", "a", "c"):
        buffer.put(make_group(name))
    assert [group.id for group in buffer.take(3, timeout_s=1)] == ["b", "a", "c"]


def test_what_waits_and_what_an_iteration_still_lacks_is_counted(store: ObjectStore, make_group: Make) -> None:
    buffer = RolloutBuffer(store)
    buffer.expect(3, ["p0", "p1"])
    buffer.put(make_group("p0"))
    assert (buffer.waiting, buffer.undelivered(3)) == (1, 2)
    buffer.take(3, 1)
    assert (buffer.waiting, buffer.undelivered(3)) == (0, 1)
    buffer.admit(3, ["p2"])
    assert buffer.undelivered(3) == 2
    assert buffer.undelivered(4) == 0


def test_invariant_3_a_duplicate_is_counted_and_dropped(store: ObjectStore, make_group: Make) -> None:
    buffer = RolloutBuffer(store)
    assert buffer.put(make_group("p0", replica="first"))
    assert not buffer.put(make_group("p0", replica="second"))
    assert [group.replica for group in buffer.take(3, 1)] == ["first"]
    assert not buffer.put(make_group("p0", replica="third"))
    assert (buffer.duplicates, buffer.duplicates_of(3), buffer.duplicates_of(4)) == (2, 2, 0)
    with pytest.raises(EngineError):
        buffer.take(3, 0.01)
    assert [group.replica for group in RolloutBuffer(store).stored(3, ["p0"])] == ["first"]


def test_invariant_3_the_same_id_counts_anew_in_another_version(store: ObjectStore, make_group: Make) -> None:
    buffer = RolloutBuffer(store)
    buffer.put(make_group("p0", version=3))
    buffer.take(3, 1)
    assert buffer.put(make_group("p0", version=4))
    assert len(buffer.take(4, 1)) == 1


def test_invariant_3_racing_duplicates_are_delivered_once(store: ObjectStore, make_group: Make) -> None:
    buffer = RolloutBuffer(store)
    groups = [make_group(f"p{number % 5}", replica=f"r{number}") for number in range(40)]
    with ThreadPoolExecutor(8) as threads:
        new = sum(threads.map(buffer.put, groups))
    assert (new, buffer.duplicates) == (5, 35)
    assert sorted(group.id for group in buffer.take(3, 1)) == ["p0", "p1", "p2", "p3", "p4"]


def test_invariant_4_a_group_is_stored_before_it_is_acknowledged_or_delivered(
    store: ObjectStore, make_group: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = RolloutBuffer(store)
    may_store, storing = threading.Event(), threading.Event()
    publish = ObjectStore.publish

    def slow(self: ObjectStore, *arguments: object, **options: bool) -> None:
        storing.set()
        assert may_store.wait(30)
        publish(self, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(ObjectStore, "publish", slow)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(buffer.put, make_group("p0"))
        assert storing.wait(30)
        duplicate = threads.submit(buffer.put, make_group("p0"))
        with pytest.raises(EngineError):
            buffer.take(3, 0.05)
        assert not first.done()
        assert not duplicate.done()
        may_store.set()
        assert first.result(30)
        assert not duplicate.result(30)
    assert len(RolloutBuffer(store).stored(3, ["p0"])) == 1


def test_invariant_4_a_failed_put_is_not_acknowledged_and_may_be_repeated(
    store: ObjectStore, make_group: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = RolloutBuffer(store)

    def refuse(*_: object, **__: object) -> None:
        raise StoreError("store x: cannot write")

    with monkeypatch.context() as patched:
        patched.setattr(ObjectStore, "publish", refuse)
        with pytest.raises(StoreError, match="cannot write"):
            buffer.put(make_group("p0"))
    with pytest.raises(EngineError):
        buffer.take(3, 0.01)
    assert buffer.put(make_group("p0"))
    assert (len(buffer.take(3, 1)), buffer.duplicates) == (1, 0)


def test_invariant_4_what_an_earlier_life_stored_is_restored_and_not_generated_again(
    store: ObjectStore, make_group: Make
) -> None:
    before = RolloutBuffer(store)
    for name in ("p0", "p2"):
        before.put(make_group(name, replica="before"))
    after = RolloutBuffer(store)
    assert [group.id for group in after.restore(3, ["p0", "p1", "p2"])] == ["p0", "p2"]
    assert after.restored == 2
    after.put(make_group("p1", replica="after"))
    taken = {group.id: group.replica for group in after.take(3, 1)}
    assert taken == {"p0": "before", "p1": "after", "p2": "before"}
    assert after.duplicates == 0


def test_invariant_4_the_acknowledged_group_wins_over_one_generated_again(store: ObjectStore, make_group: Make) -> None:
    RolloutBuffer(store).put(make_group("p0", replica="before"))
    after = RolloutBuffer(store)
    assert not after.put(make_group("p0", replica="again"))
    assert [group.replica for group in after.take(3, 1)] == ["before"]
    assert after.duplicates == 1


def test_restoring_twice_delivers_once(store: ObjectStore, make_group: Make) -> None:
    RolloutBuffer(store).put(make_group("p0"))
    buffer = RolloutBuffer(store)
    assert [[group.id for group in buffer.restore(3, ["p0"])] for _ in range(2)] == [["p0"], ["p0"]]
    assert len(buffer.take(3, 1)) == 1


def test_stored_finds_compacted_groups_whole(store: ObjectStore, make_group: Make) -> None:
    buffer = RolloutBuffer(store)
    groups = [make_group("p0"), make_group("p1")]
    for group in groups:
        buffer.put(group)
    buffer.compact(3, groups)
    late = make_group("p2")
    buffer.put(late)
    found = RolloutBuffer(store).stored(3, ["p2", "p1", "p0", "missing"])
    assert [group.id for group in found] == ["p2", "p1", "p0"]
    assert np.array_equal(found[1].samples[0].logprobs, groups[1].samples[0].logprobs)


@pytest.mark.parametrize("version", [2, 4])
def test_invariant_1_a_group_of_another_version_never_trains(
    store: ObjectStore, make_group: Make, version: int
) -> None:
    buffer = RolloutBuffer(store)
    buffer.put(make_group("good", version=3))
    buffer.put(make_group("p0", version=version))
    with pytest.raises(StalenessError, match=rf"group p0 was sampled by policy versions {version} to {version}"):
        buffer.take(3, 1)
    assert buffer.stale == 1
    assert [group.id for group in buffer.take(3, 1)] == ["good"]


def test_invariant_1_a_late_group_is_refused_when_it_is_put(store: ObjectStore, make_group: Make) -> None:
    buffer = RolloutBuffer(store)
    buffer.expect(3, ["p0"])
    with pytest.raises(StalenessError, match=r"schedule\.max_staleness=0"):
        buffer.put(make_group("p0", version=2))
    assert buffer.stale == 1
    assert store.list("rollouts") == []


def test_invariant_1_one_token_of_another_version_is_enough(store: ObjectStore, make_group: Make) -> None:
    group = make_group("p0", version=3)
    group.samples[0] = replace(group.samples[0], versions=[(2, 1), (3, 2)])
    buffer = RolloutBuffer(store)
    with pytest.raises(StalenessError, match="policy versions 2 to 3"):
        buffer.put(group)
    assert issubclass(StalenessError, StoreError)


def test_a_bound_above_zero_lets_that_much_through_and_no_more(store: ObjectStore, make_group: Make) -> None:
    buffer = RolloutBuffer(store, max_staleness=1)
    group = make_group("p0", version=3)
    group.samples[0] = replace(group.samples[0], versions=[(2, 1), (3, 2)])
    buffer.put(group)
    assert buffer.take(3, 1) == [group]
    assert buffer.max_staleness_seen == 1
    buffer.put(make_group("p1", version=3))
    with pytest.raises(StalenessError):
        buffer.take(5, 1)


def test_the_deadline_names_what_is_missing(store: ObjectStore, make_group: Make) -> None:
    buffer = RolloutBuffer(store)
    buffer.expect(3, ["p0", "p1", "p2"])
    buffer.put(make_group("p1"))
    buffer.take(3, 1)
    began = time.monotonic()
    with pytest.raises(EngineError, match=r"policy version 3 arrived within 0\.1 s; 2 of 3 are missing: p0, p2"):
        buffer.next(3, timeout_s=0.1)
    assert 0.1 <= time.monotonic() - began < 5


def test_a_failure_of_the_producer_reaches_a_waiting_trainer_at_once(store: ObjectStore) -> None:
    buffer = RolloutBuffer(store)
    failure = RewardError("reward exact failed")
    timer = threading.Timer(0.05, buffer.fail, [failure])
    timer.start()
    with pytest.raises(RewardError) as caught:
        buffer.next(3, timeout_s=60)
    timer.join(10)
    assert caught.value is failure
    buffer.fail(EngineError("what came of it"))
    with pytest.raises(RewardError):
        buffer.take(3, 1)


def test_groups_are_still_stored_after_a_failure(store: ObjectStore, make_group: Make) -> None:
    buffer = RolloutBuffer(store)
    buffer.fail(EngineError("dead"))
    buffer.put(make_group("p0"))
    assert len(RolloutBuffer(store).stored(3, ["p0"])) == 1


def test_malformed_groups_are_refused_by_name(store: ObjectStore, make_group: Make) -> None:
    buffer = RolloutBuffer(store)
    with pytest.raises(StoreError, match=r"group id '\.\./p0'"):
        buffer.put(make_group("../p0"))
    with pytest.raises(StoreError, match="p0 of version 3 has no samples"):
        buffer.put(replace(make_group("p0"), samples=[]))
    group = make_group("p0")
    group.samples[1] = replace(group.samples[1], logprobs=np.zeros(2, np.float32))
    with pytest.raises(StoreError, match="group p0, sample 1: lengths differ"):
        buffer.put(group)
    buffer.expect(3, ["p1"])
    with pytest.raises(StoreError, match="p0 does not belong to iteration 3"):
        buffer.put(make_group("p0"))
    assert store.list("rollouts") == []


def test_compaction_leaves_one_parquet_file_that_pandas_reads(store: ObjectStore, make_group: Make) -> None:
    buffer = RolloutBuffer(store)
    groups = [make_group("p0"), make_group("p1")]
    for group in groups:
        buffer.put(group)
    url = buffer.compact(3, groups, {"p0": [0.75, 0.0], "p1": [-0.25, 0.0]})
    assert store.list("rollouts") == ["rollouts/v000003.parquet"]
    assert url == f"{store.url}/rollouts/v000003.parquet"
    data = io.BytesIO(store.read("rollouts/v000003.parquet"))
    assert pq.read_schema(data).metadata[b"pa.rollouts.schema"] == b"1"
    frame = pd.read_parquet(data)
    assert len(frame) == 4
    row = frame.iloc[0]
    assert (row["group_id"], row["version"], row["response"], row["advantage"]) == ("p0", 3, "it is 7", 0.75)
    assert row["token_ids"].tolist() == [9, 8, 7]
    assert dict(row["rewards"]) == {"exact": 1.0}
    assert frame["reward"].isna().tolist() == [False, True, False, True]
    assert frame["advantage"].isna().tolist() == [False, True, False, True]
    assert frame.groupby("group_id")["reward"].mean().to_dict() == {"p0": 1.0, "p1": 1.0}


def test_compaction_keeps_groups_it_was_not_given(store: ObjectStore, make_group: Make) -> None:
    buffer = RolloutBuffer(store)
    for name in ("p0", "p1"):
        buffer.put(make_group(name))
    buffer.compact(3, [make_group("p0")])
    assert store.list("rollouts") == ["rollouts/v000003.parquet", "rollouts/v000003/p1.arrow"]


def test_forget_after_removes_later_iterations_only(store: ObjectStore, make_group: Make) -> None:
    buffer = RolloutBuffer(store)
    for version in (2, 3, 4):
        buffer.put(make_group("p0", version=version))
    buffer.compact(4, [make_group("p0", version=4)])
    buffer.put(make_group("p1", version=4))
    RolloutBuffer(store).forget_after(2)
    assert store.list("rollouts") == ["rollouts/v000002/p0.arrow"]
