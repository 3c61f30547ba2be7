"""Adapter versions: what is stored, what a replica gets of it and when, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from pa_core.errors import StoreError
from pa_core.store import shards as shards_module
from pa_core.store.objects import ObjectStore
from pa_core.store.policy import AdapterTable, PolicyReader
from pa_core.store.weights import Manifest, WeightStore

_TARGETS = ("model.layers.0.q", "model.layers.0.mlp.up", "model.layers.10.q")


def _base() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    modules = [*_TARGETS, "model.layers.0.k", "model.layers.1.k", "model.layers.10.k"]
    tensors = {f"{name}.weight": torch.randn(6, 5, generator=generator) for name in modules}
    embedding = torch.randn(50, 5, generator=generator)
    return tensors | {"embed.weight": embedding, "lm_head.weight": embedding}


def _publish_adapter(
    store: ObjectStore, version: int, targets: tuple[str, ...] = _TARGETS, scaling: float = 2.0
) -> Manifest:
    weights = WeightStore(store)
    generator = torch.Generator().manual_seed(version)
    tensors = {}
    for name in targets:
        tensors[f"{name}.A"] = torch.randn(2, 5, generator=generator)
        tensors[f"{name}.B"] = torch.randn(6, 2, generator=generator)
    base = weights.base.publish(0, _base())
    pairs = {f"{name}.weight": (f"{name}.A", f"{name}.B") for name in targets}
    table = AdapterTable(base.weights_sha256, scaling, pairs)
    return weights.publish(version, tensors, {"adapter_config.json": b"{}"}, table)


def _merged(store: ObjectStore, version: int, targets: tuple[str, ...] = _TARGETS) -> dict[str, torch.Tensor]:
    adapter, merged = WeightStore(store).load(version), _base()
    for name in targets:
        merged[f"{name}.weight"] = (
            merged[f"{name}.weight"].double() + 2.0 * adapter[f"{name}.B"].double() @ adapter[f"{name}.A"].double()
        ).float()
    return merged


def _zeros() -> dict[str, torch.Tensor]:
    zeros = {name: torch.zeros_like(tensor) for name, tensor in _base().items()}
    return zeros | {"lm_head.weight": zeros["embed.weight"]}


def test_an_adapter_version_gives_its_tensors_and_a_whole_merged_model(store: ObjectStore) -> None:
    manifest = _publish_adapter(store, 0)
    weights = WeightStore(ObjectStore.open(store.url))
    assert weights.require(0) == manifest and manifest.adapter is not None
    assert weights.load(0).keys() == {f"{name}.{factor}" for name in _TARGETS for factor in "AB"}
    model = _zeros()
    assert weights.load_into(0, model) == manifest
    for name, tensor in _merged(store, 0).items():
        torch.testing.assert_close(model[name], tensor, rtol=1e-6, atol=1e-6)


def test_a_reader_touches_targets_only_after_the_first_version_and_never_drifts(store: ObjectStore) -> None:
    for version in range(3):
        _publish_adapter(store, version)
    model = _zeros()
    reader = PolicyReader(WeightStore(store))
    reader.load_into(0, model)
    first = {name: tensor.clone() for name, tensor in model.items()}
    for name, tensor in model.items():  # what is no target must not be written again
        if name.removesuffix(".weight") not in _TARGETS:
            tensor.fill_(7.0)
    for version in (1, 2, 1, 2, 0):
        reader.load_into(version, model)
        for name in _TARGETS:
            expected = _merged(store, version)[f"{name}.weight"]
            torch.testing.assert_close(model[f"{name}.weight"], expected, rtol=1e-6, atol=1e-6)
    for name, tensor in model.items():
        target = name.removesuffix(".weight") in _TARGETS
        assert torch.equal(tensor, first[name] if target else torch.full_like(tensor, 7.0)), name


def test_whole_layers_come_with_their_targets_where_weights_are_fused(store: ObjectStore) -> None:
    for version in range(2):
        _publish_adapter(store, version)
    reader = PolicyReader(WeightStore(store), whole_layers=True)
    with reader.open(0) as delivery:
        assert delivery.whole and delivery.table.entries.keys() == _base().keys() - {"lm_head.weight"}
    with reader.open(1) as delivery:
        names = {f"model.layers.{name}.weight" for name in ("0.q", "0.k", "0.mlp.up", "10.q", "10.k")}
        assert not delivery.whole and delivery.table.entries.keys() == names
        assert torch.equal(delivery.read("model.layers.0.k.weight"), _base()["model.layers.0.k.weight"])


def test_what_a_model_has_is_unknown_after_a_torn_load_a_full_version_or_other_targets(store: ObjectStore) -> None:
    for version in range(2):
        _publish_adapter(store, version)
    _publish_adapter(store, 2, _TARGETS[:1])
    WeightStore(store).publish(3, _base())
    reader = PolicyReader(WeightStore(store))
    wholes = []
    for version in (0, 1, 2, 1, 1, 3, 1):
        with reader.open(version) as delivery:
            wholes.append(delivery.whole)
    assert wholes == [True, False, True, True, False, True, True]
    with pytest.raises(RuntimeError, match="torn"), reader.open(0):
        raise RuntimeError("torn")
    with reader.open(0) as delivery:
        assert delivery.whole


def test_the_digest_of_an_adapter_stands_for_base_scaling_and_factors(store: ObjectStore) -> None:
    one = _publish_adapter(store, 0)
    other = _publish_adapter(store.child("other"), 0, scaling=3.0)
    assert [file.sha256 for file in one.shards] == [file.sha256 for file in other.shards]
    assert one.weights_sha256 != other.weights_sha256
    with pytest.raises(StoreError, match="already published with other weights"):
        _publish_adapter(store, 0, scaling=3.0)
    tree = json.loads(one.to_json())
    tree["adapter"]["scaling"] = 3.0
    store.publish("weights/v000000/manifest.json", json.dumps(tree).encode(), exclusive=False)
    model = _zeros()
    with pytest.raises(StoreError, match="does not have the digest that it says"):
        WeightStore(store).load_into(0, model)
    assert not any(tensor.any() for tensor in model.values())


@pytest.mark.parametrize("folder", ["base/v000000", "v000000"])
def test_a_damaged_base_or_adapter_is_refused_before_the_first_tensor_is_touched(
    store: ObjectStore, folder: str
) -> None:
    _publish_adapter(store, 0)
    (victim,) = [key for key in store.list(f"weights/{folder}") if key.endswith(".safetensors")]
    content = store.read(victim)
    store.publish(victim, content[:-1] + bytes([content[-1] ^ 1]), exclusive=False)
    model = _zeros()
    with pytest.raises(StoreError, match=f"{folder.rsplit('/', 1)[-1]}.*does not have the sha256"):
        PolicyReader(WeightStore(store)).load_into(0, model)
    assert not any(tensor.any() for tensor in model.values())


def test_the_base_is_fetched_and_hashed_once_per_reader(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for version in range(3):
        _publish_adapter(store, version)
    keys: list[str] = []
    obtain = shards_module._obtain

    def spy(read: ObjectStore, key: str, target: Path) -> tuple[Path, int, str]:
        keys.append(f"{read.url}/{key}")
        return obtain(read, key, target)

    monkeypatch.setattr(shards_module, "_obtain", spy)
    reader = PolicyReader(WeightStore(store))
    model = _zeros()
    for version in (0, 1, 2):
        reader.load_into(version, model)
    assert sum("weights/base" in key for key in keys) == 1
    torch.testing.assert_close(model["model.layers.0.q.weight"], _merged(store, 2)["model.layers.0.q.weight"])


def test_an_adapter_of_a_base_that_was_replaced_is_refused(store: ObjectStore) -> None:
    _publish_adapter(store, 0)
    weights = WeightStore(store)
    weights.base.remove(0)
    weights.base.publish(0, {name: tensor + 1 for name, tensor in _base().items()})
    with pytest.raises(StoreError, match="is an adapter of weights"):
        weights.load_into(0, _zeros())


def test_retention_keeps_the_base(store: ObjectStore) -> None:
    for version in range(3):
        _publish_adapter(store, version)
    weights = WeightStore(store)
    assert weights.retain({2}) == [0, 1]
    assert weights.forget_after(2) == []
    weights.load_into(2, _zeros())
    assert weights.latest() == 2


def test_an_adapter_of_smollms_shapes_is_a_few_percent_of_its_base(tmp_path: Path) -> None:
    hidden, intermediate, rank = 576, 1536, 4
    shapes = {"q": (576, hidden), "k": (192, hidden), "v": (192, hidden), "o": (hidden, 576)}
    shapes |= {"gate": (intermediate, hidden), "up": (intermediate, hidden), "down": (hidden, intermediate)}
    base = {f"layers.0.{name}.weight": torch.ones(shape) for name, shape in shapes.items()}
    store = ObjectStore.open(str(tmp_path))
    weights = WeightStore(store)
    digest = weights.base.publish(0, base).weights_sha256
    pairs = {f"layers.0.{name}.weight": (f"{name}.A", f"{name}.B") for name in shapes}
    for version in range(2):
        tensors = {f"{name}.A": torch.full((rank, shape[1]), float(version)) for name, shape in shapes.items()}
        tensors |= {f"{name}.B": torch.ones(shape[0], rank) for name, shape in shapes.items()}
        weights.publish(version, tensors, {"adapter_config.json": b"{}"}, AdapterTable(digest, 1.0, pairs))

    def size(folder: str) -> int:
        return sum(len(store.read(key)) for key in store.list(f"weights/{folder}"))

    assert size("v000001") < 0.05 * size("base/v000000")
