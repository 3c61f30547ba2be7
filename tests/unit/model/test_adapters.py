"""LoRA: log-probabilities and gradients against the merged model, one model for three policies, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import peft
import pytest
import torch
from model_truth import gradients, per_sample_logprobs, random_groups, relative, tiny_model
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from pa_core.config import LoraConfig
from pa_core.config_files import parse_config
from pa_core.errors import ConfigError, ModelError
from pa_core.model.adapters import Adapter
from pa_core.model.packing import pack
from pa_core.model.tri_model import TriModel
from pa_core.store.objects import ObjectStore
from pa_core.store.policy import AdapterTable, PolicyReader
from pa_core.store.weights import Manifest, WeightStore

GROUPS = random_groups([(7, (5, 1, 0, 9)), (1, (3, 3)), (23, (2, 11, 4))])


def adapted(kind: str = "llama", targets: object = "all-linear", **model: object) -> tuple[PreTrainedModel, Adapter]:
    """A model with an adapter that changes it visibly."""
    policy = tiny_model(kind, **model)  # type: ignore[arg-type]
    adapter = Adapter(policy, LoraConfig(rank=4, alpha=12, target_modules=targets), seed=0)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(1)
    adapter.load({name: torch.randn(t.shape, generator=generator) * 0.1 for name, t in adapter.tensors().items()})
    return policy, adapter


def published(store: ObjectStore, adapter: Adapter, version: int) -> Manifest:
    weights = WeightStore(store)
    base = weights.base.publish(0, adapter.base_tensors())
    table = AdapterTable(base.weights_sha256, adapter.scaling, adapter.pairs)
    return weights.publish(version, adapter.tensors(), adapter.files(), table)


def merged_model(store: ObjectStore, version: int, kind: str = "llama", **model: object) -> PreTrainedModel:
    """A plain model that has loaded a published adapter version."""
    plain = tiny_model(kind, **model)  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.zero_()
    PolicyReader(WeightStore(store)).load_into(version, plain.state_dict())
    return plain


def weighted(logprobs: Tensor, entropy: Tensor) -> Tensor:
    weights = torch.linspace(-1, 1, len(logprobs))
    return (weights * logprobs).sum() + 0.3 * (weights.flip(0) * entropy).sum()


@pytest.mark.parametrize("way", ["shared_prompt", "per_sample"])
@pytest.mark.parametrize(
    ("kind", "targets"),
    [("llama", "all-linear"), ("qwen2", ["q_proj", "v_proj"]), ("qwen3", ["o_proj", "mlp.up_proj"])],
)
def test_logprobs_and_gradients_are_those_of_the_merged_models_per_sample_forward(
    tmp_path: Path, kind: str, targets: object, way: str
) -> None:
    policy, adapter = adapted(kind, targets)
    store = ObjectStore.open(str(tmp_path))
    published(store, adapter, 1)
    plain = merged_model(store, 1, kind)
    expected, expected_entropy = per_sample_logprobs(plain, GROUPS, temperature=0.7)
    weighted(expected, expected_entropy).backward()
    slopes = gradients(plain)

    tri = TriModel(policy, way, adapter=adapter)  # type: ignore[arg-type]
    ours = tri.logprobs(pack(GROUPS, way), temperature=0.7)  # type: ignore[arg-type]
    weighted(ours.policy, ours.entropy).backward()
    torch.testing.assert_close(ours.policy, expected, rtol=1e-5, atol=1e-5)
    assert relative(ours.entropy, expected_entropy) < 1e-5
    for name, (a, b) in adapter.pairs.items():
        left, right = adapter.parameters[a], adapter.parameters[b]
        assert left.grad is not None and right.grad is not None
        assert relative(left.grad, 3.0 * right.detach().T @ slopes[name]) < 1e-5, a
        assert relative(right.grad, 3.0 * slopes[name] @ left.detach().T) < 1e-5, b


def test_only_the_adapter_gets_gradients_and_only_it_moves() -> None:
    policy, adapter = adapted()
    before = {name: tensor.clone() for name, tensor in adapter.base_tensors().items()}
    assert before.keys() == tiny_model("llama").state_dict().keys()
    tri = TriModel(policy, with_reference=True, with_old=True, adapter=adapter)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2, weight_decay=0.1)
    out = tri.logprobs(pack(GROUPS), 1.0)
    assert out.reference is not None and not out.reference.requires_grad and not out.old.requires_grad
    (out.policy + out.old + out.reference).sum().backward()
    trained = {id(parameter) for parameter in adapter.parameters.values()}
    assert {id(parameter) for parameter in policy.parameters() if parameter.grad is not None} == trained
    optimizer.step()
    assert all(torch.equal(tensor, before[name]) for name, tensor in adapter.base_tensors().items())


def test_reference_and_old_policy_are_the_one_model_in_other_states() -> None:
    initial = per_sample_logprobs(tiny_model("llama"), GROUPS)[0].detach()
    policy, adapter = adapted()
    tri = TriModel(policy, with_reference=True, with_old=True, adapter=adapter)
    assert tri.reference is tri.old is tri.policy
    at_snapshot = tri.logprobs(pack(GROUPS), 1.0).policy.detach()
    tri.snapshot_old()
    adapter.load({name: tensor + 0.05 for name, tensor in adapter.tensors().items()})
    out = tri.logprobs(pack(GROUPS), 1.0)
    assert out.reference is not None
    torch.testing.assert_close(out.reference, initial, rtol=1e-5, atol=1e-5)
    assert torch.equal(out.old, at_snapshot)
    assert float((out.policy - at_snapshot).detach().abs().max()) > 1e-3
    assert all(parameter.requires_grad for parameter in adapter.parameters.values())


def test_a_new_adapter_changes_nothing_and_is_a_function_of_the_seed() -> None:
    config = LoraConfig(rank=2)
    first, again, other = (Adapter(tiny_model("llama"), config, seed).tensors() for seed in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)
    tri = TriModel(policy := tiny_model("llama"), with_reference=True, adapter=Adapter(policy, config, 0))
    out = tri.logprobs(pack(GROUPS), 1.0)
    assert out.reference is not None and torch.equal(out.policy, out.reference)


def test_a_folded_policy_is_the_plain_model_that_replicas_have(tmp_path: Path) -> None:
    policy, adapter = adapted()
    store = ObjectStore.open(str(tmp_path))
    published(store, adapter, 1)
    ours = merged_model(store, 1)
    with PolicyReader(WeightStore(store)).open(1) as delivery:
        adapter.fold(delivery.read)
    folded = policy.state_dict()
    assert folded.keys() == ours.state_dict().keys()
    assert all(torch.equal(folded[name], tensor) for name, tensor in ours.state_dict().items())
    policy.save_pretrained(tmp_path / "whole")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    assert type(again) is type(ours)
    assert all(torch.equal(tensor, folded[name]) for name, tensor in again.state_dict().items())


def test_peft_loads_a_published_adapter_and_merges_it_to_the_same_weights(tmp_path: Path) -> None:
    _, adapter = adapted()
    store = ObjectStore.open(str(tmp_path / "run"))
    manifest = published(store, adapter, 1)
    folder = tmp_path / "run/weights/v000001"
    (folder / manifest.shards[0].name).rename(folder / "adapter_model.safetensors")
    plain = tiny_model("llama")
    theirs = peft.PeftModel.from_pretrained(plain, str(folder)).merge_and_unload().state_dict()
    (folder / "adapter_model.safetensors").rename(folder / manifest.shards[0].name)
    moved = 0.0
    initial = tiny_model("llama").state_dict()
    for name, tensor in merged_model(store, 1).state_dict().items():
        assert float((tensor - theirs[name]).abs().max()) < 1e-6, name
        moved = max(moved, float((tensor - initial[name]).abs().max()))
    assert moved > 0.01


def test_a_bfloat16_base_keeps_its_type_and_float32_factors(tmp_path: Path) -> None:
    policy, adapter = adapted(dtype=torch.bfloat16)
    assert {tensor.dtype for tensor in adapter.tensors().values()} == {torch.float32}
    store = ObjectStore.open(str(tmp_path))
    published(store, adapter, 1)
    plain = merged_model(store, 1, dtype=torch.bfloat16)
    base = adapter.base_tensors()
    for name, (a, b) in adapter.pairs.items():
        exact = base[name].double() + 3.0 * adapter.tensors()[b].double() @ adapter.tensors()[a].double()
        found = plain.state_dict()[name]
        assert found.dtype is torch.bfloat16
        # Rounded once: within half a step of bfloat16's 8 significant bits.
        assert bool(((found.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-6).all()), name
    out = TriModel(policy, adapter=adapter).logprobs(pack(GROUPS), 1.0)
    assert float((out.policy - per_sample_logprobs(plain, GROUPS)[0].float()).detach().abs().mean()) < 0.1


@pytest.mark.parametrize("wrong", ["q_projj", "lm_head", "embed_tokens", "proj"])
def test_a_module_that_cannot_get_an_adapter_is_refused_with_those_that_can(wrong: str) -> None:
    config = LoraConfig(target_modules=["q_proj", wrong])
    with pytest.raises(
        ModelError, match=rf"lora\.target_modules: LlamaForCausalLM.*'{wrong}'.*it has down_proj.*v_proj"
    ):
        Adapter(tiny_model("llama"), config, 0)


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"target_modules": "q_proj"}, r"lora\.target_modules: expected all-linear or a list .* got 'q_proj'"),
        ({"target_modules": []}, r"lora\.target_modules: expected all-linear or a list"),
        ({"rank": 0}, r"lora\.rank: .*greater than or equal to 1 \(got 0\)"),
        ({"dropout": 0.1}, r"lora\.dropout: unknown key; known keys: rank, alpha, target_modules"),
    ],
)
def test_a_wrong_section_is_refused_by_key(lora: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config({"data": {"name": "chain_sum"}, "lora": lora})


def test_a_fabric_is_refused_because_it_sends_whole_models() -> None:
    engine = {"kind": "vllm", "weight_transfer": "nccl"}
    with pytest.raises(ConfigError, match=r"engine\.weight_transfer=nccl .* use engine\.weight_transfer=fsspec"):
        parse_config({"data": {"name": "chain_sum"}, "lora": {}, "engine": engine})
    assert parse_config({"data": {"name": "chain_sum"}, "lora": {}}).lora == LoraConfig()


def test_an_adapter_of_another_shape_is_not_loaded() -> None:
    _, adapter = adapted(targets=["q_proj"])
    _, other = adapted(targets=["q_proj", "v_proj"])
    with pytest.raises(ModelError, match="other tensors than the configured one"):
        adapter.load(other.tensors())


def test_the_exported_config_says_what_peft_needs() -> None:
    _, adapter = adapted(targets=["v_proj", "q_proj"])
    tree = json.loads(adapter.files()["adapter_config.json"])
    assert (tree["peft_type"], tree["r"], tree["lora_alpha"]) == ("LORA", 4, 12)
    assert tree["target_modules"] == ["q_proj", "v_proj"]
