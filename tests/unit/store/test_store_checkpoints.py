from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from pa_core.errors import StoreError
from pa_core.store.checkpoints import Checkpoint, CheckpointStore
from pa_core.store.dcp import load_tensors, save_tensors
from pa_core.store.ledger import Ledger
from pa_core.store.objects import ObjectStore
from pa_core.store.shards import StoredFile
from pa_core.store.weights import WeightStore


def _publish(store: ObjectStore, *versions: int) -> WeightStore:
    weights = WeightStore(store)
    for version in versions:
        weights.publish(version, {"w": torch.full((4,), float(version))})
    return weights


def _tensors() -> dict[str, torch.Tensor]:
    return {
        "w/exp_avg": torch.randn(4, 3),
        "w/step": torch.tensor(3.0),
        "none": torch.empty(0),
        "rng": torch.get_rng_state(),
    }


def _writing(tensors: dict[str, torch.Tensor]) -> Callable[[str, str], list[StoredFile]]:
    return lambda url, folder: save_tensors(ObjectStore.open(url), folder, tensors)


def _optimizer() -> Callable[[str, str], list[StoredFile]]:
    return _writing(_tensors())


def _loaded(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    def empty(_: str, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    return load_tensors(ObjectStore.open(checkpoint.url), checkpoint.folder, checkpoint.files, empty)


def test_a_checkpoint_gives_back_tensors_and_state_exactly(store: ObjectStore) -> None:
    _publish(store, 2)
    tensors = _tensors()
    state = {"steps": 3, "cursor": {"epoch": 1, "index": [1, 2]}, "rate": 0.1 + 0.2, "none": None}
    CheckpointStore(store).save(2, _writing(tensors), state)
    again = CheckpointStore(ObjectStore.open(store.url))
    assert again.latest() == 2
    found = again.load(2)
    loaded = _loaded(found)
    assert found.state == state
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)


def test_optimizer_tensors_that_share_memory_come_back_independent(store: ObjectStore) -> None:
    _publish(store, 0)
    step = torch.tensor(1.0)
    CheckpointStore(store).save(0, _writing({"a/step": step, "b/step": step}), {})
    loaded = _loaded(CheckpointStore(store).load(0))
    loaded["a/step"] += 1
    assert loaded["b/step"] == 1


def test_a_checkpoint_needs_published_weights(store: ObjectStore) -> None:
    with pytest.raises(StoreError, match="policy version 2 is not published"):
        CheckpointStore(store).save(2, _optimizer(), {})
    assert CheckpointStore(store).latest() is None


def test_weights_are_referred_to_and_not_copied(store: ObjectStore) -> None:
    weights = _publish(store, 1)
    checkpoints = CheckpointStore(store)
    checkpoints.save(1, _writing({"w/step": torch.tensor(1.0)}), {})
    assert not any(b"exp" in store.read(key) for key in store.list("checkpoints"))
    weights.remove(1)
    weights.publish(1, {"w": torch.full((4,), 9.0)})
    with pytest.raises(StoreError, match="the weights of version 1 are not those of its checkpoint"):
        checkpoints.load(1)
    weights.remove(1)
    with pytest.raises(StoreError, match="policy version 1 is not published"):
        checkpoints.load(1)


@pytest.mark.parametrize("fails_at", ["optimizer-", "state.json", "manifest.json"])
def test_a_save_that_fails_leaves_the_earlier_checkpoint_in_force(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch, fails_at: str
) -> None:
    _publish(store, 1, 2)
    checkpoints = CheckpointStore(store)
    checkpoints.save(1, _optimizer(), {"steps": 1})

    def failing(method: Callable[..., None]) -> Callable[..., None]:
        def fail(self: ObjectStore, key: str, *arguments: object, **options: bool) -> None:
            if f"v000002/{fails_at}" in key:
                raise StoreError("no space")
            method(self, key, *arguments, **options)

        return fail

    with monkeypatch.context() as patched:
        patched.setattr(ObjectStore, "publish", failing(ObjectStore.publish))
        patched.setattr(ObjectStore, "publish_stream", failing(ObjectStore.publish_stream))
        with pytest.raises(StoreError, match="no space"):
            checkpoints.save(2, _optimizer(), {"steps": 2})
    assert checkpoints.latest() == 1
    assert checkpoints.load(1).state == {"steps": 1}
    assert store.list("checkpoints/v000002", unfinished=True) == []
    checkpoints.save(2, _optimizer(), {"steps": 2})
    assert checkpoints.versions() == [2, 1]


def test_what_a_crash_left_is_cleared_and_never_loaded(store: ObjectStore) -> None:
    _publish(store, 1, 2, 3)
    checkpoints = CheckpointStore(store)
    checkpoints.save(1, _optimizer(), {})
    store.publish("checkpoints/latest.json", b"[2, 1]", exclusive=False)
    store.publish("checkpoints/v000002/optimizer-00001-of-00001.safetensors", b"torn")
    assert checkpoints.latest() == 1
    with pytest.raises(StoreError, match="there is no checkpoint of version 2"):
        checkpoints.load(2)
    checkpoints.save(3, _optimizer(), {})
    assert checkpoints.versions() == [3, 1]
    assert store.list("checkpoints/v000002") == []


def test_a_damaged_checkpoint_is_refused(store: ObjectStore) -> None:
    _publish(store, 1)
    checkpoints = CheckpointStore(store)
    checkpoints.save(1, _optimizer(), {"steps": 1})
    store.publish("checkpoints/v000001/state.json", b'{"steps": 2}', exclusive=False)
    with pytest.raises(StoreError, match=r"v000001/state\.json does not have the sha256"):
        checkpoints.load(1)


def test_a_damaged_tensor_file_is_refused(store: ObjectStore) -> None:
    _publish(store, 1)
    CheckpointStore(store).save(1, _optimizer(), {})
    found = CheckpointStore(store).load(1)
    file = next(file.name for file in found.files if file.name.endswith(".safetensors"))
    key = f"checkpoints/v000001/{file}"
    content = bytearray(store.read(key))
    content[-1] ^= 1
    store.publish(key, bytes(content), exclusive=False)
    with pytest.raises(StoreError, match=rf"v000001/{file} does not have the sha256"):
        _loaded(found)


def test_no_file_of_a_checkpoint_is_a_pickle(store: ObjectStore) -> None:
    """Invariant 6: nothing read from the store is unpickled."""
    _publish(store, 1)
    CheckpointStore(store).save(1, _optimizer(), {"steps": 1})
    kinds = {key.rsplit(".", 1)[-1] for key in store.list("checkpoints")}
    assert kinds == {"json", "safetensors"}
    assert not any(store.read(key).startswith((b"\x80", b"PK")) for key in store.list("checkpoints"))


def test_the_same_checkpoint_twice_is_kept_and_one_of_other_weights_replaced(store: ObjectStore) -> None:
    weights = _publish(store, 1)
    checkpoints = CheckpointStore(store)
    checkpoints.save(1, _optimizer(), {"steps": 1})
    checkpoints.save(1, _optimizer(), {"steps": 1})
    weights.remove(1)
    weights.publish(1, {"w": torch.zeros(4)})
    checkpoints.save(1, _optimizer(), {"steps": 5})
    assert checkpoints.load(1).state == {"steps": 5}
    assert checkpoints.versions() == [1]


def test_retain_keeps_the_newest(store: ObjectStore) -> None:
    _publish(store, 1, 2, 3)
    checkpoints = CheckpointStore(store)
    for version in (1, 2, 3):
        checkpoints.save(version, _optimizer(), {})
    assert checkpoints.retain(2) == [3, 2]
    assert checkpoints.versions() == [3, 2]
    assert store.list("checkpoints/v000001") == []
    assert checkpoints.retain(5) == [3, 2]


def test_state_that_json_cannot_hold_is_refused_before_anything_is_written(store: ObjectStore) -> None:
    _publish(store, 1)
    with pytest.raises(TypeError):
        CheckpointStore(store).save(1, _optimizer(), {"tensor": torch.ones(1)})
    assert store.list("checkpoints") == []


def test_the_ledger_remembers_what_an_iteration_consumed(store: ObjectStore) -> None:
    Ledger(store).write(3, ["p1", "p0"], {"tokens": 12, "loss": math.pi})
    entry = Ledger(store).read(3)
    assert entry is not None
    assert (entry.version, entry.group_ids, entry.facts) == (3, ("p0", "p1"), {"tokens": 12, "loss": math.pi})
    assert Ledger(store).read(4) is None


def test_invariant_3_a_group_cannot_be_consumed_twice_in_an_iteration(store: ObjectStore) -> None:
    with pytest.raises(StoreError, match="iteration 3 would consume groups twice: p1"):
        Ledger(store).write(3, ["p1", "p0", "p1"])
    assert Ledger(store).read(3) is None


def test_invariant_3_the_ledger_accepts_a_repetition_and_refuses_another_truth(store: ObjectStore) -> None:
    ledger = Ledger(store)
    first = ledger.write(3, ["p0", "p1"], {"attempt": 1})
    assert ledger.write(3, ["p1", "p0"], {"attempt": 2}) == first
    with pytest.raises(StoreError, match="iteration 3 is recorded with other groups"):
        ledger.write(3, ["p0", "p2"])


def test_the_ledger_forgets_iterations_that_will_be_done_anew(store: ObjectStore) -> None:
    ledger = Ledger(store)
    for version in (2, 3, 4):
        ledger.write(version, ["p0"])
    ledger.forget_after(3)
    assert [ledger.read(version) is not None for version in (2, 3, 4)] == [True, True, False]
    ledger.write(4, ["p9"])
