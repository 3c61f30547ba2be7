"""Which attention a model gets, and what is said about it: families, models that carry state, rotary embeddings."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from model_truth import per_sample_logprobs, random_groups, tiny_model
from tiny_families import tiny_family
from transformers import (
    FalconH1Config,
    FalconH1ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    Lfm2Config,
    Lfm2ForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    Mamba2Config,
    Mamba2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from pa_core.errors import ModelError
from pa_core.model.packing import pack
from pa_core.model.tri_model import TriModel

SHORT = [(5, (4, 1, 0, 6)), (9, (2, 3))]
SMALL = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
MAMBA = {"state_size": 4, "num_heads": 8, "head_dim": 8, "n_groups": 1, "expand": 2}


def _stateful(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    if name == "mamba":
        return MambaForCausalLM(MambaConfig(**SMALL, state_size=4))
    if name == "mamba2":
        return Mamba2ForCausalLM(Mamba2Config(**{**SMALL, **MAMBA}))
    if name == "falcon_h1":
        hybrid = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_chunk_size": 8}
        return FalconH1ForCausalLM(FalconH1Config(**SMALL, **hybrid, lm_head_multiplier=0.5))
    if name == "lfm2":
        return Lfm2ForCausalLM(Lfm2Config(**SMALL, full_attn_idxs=[1]))
    layers = {"layer_types": ["linear_attention", "full_attention"], "shared_expert_intermediate_size": 16}
    return Qwen3NextForCausalLM(Qwen3NextConfig(**SMALL, **EXPERTS, **LINEAR, **layers))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("mamba", r"mixer\.conv1d|linear_attention"),
        ("mamba2", r"mixer\.conv1d|linear_attention"),
        ("falcon_h1", r"hybrid|mamba"),
        ("lfm2", "conv"),
        ("qwen3_next", "linear_attention"),
    ],
)
def test_a_model_that_carries_state_is_refused_by_name_of_what_carries_it(name: str, reason: str) -> None:
    with pytest.raises(ModelError, match=rf"({reason}).*state from token to token.*set model\.attention=per_sample"):
        TriModel(_stateful(name), "shared_prompt")


@pytest.mark.parametrize("name", ["mamba", "falcon_h1", "qwen3_next"])
def test_a_model_that_carries_state_trains_sample_by_sample(name: str) -> None:
    model = _stateful(name).eval()
    groups = random_groups(SHORT)
    expected, _ = per_sample_logprobs(model, groups, 0.7)
    tri = TriModel(model, "auto")
    assert tri.attention == "per_sample"
    batches = tri.micro_batches(groups, 10_000)
    assert len(batches) == 1, "padded, so that a sample's state would show the padding"
    torch.testing.assert_close(tri.logprobs(batches[0], 0.7).policy, expected, rtol=1e-4, atol=1e-5)


def test_auto_shares_prompts_where_it_can_and_says_with_what(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pa_core")
    assert TriModel(tiny_family("gemma2"), "auto").attention == "shared_prompt"
    assert [record.message for record in caplog.records] == ["attention: shared prompt, kernel matmul"]
    caplog.clear()
    assert TriModel(tiny_model("llama"), "auto").attention == "shared_prompt"
    assert [record.message for record in caplog.records] == ["attention: shared prompt, kernel cpu-flash"]


def _gpt2() -> PreTrainedModel:
    config = GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2, n_positions=128, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config)


def test_auto_trains_other_models_sample_by_sample_and_warns_once_why(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pa_core")
    assert TriModel(_gpt2(), "auto").attention == "per_sample"
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "'gpt2'" in warnings[0]
    assert caplog.records[-1].message == "attention: per sample, kernel sdpa"


def test_an_untested_model_type_is_refused() -> None:
    with pytest.raises(ModelError, match=r"'gpt2'.*set model\.attention=per_sample"):
        TriModel(_gpt2(), "shared_prompt")


def test_chunked_attention_is_refused() -> None:
    config = Llama4TextConfig(**SMALL, intermediate_size_mlp=32, num_local_experts=2, attention_chunk_size=16)
    with pytest.raises(ModelError, match=r"(chunked_attention|attention_chunk_size).*set model\.attention=per_sample"):
        TriModel(Llama4ForCausalLM(config), "shared_prompt")


def test_auto_falls_back_when_the_self_check_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("pa_core.model.layout.PromptLayout.reach", lambda layout, window: None)  # forgets the window
        with pytest.raises(ModelError, match=r"differ from its own forward.*set model\.attention=per_sample"):
            TriModel(tiny_family("mistral"), "shared_prompt")
        tri = TriModel(tiny_family("mistral"), "auto")
    assert tri.attention == "per_sample"
    assert any("differ from its own forward" in record.message for record in caplog.records)


ORIGINAL = 24


def _phi3_long() -> PreTrainedModel:
    factors = {"short_factor": [1.0, 1.2, 1.5, 2.0], "long_factor": [1.0, 3.0, 6.0, 9.0]}
    rope: dict[str, Any] = {"rope_type": "longrope", "rope_theta": 100.0, **factors}
    return tiny_family(
        "phi3",
        rope_parameters={**rope, "original_max_position_embeddings": ORIGINAL},
        sliding_window=None,
        original_max_position_embeddings=ORIGINAL,
    )


@pytest.mark.parametrize("way", ["shared_prompt", "per_sample"])
def test_longrope_is_exact_on_both_sides_of_the_original_context(way: str) -> None:
    """Samples of one group on both sides: no micro-batch holds both, and each side has the library's frequencies."""
    # The library counts a sample's last token, of which nothing is predicted: no sample has just one too many.
    groups = random_groups([(10, (5, 30, 2)), (20, (3, 20)), (30, (4, 7)), (3, (4,))])
    model = _phi3_long()
    expected = {}
    for group in groups:
        for sample in group.samples:
            single = type(group)(group.id, group.prompt_ids, (sample,))
            expected[sample.token_ids.tobytes()] = per_sample_logprobs(model, [single])[0].detach()
    tri = TriModel(model, way)  # type: ignore[arg-type]
    compared = 0
    for batch in tri.micro_batches(groups, 10_000):
        ours = tri.logprobs(batch, 1.0).policy.detach()
        for number in range(batch.samples):
            of_sample = batch.sample_index == number
            key = batch.targets[of_sample].numpy().astype("int32").tobytes()
            torch.testing.assert_close(ours[of_sample], expected[key], rtol=1e-5, atol=1e-5)
            compared += 1
    assert compared == sum(len(group.samples) for group in groups)


def test_longrope_never_mixes_both_sides_in_a_batch() -> None:
    tri = TriModel(_phi3_long(), "shared_prompt", self_check=False)
    with pytest.raises(ModelError, match=r"of 39 tokens .* 24 tokens .*longrope.* one of 14 tokens"):
        tri.logprobs(pack(random_groups([(10, (5, 30))])), 1.0)


def test_dynamic_rotary_frequencies_are_exact_within_the_original_context_only() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    tri = TriModel(tiny_family("llama", rope_parameters=rope, max_position_embeddings=ORIGINAL), "shared_prompt")
    groups = random_groups(SHORT)
    expected, _ = per_sample_logprobs(tiny_family("llama", rope_parameters=rope), groups)
    torch.testing.assert_close(tri.logprobs(pack(groups), 1.0).policy, expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(ModelError, match=r"29 tokens is beyond the 24 tokens.*'dynamic'.*sampling\.max_tokens"):
        tri.logprobs(pack(random_groups([(10, (20,))])), 1.0)
