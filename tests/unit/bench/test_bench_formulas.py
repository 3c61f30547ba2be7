"""FLOP formulas against PyTorch's own count, and pairs of attention against counting them one by one."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, MixtralConfig, PretrainedConfig, Qwen3Config
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from pa_core.bench.flops import GroupWork, ModelShape, flop_ratio, per_sample_work, shared_work, token_ratio
from pa_core.errors import ModelError

SIZES = {"vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3}
SMOLLM2 = LlamaConfig(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
)


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2),
        Qwen3Config(**SIZES, num_attention_heads=4, num_key_value_heads=1, head_dim=20),
    ],
    ids=["llama", "qwen3"],
)
def test_formulas_agree_with_counted_operations(config: PretrainedConfig) -> None:
    length = 32
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    ids = torch.randint(0, config.vocab_size, (1, length))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids).logits.sum().backward()
    counted = {str(name): flops for name, flops in counter.get_flop_counts()["Global"].items()}
    # Eager attention computes the whole square of scores, and the model the head at every position.
    expected = GroupWork(tokens=length, trained=length, pairs=length**2).flops(ModelShape.of(config))
    assert counted["aten.mm"] == expected["body"] + expected["head"]
    # The rotation's frequencies are a batched product as well, of next to nothing.
    assert counted["aten.bmm"] == pytest.approx(expected["attention"], rel=0.01)


def test_work_counts_every_computed_token_and_pair() -> None:
    group_size, prompt, response = 3, 5, 4
    # Each computed token attends to what precedes it in its own sample, and to itself; the last one is not computed.
    per_sample = [position + 1 for _ in range(group_size) for position in range(prompt + response - 1)]
    shared = [position + 1 for position in range(prompt)] + [
        prompt + position + 1 for _ in range(group_size) for position in range(response - 1)
    ]
    assert per_sample_work(group_size, prompt, response) == GroupWork(len(per_sample), 12, sum(per_sample))
    assert shared_work(group_size, prompt, response) == GroupWork(len(shared), 12, sum(shared))


def test_ratios_at_the_usual_point() -> None:
    assert token_ratio(16, 1024, 64) == pytest.approx(8.5)
    assert token_ratio(8, 16_000, 64) == pytest.approx(7.78, abs=0.01)
    assert flop_ratio(ModelShape.of(SMOLLM2), 16, 1024, 64) == pytest.approx(7.35, abs=0.01)


def test_experts_have_no_formula() -> None:
    with pytest.raises(ModelError, match="mixtral"):
        ModelShape.of(MixtralConfig(**SIZES))
