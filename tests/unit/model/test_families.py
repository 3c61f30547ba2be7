"""Every family that people train: shared-prompt steps against the library's own forward, one sample at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from model_truth import gradients, per_sample_logprobs, random_groups
from tiny_families import FAMILIES, WINDOW, tiny_family
from torch import Tensor
from torch.nn.attention import flex_attention
from transformers import PreTrainedModel

from pa_core.model import attention, blocks, kernels
from pa_core.model.block_attention import BlockAttention
from pa_core.model.flex import FlexAttention
from pa_core.model.packing import pack
from pa_core.model.tri_model import TriModel

# Prompts and responses below, at and above the window of 8; empty and single-token responses.
GROUPS = random_groups([(5, (4, 1, 0, 12)), (1, (3, 3)), (23, (2, 11, 4, 0)), (8, (8, 9)), (30, (1,)), (3, (25, 6))])
TEMPERATURE = 0.7


def _loss(logprobs: Tensor, entropy: Tensor) -> Tensor:
    """Every token has another weight in both outputs."""
    weights = torch.linspace(-1, 1, len(logprobs), dtype=logprobs.dtype)
    return (weights * logprobs).sum() + 0.3 * (weights.flip(0) * entropy).sum()


def _differences(kind: str, self_check: bool = False) -> tuple[float, float]:
    """Largest difference of log-probabilities (nats), and of any gradient relative to its largest entry."""
    model, reference = tiny_family(kind), tiny_family(kind)
    expected, expected_entropy = per_sample_logprobs(reference, GROUPS, TEMPERATURE)
    _loss(expected, expected_entropy).backward()
    truth = {name: grad.clone() for name, grad in gradients(reference).items()}
    ours = TriModel(model, "shared_prompt", self_check=self_check).logprobs(pack(GROUPS), TEMPERATURE)
    _loss(ours.policy, ours.entropy).backward()
    worst = max(
        float((grad - truth[name]).abs().max() / truth[name].abs().max().clamp_min(1e-30))
        for name, grad in gradients(model).items()
    )
    return float((ours.policy - expected).detach().abs().max()), worst


@pytest.mark.parametrize("kind", FAMILIES)
def test_logprobs_and_all_gradients_equal_the_librarys_own_per_sample_forward(kind: str) -> None:
    logprobs, grads = _differences(kind, self_check=True)
    assert logprobs < 1e-5 and grads < 1e-5, (logprobs, grads)


def _wrong(kind: str, change: Callable[[PreTrainedModel], None] | None = None, **changes: Any) -> float:
    """Largest difference of log-probabilities when our side has another configuration than the truth."""
    model = tiny_family(kind, **changes)
    if change is not None:
        change(model)
    with torch.no_grad():
        expected, _ = per_sample_logprobs(tiny_family(kind), GROUPS, TEMPERATURE)
        ours = TriModel(model, "shared_prompt", self_check=False).logprobs(pack(GROUPS), TEMPERATURE)
    return float((ours.policy - expected).abs().max())


def _no_sinks(model: PreTrainedModel) -> None:
    for name, parameter in model.named_parameters():
        if "sinks" in name:
            parameter.data.fill_(-50.0)


WINDOWED = [kind for kind, peculiar in FAMILIES.items() if "sliding_window" in peculiar]


@pytest.mark.parametrize("kind", WINDOWED)
def test_a_window_off_by_one_would_be_noticed(kind: str) -> None:
    assert _wrong(kind, sliding_window=WINDOW + 1) > 1e-2


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("gemma2", {"attn_logit_softcapping": None}),
        ("gemma2", {"final_logit_softcapping": None}),
        ("gemma3_text", {"query_pre_attn_scalar": 8}),
        ("granite", {"logits_scaling": 1.0}),
        ("granite", {"attention_multiplier": 8**-0.5}),
        ("smollm3", {"no_rope_layers": [1, 1]}),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_a_peculiarity_left_out_would_be_noticed(kind: str, changes: dict[str, Any]) -> None:
    assert _wrong(kind, **changes) > 1e-2


def test_missing_sinks_would_be_noticed() -> None:
    assert _wrong("gpt_oss", _no_sinks) > 1e-2


@pytest.mark.parametrize("kind", ["mistral", "gpt_oss", "gemma2"])
@pytest.mark.parametrize("tile", [1, 3])
def test_windows_cut_into_tiles_smaller_than_them_are_exact(
    monkeypatch: pytest.MonkeyPatch, kind: str, tile: int
) -> None:
    monkeypatch.setattr(blocks, "_SMALLEST_TILE", tile)
    monkeypatch.setattr(blocks, "_LARGE_BLOCK", 64)
    logprobs, grads = _differences(kind)
    assert logprobs < 1e-5 and grads < 1e-5, (logprobs, grads)


@pytest.mark.parametrize("kind", ["gemma2", "gpt_oss"])
def test_plain_matrix_products_over_few_queries_at_a_time_are_exact(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(kernels, "_SCORES", 400)
    monkeypatch.setattr(
        attention, "backend_for", lambda device, dtype, softcap: BlockAttention(kernels.MatmulKernel(softcap))
    )
    logprobs, grads = _differences(kind)
    assert logprobs < 1e-5 and grads < 1e-5, (logprobs, grads)


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_flex_attention_is_exact(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    # On a CPU PyTorch has FlexAttention's backward pass in eager mode only, and offers it to no public caller.
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)
    monkeypatch.setattr(attention, "backend_for", lambda device, dtype, softcap: FlexAttention())
    logprobs, grads = _differences(kind)
    assert logprobs < 1e-5 and grads < 1e-5, (logprobs, grads)
