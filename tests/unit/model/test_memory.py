"""What the trainer's memory does not grow with, as torch's allocator counts it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from model_truth import gradients, per_sample_logprobs, random_groups, tiny_model
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from pa_core.config import LoraConfig
from pa_core.config_files import parse_config
from pa_core.errors import ConfigError, ModelError
from pa_core.model import logprobs
from pa_core.model.adapters import Adapter
from pa_core.model.packing import Attention, PackedBatch, TrainGroup, TrainSample, pack
from pa_core.model.tri_model import TriModel


def growth(work: Callable[[], object]) -> int:
    """Bytes of tensors that were alive at most while ``work`` ran, beyond those before it: torch's own account."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        work()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(itertools.accumulate(changes))


def _model(vocabulary: int, layers: int, width: int) -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=16,
        intermediate_size=width,
        num_hidden_layers=layers,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=8192,
    )
    return LlamaForCausalLM(config)


def _batch(tokens: int, vocabulary: int) -> PackedBatch:
    """A group of 16 responses, ``tokens`` together."""
    generator = np.random.default_rng(0)

    def sample() -> TrainSample:
        length = tokens // 16
        ids = generator.integers(0, vocabulary, length, dtype=np.int32)
        return TrainSample(ids, np.zeros(length, np.float32), np.ones(length, np.bool_), 1.0)

    prompt = generator.integers(0, vocabulary, 4, dtype=np.int32)
    return pack([TrainGroup("g", prompt, tuple(sample() for _ in range(16)))])


def _step(tri: TriModel, batch: PackedBatch) -> None:
    tri.policy.zero_grad()
    out = tri.logprobs(batch, 1.0)
    (out.policy.sum() + out.entropy.sum()).backward()


def test_the_heads_memory_does_not_grow_with_tokens_times_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "_CHUNK_BYTES", 4 << 20)
    vocabulary, few, many = 4000, 1024, 3072
    tri = TriModel(_model(vocabulary, layers=1, width=16), self_check=False)
    batches = {tokens: _batch(tokens, vocabulary) for tokens in (few, many)}
    logits = (many - few) * vocabulary * 4
    grown = {tokens: growth(lambda batch=batch: _step(tri, batch)) for tokens, batch in batches.items()}
    assert grown[many] - grown[few] < 0.2 * logits
    # What would be counted if all logits were held at once, if only for a moment:
    monkeypatch.setattr(logprobs, "_CHUNK_BYTES", 1 << 40)
    assert growth(lambda: _step(tri, batches[many])) - grown[few] > 0.8 * logits


def test_activation_checkpointing_keeps_no_layers_activations() -> None:
    layers, width, tokens = 10, 256, 2048
    batch = _batch(tokens, 64)
    plain, checkpointed = (
        TriModel(_model(64, layers, width), self_check=False, activation_checkpointing=on) for on in (False, True)
    )
    kept = layers * 3 * tokens * width * 4  # gate, up and their product, of every layer
    assert growth(lambda: _step(plain, batch)) > 0.8 * kept
    assert growth(lambda: _step(checkpointed, batch)) < 0.4 * kept


@pytest.mark.parametrize("attention", ["shared_prompt", "per_sample"])
def test_activation_checkpointing_changes_neither_values_nor_gradients(attention: Attention) -> None:
    groups = random_groups([(6, (3, 4, 0)), (9, (5, 1))])

    def computed(activation_checkpointing: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        model = tiny_model("llama")
        model.config.attention_dropout = 0.9  # as a model might have it; evaluation mode has none
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.9
        tri = TriModel(model, attention, activation_checkpointing=activation_checkpointing)
        out = tri.logprobs(pack(groups, attention), 1.0)
        (out.policy.sum() + 0.1 * out.entropy.sum()).backward()
        return out.policy.detach(), gradients(model)

    (values, grads), (truth, true_grads) = computed(True), computed(False)
    torch.testing.assert_close(values, per_sample_logprobs(tiny_model("llama"), groups)[0].detach())
    torch.testing.assert_close(values, truth, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(grads, true_grads, rtol=1e-5, atol=1e-6)


def test_an_adapter_gets_its_gradient_through_checkpointed_frozen_layers() -> None:
    groups = random_groups([(6, (3, 4)), (9, (5, 1))])

    def gradient(activation_checkpointing: bool) -> dict[str, torch.Tensor | None]:
        model = tiny_model("llama")
        adapter = Adapter(model, LoraConfig(rank=2, target_modules=["q_proj"]), seed=0)
        for tensor in adapter.parameters.values():
            torch.nn.init.constant_(tensor, 0.1)
        tri = TriModel(
            model,
            with_reference=True,
            with_old=True,
            adapter=adapter,
            activation_checkpointing=activation_checkpointing,
        )
        out = tri.logprobs(pack(groups), 1.0)
        assert out.reference is not None
        (out.policy - out.reference).exp().sum().backward()
        return {name: parameter.grad for name, parameter in adapter.parameters.items()}

    found, truth = gradient(True), gradient(False)
    assert all(grad is not None and float(grad.abs().max()) > 0 for grad in truth.values())
    torch.testing.assert_close(found, truth, rtol=1e-5, atol=1e-6)


def test_a_model_whose_layers_cannot_be_computed_again_is_refused() -> None:
    model = tiny_model("llama")
    model.supports_gradient_checkpointing = False
    with pytest.raises(
        ModelError, match=r"trainer\.activation_checkpointing=true: LlamaForCausalLM .* set it to false"
    ):
        TriModel(model, activation_checkpointing=True)


def test_a_bfloat16_reference_is_the_librarys_bfloat16_model_at_half_the_memory(tmp_path: Path) -> None:
    groups = random_groups([(200, (20, 20)), (9, (5, 1))])
    policy = tiny_model("llama")
    policy.save_pretrained(tmp_path)
    library = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    tri = TriModel(policy, with_reference=True, with_old=True, reference_dtype=torch.bfloat16)
    assert tri.reference is not None and tri.old is not None

    def size(model: PreTrainedModel) -> int:
        return sum(parameter.nbytes for parameter in model.parameters())

    assert size(tri.reference) * 2 == size(policy) == size(tri.old)
    buffers = dict(tri.reference.named_buffers())
    for name, frequencies in policy.named_buffers():  # rounded, they would turn positions
        assert torch.equal(buffers[name], frequencies), name
    out = tri.logprobs(pack(groups), 1.0)
    assert out.reference is not None and torch.equal(out.old, out.policy)
    with torch.no_grad():
        truth = per_sample_logprobs(library, groups)[0]
    assert float((out.reference - truth).abs().mean()) < 0.05


def test_a_reference_type_of_its_own_is_refused_with_lora() -> None:
    tree = {"data": {"name": "chain_sum"}, "lora": {"rank": 4}, "model": {"reference_dtype": "bfloat16"}}
    with pytest.raises(ConfigError, match=r"model\.reference_dtype=bfloat16: with lora .* remove"):
        parse_config(tree)
