from __future__ import annotations

import hashlib
import json
import threading
from pathlib import Path

import pytest
import safetensors.torch
import torch

from pa_core.errors import StoreError
from pa_core.store import shards as shards_module
from pa_core.store.objects import ObjectStore
from pa_core.store.weights import Manifest, WeightStore


def _tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    embedding = torch.randn(11, 4)
    return {
        "embed.weight": embedding,
        "lm_head.weight": embedding,
        "layer.weight": torch.randn(4, 4),
        "transposed.weight": torch.randn(3, 5).T,
        "half.weight": torch.randn(5).to(torch.bfloat16),
        "scale": torch.tensor(0.5, dtype=torch.float64),
        "mask": torch.tensor([True, False]),
        "empty": torch.zeros(0, 3),
        "steps": torch.arange(3),
    }


def _published(store: ObjectStore, version: int) -> list[str]:
    return store.list(f"weights/v{version:06d}")


def test_every_tensor_is_loaded_bit_for_bit(store: ObjectStore) -> None:
    tensors = _tensors()
    WeightStore(store).publish(0, tensors)
    loaded = WeightStore(ObjectStore.open(store.url)).load(0)
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor), name


def test_files_are_ordinary_safetensors_files(store: ObjectStore) -> None:
    tensors = _tensors()
    manifest = WeightStore(store, shard_bytes=100).publish(0, tensors)
    assert len(manifest.shards) > 1
    read = {}
    for file in manifest.shards:
        read |= safetensors.torch.load(store.read(f"weights/v000000/{file.name}"))
    assert read.keys() == tensors.keys() - {"lm_head.weight"}
    assert all(torch.equal(read[name], tensors[name]) for name in read)


def test_bytes_equal_those_that_the_safetensors_library_writes(store: ObjectStore) -> None:
    tensors = {"b": torch.arange(4.0), "a": torch.ones(3), "half": torch.ones(2, dtype=torch.bfloat16)}
    manifest = WeightStore(store).publish(0, tensors)
    (file,) = manifest.shards
    assert store.read(f"weights/v000000/{file.name}") == safetensors.torch.save(tensors)


def test_the_manifest_has_size_and_sha256_of_every_file(store: ObjectStore) -> None:
    manifest = WeightStore(store, shard_bytes=100).publish(4, _tensors(), {"config.json": b'{"a": 1}'})
    names = {file.name for file in manifest.files}
    assert {key.rsplit("/", 1)[-1] for key in _published(store, 4)} == names | {"manifest.json"}
    for file in manifest.files:
        content = store.read(f"weights/v000004/{file.name}")
        assert (file.size, file.sha256) == (len(content), hashlib.sha256(content).hexdigest())
    assert Manifest.from_json(store.read("weights/v000004/manifest.json")) == manifest


def test_tied_tensors_are_stored_once_and_loaded_as_one(store: ObjectStore) -> None:
    shared = torch.randn(1000)
    weights = WeightStore(store)
    manifest = weights.publish(0, {"embed": shared, "head": shared})
    assert sum(file.size for file in manifest.files) < 1.5 * shared.nbytes
    loaded = weights.load(0)
    assert loaded["embed"].data_ptr() == loaded["head"].data_ptr()
    assert torch.equal(loaded["head"], shared)


def test_equal_tensors_that_are_not_tied_stay_two(store: ObjectStore) -> None:
    weights = WeightStore(store)
    weights.publish(0, {"a": torch.ones(3), "b": torch.ones(3)})
    loaded = weights.load(0)
    assert loaded["a"].data_ptr() != loaded["b"].data_ptr()


def test_publishing_does_not_copy_the_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tensor = torch.randn(1000)
    first = tensor.view(torch.uint8).numpy()
    seen = []
    original = ObjectStore.publish_stream

    def spy(self: ObjectStore, key: str, chunks: object, **options: bool) -> None:
        pieces = list(chunks)  # type: ignore[call-overload]
        seen.extend(piece for piece in pieces if isinstance(piece, memoryview))
        original(self, key, iter(pieces), **options)

    monkeypatch.setattr(ObjectStore, "publish_stream", spy)
    WeightStore(ObjectStore.open(str(tmp_path))).publish(0, {"w": tensor})
    (view,) = seen
    assert view.obj.ctypes.data == first.ctypes.data  # type: ignore[attr-defined]


def test_weights_digest_tells_weights_apart_and_is_equal_for_equal_ones(store: ObjectStore) -> None:
    weights = WeightStore(store)
    digests = [weights.publish(version, _tensors(seed)).weights_sha256 for version, seed in enumerate((0, 0, 1))]
    assert digests[0] == digests[1] != digests[2]


def test_a_version_exists_only_once_its_manifest_does(store: ObjectStore) -> None:
    weights = WeightStore(store)
    weights.publish(0, _tensors())
    assert weights.manifest(1) is None
    for file in weights.require(0).files:
        store.publish(f"weights/v000001/{file.name}", store.read(f"weights/v000000/{file.name}"))
    assert weights.manifest(1) is None
    with pytest.raises(StoreError, match="policy version 1 is not published"):
        weights.load(1)
    assert weights.latest() == 0


def test_the_manifest_is_written_after_every_other_file(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    publish, stream = ObjectStore.publish, ObjectStore.publish_stream

    def spy(self: ObjectStore, key: str, *arguments: object, **options: bool) -> None:
        order.append(key.rsplit("/", 1)[-1])
        publish(self, key, *arguments, **options)  # type: ignore[arg-type]

    def spy_stream(self: ObjectStore, key: str, *arguments: object, **options: bool) -> None:
        order.append(key.rsplit("/", 1)[-1])
        stream(self, key, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(ObjectStore, "publish", spy)
    monkeypatch.setattr(ObjectStore, "publish_stream", spy_stream)
    manifest = WeightStore(store, shard_bytes=100).publish(0, _tensors(), {"config.json": b"{}"})
    names = list(dict.fromkeys(order))
    assert set(names[:-2]) == {file.name for file in manifest.files}
    assert names[-2:] == ["manifest.json", "latest.json"]


def test_publishing_the_same_weights_again_changes_nothing(store: ObjectStore) -> None:
    weights = WeightStore(store)
    first = weights.publish(0, _tensors())
    before = store.list()
    assert weights.publish(0, _tensors()) == first
    assert store.list() == before


def test_publishing_other_weights_as_the_same_version_is_refused(store: ObjectStore) -> None:
    weights = WeightStore(store)
    weights.publish(0, _tensors())
    before = store.list()
    with pytest.raises(StoreError, match="version 0 is already published with other weights"):
        weights.publish(0, _tensors(1))
    assert store.list() == before
    assert torch.equal(weights.load(0)["layer.weight"], _tensors()["layer.weight"])


def test_of_two_publishers_of_one_version_one_wins_whole(tmp_path: Path) -> None:
    store = ObjectStore.open(str(tmp_path))
    start = threading.Barrier(2)
    outcomes: dict[float, str] = {}

    def publish(value: float) -> None:
        tensors = {f"w{index}": torch.full((20_000,), value) for index in range(8)}
        start.wait(10)
        try:
            WeightStore(store).publish(0, tensors)
            outcomes[value] = "won"
        except StoreError as error:
            outcomes[value] = str(error)

    threads = [threading.Thread(target=publish, args=(value,)) for value in (1.0, 2.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    (winner,) = [value for value, outcome in outcomes.items() if outcome == "won"]
    assert all(bool((tensor == winner).all()) for tensor in WeightStore(store).load(0).values())
    kept = {file.name for file in WeightStore(store).require(0).files} | {"manifest.json"}
    assert {key.rsplit("/", 1)[-1] for key in _published(store, 0)} == kept


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_a_damaged_file_is_refused_by_name_and_the_model_left_alone(store: ObjectStore, damage: str) -> None:
    weights = WeightStore(store, shard_bytes=100)
    manifest = weights.publish(0, _tensors())
    victim = f"weights/v000000/{manifest.shards[-1].name}"
    content = bytearray(store.read(victim))
    content[-1] ^= 1
    store.delete(victim)
    if damage != "remove":
        store.publish(victim, bytes(content if damage == "flip" else content[:-1]))
    model = {name: torch.zeros_like(tensor) for name, tensor in _tensors().items()}
    with pytest.raises(StoreError, match=manifest.shards[-1].name):
        weights.load_into(0, model)
    assert all(not tensor.any() for tensor in model.values())
    with pytest.raises(StoreError, match=manifest.shards[-1].name):
        weights.load(0)


def test_what_is_in_a_file_is_never_executed(store: ObjectStore) -> None:
    weights = WeightStore(store)
    manifest = weights.publish(0, {"w": torch.ones(2)})
    name = manifest.shards[0].name
    content = b"\x80\x04cos\nsystem\n(S'exit 1'\ntR."
    store.publish(f"weights/v000000/{name}", content, exclusive=False)
    tree = json.loads(manifest.to_json())
    tree["files"][0] |= {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    store.publish("weights/v000000/manifest.json", json.dumps(tree).encode(), exclusive=False)
    with pytest.raises(StoreError, match="not a safetensors file"):
        weights.load(0)


class _Tied(torch.nn.Module):
    def __init__(self, tie: bool) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(7, 3)
        self.head = torch.nn.Linear(3, 7, bias=False)
        if tie:
            self.head.weight = self.embed.weight


@pytest.mark.parametrize("names", ["state_dict", "named_parameters"])
def test_a_tied_model_is_loaded_in_place_however_its_names_were_collected(store: ObjectStore, names: str) -> None:
    source, target = _Tied(tie=True), _Tied(tie=True)
    address = target.embed.weight.data_ptr()
    weights = WeightStore(store)
    published = weights.publish(5, dict(getattr(source, names)()))
    assert weights.load_into(5, target) == published
    weights.load_into(5, dict(target.named_parameters()))
    assert torch.equal(target.embed.weight, source.embed.weight)
    assert target.head.weight is target.embed.weight
    assert target.embed.weight.data_ptr() == address
    assert target.embed.weight.requires_grad


def test_a_version_of_a_tied_model_fills_both_tensors_of_an_untied_one(store: ObjectStore) -> None:
    source, target = _Tied(tie=True), _Tied(tie=False)
    weights = WeightStore(store)
    weights.publish(0, source.state_dict())
    weights.load_into(0, target)
    assert torch.equal(target.embed.weight, source.embed.weight)
    assert torch.equal(target.head.weight, source.embed.weight)


def test_two_stored_tensors_never_end_in_one(store: ObjectStore) -> None:
    weights = WeightStore(store)
    weights.publish(0, _Tied(tie=False).state_dict())
    target = _Tied(tie=True)
    before = target.embed.weight.clone()
    with pytest.raises(StoreError, match="are one tensor in the model and two there"):
        weights.load_into(0, target)
    assert torch.equal(target.embed.weight, before)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ({"a": torch.zeros(2), "b": torch.zeros(3), "c": torch.zeros(1)}, "c is not in it"),
        ({"a": torch.zeros(2)}, "b is not in the model"),
        ({"a": torch.zeros(2), "b": torch.zeros(4)}, r"b is F32\[3\] there and F32\[4\] in the model"),
        ({"a": torch.zeros(2), "b": torch.zeros(3, dtype=torch.float16)}, r"b is F32\[3\] there and F16\[3\]"),
    ],
)
def test_a_version_that_does_not_fit_is_refused_before_anything_is_copied(
    store: ObjectStore, target: dict[str, torch.Tensor], message: str
) -> None:
    weights = WeightStore(store)
    weights.publish(0, {"a": torch.ones(2), "b": torch.ones(3)})
    with pytest.raises(StoreError, match=message):
        weights.load_into(0, target)
    assert not target["a"].any()


def test_shards_give_every_stored_tensor_once(store: ObjectStore) -> None:
    weights = WeightStore(store, shard_bytes=100)
    weights.publish(0, _tensors())
    names = [name for shard in weights.shards(0) for name in shard]
    assert sorted(names) == sorted(_tensors().keys() - {"lm_head.weight"})


def test_shards_are_about_equally_large_and_two_at_least_once_that_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards_module, "_SPLIT_BYTES", 1000)
    tensors = {f"w{index}": torch.zeros(100) for index in range(10)} | {"big": torch.zeros(500)}
    planned, _ = shards_module.plan_shards(tensors, shard_bytes=1 << 30)
    sizes = [sum(tensor.nbytes for tensor in shard.tensors.values()) for shard in planned]
    assert len(sizes) == 2
    assert max(sizes) - min(sizes) <= 400
    planned, _ = shards_module.plan_shards(tensors, shard_bytes=2000)
    assert len(planned) == 4


def test_a_dtype_that_safetensors_lacks_is_named(store: ObjectStore) -> None:
    with pytest.raises(StoreError, match=r"torch\.complex128"):
        WeightStore(store).publish(0, {"w": torch.zeros(2, dtype=torch.complex128)})
    assert store.list() == []


def test_extra_files_are_verified_too(store: ObjectStore) -> None:
    weights = WeightStore(store)
    weights.publish(0, {"w": torch.ones(2)}, {"config.json": b'{"a": 1}'})
    assert weights.extra(0, "config.json") == b'{"a": 1}'
    with pytest.raises(StoreError, match=r"has no file 'tokenizer\.json'"):
        weights.extra(0, "tokenizer.json")
    store.publish("weights/v000000/config.json", b'{"a": 2}', exclusive=False)
    with pytest.raises(StoreError, match=r"config\.json does not have the sha256"):
        weights.extra(0, "config.json")
    with pytest.raises(ValueError, match="reserved"):
        weights.publish(1, {"w": torch.ones(2)}, {"manifest.json": b"{}"})


def test_retain_keeps_exactly_the_versions_asked_for(store: ObjectStore) -> None:
    weights = WeightStore(store)
    for version in range(5):
        weights.publish(version, {"w": torch.full((2,), float(version))})
    store.publish("weights/v000007/model-00001-of-00001-dead.safetensors", b"left by a crash")
    assert weights.retain({2, 4, 9}) == [0, 1, 3, 7]
    assert {key.split("/")[1] for key in store.list("weights")} == {"v000002", "v000004", "latest.json"}
    assert weights.latest() == 4
    assert torch.equal(weights.load(2)["w"], torch.tensor([2.0, 2.0]))


def test_a_version_loses_its_manifest_before_its_files(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = WeightStore(store)
    weights.publish(0, {"w": torch.ones(2)})
    deleted: list[str] = []
    monkeypatch.setattr(ObjectStore, "delete", lambda _, key: deleted.append(key))
    weights.retain(set())
    assert deleted == ["v000000/manifest.json", "v000000"]


def test_forget_after_makes_an_earlier_version_the_latest(store: ObjectStore) -> None:
    weights = WeightStore(store)
    for version in range(4):
        weights.publish(version, {"w": torch.full((2,), float(version))})
    assert weights.forget_after(1) == [2, 3]
    assert weights.latest() == 1
    weights.publish(2, {"w": torch.full((2,), 20.0)})
    assert weights.latest() == 2
    assert torch.equal(weights.load(2)["w"], torch.tensor([20.0, 20.0]))


def test_latest_finds_a_version_whose_publisher_died_before_the_pointer(store: ObjectStore) -> None:
    weights = WeightStore(store)
    assert weights.latest() is None
    weights.publish(0, {"w": torch.ones(2)})
    weights.publish(1, {"w": torch.ones(2)})
    store.publish("weights/latest.json", b'{"version": 0}', exclusive=False)
    assert weights.latest() == 1
    store.delete("weights/latest.json")
    assert weights.latest() == 1


def test_a_manifest_from_before_adapters_is_read_as_a_full_version(store: ObjectStore) -> None:
    manifest = WeightStore(store).publish(0, _tensors())
    tree = json.loads(manifest.to_json())
    del tree["adapter"]
    assert Manifest.from_json(json.dumps(tree).encode()) == manifest
