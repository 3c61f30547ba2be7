"""Shared-prompt and per-sample training steps against Hugging Face's own forward (items: exactness, refusals)."""

from __future__ import annotations

import copy

import pytest
import torch
from model_truth import gradients, per_sample_logprobs, random_groups, relative, tiny_model
from torch import Tensor
from transformers import LlamaForCausalLM

from pa_core.errors import ModelError
from pa_core.model import attention, kernels
from pa_core.model.block_attention import BlockAttention
from pa_core.model.packing import TrainGroup, micro_batches, pack
from pa_core.model.tri_model import TriModel

RAGGED = [(7, (5, 1, 0, 9)), (1, (3, 3)), (23, (2, 11, 4)), (24, (0, 1)), (22, (6,)), (7, (4, 4, 4))]
UNIFORM = [(12, (5, 5, 5, 5)), (12, (5, 5, 5, 5))]
LONG = [(70, (40, 3, 40)), (90, (17,))]


def _weighted(logprobs: Tensor, entropy: Tensor) -> Tensor:
    """A loss that gives every token another weight in both outputs."""
    weights = torch.linspace(-1, 1, len(logprobs), dtype=logprobs.dtype)
    return (weights * logprobs).sum() + 0.3 * (weights.flip(0) * entropy).sum()


def _compare(
    kind: str, groups: list[TrainGroup], way: str, heads: tuple[int, int] = (4, 2), truth: str = "eager"
) -> None:
    model = tiny_model(kind, *heads)
    model.set_attn_implementation(truth)
    expected, expected_entropy = per_sample_logprobs(model, groups, temperature=0.7)
    _weighted(expected, expected_entropy).backward()
    expected_grads = {name: grad.clone() for name, grad in gradients(model).items()}
    model.zero_grad()

    tri = TriModel(model, way, self_check=False)
    ours = tri.logprobs(pack(groups, way), temperature=0.7)
    _weighted(ours.policy, ours.entropy).backward()
    assert relative(ours.policy, expected) < 1e-5
    assert relative(ours.entropy, expected_entropy) < 1e-5
    assert torch.allclose(ours.policy, expected, rtol=1e-5, atol=1e-5)
    for name, grad in gradients(model).items():
        assert relative(grad, expected_grads[name]) < 1e-5, name


@pytest.mark.parametrize("way", ["shared_prompt", "per_sample"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("shapes", [RAGGED, UNIFORM, LONG], ids=["ragged", "uniform", "long"])
def test_logprobs_entropy_and_all_gradients_equal_the_per_sample_forward(
    kind: str, way: str, shapes: list[tuple[int, tuple[int, ...]]]
) -> None:
    _compare(kind, random_groups(shapes), way)


@pytest.mark.parametrize("heads", [(4, 4), (4, 1), (2, 2), (8, 4)])
def test_every_ratio_of_query_to_key_heads_is_exact(heads: tuple[int, int]) -> None:
    _compare("llama", random_groups(RAGGED), "shared_prompt", heads, truth="sdpa")


def test_tokens_that_the_policy_did_not_choose_are_context_only() -> None:
    _compare("qwen3", random_groups(RAGGED, masked=True), "shared_prompt")
    _compare("qwen3", random_groups(RAGGED, masked=True), "per_sample")


def _use(monkeypatch: pytest.MonkeyPatch, kernel: kernels.Kernel) -> None:
    monkeypatch.setattr(attention, "backend_for", lambda device, dtype, softcap: BlockAttention(kernel))


def test_the_matmul_kernel_of_other_devices_is_exact_too(monkeypatch: pytest.MonkeyPatch) -> None:
    _use(monkeypatch, kernels.MatmulKernel())
    _compare("llama", random_groups(RAGGED), "shared_prompt")


def test_blocks_too_large_to_batch_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pa_core.model.blocks._LARGE_BLOCK", 32)
    _compare("llama", random_groups(RAGGED + UNIFORM), "shared_prompt")


@pytest.mark.parametrize("way", ["shared_prompt", "per_sample"])
@pytest.mark.parametrize("budget", [1, 30, 60, 100_000])
def test_micro_batches_down_to_single_responses_give_the_same_gradient(way: str, budget: int) -> None:
    groups = random_groups(RAGGED)
    model = tiny_model("llama")

    def weight(logprobs: Tensor, batch_advantages: Tensor) -> Tensor:
        return (logprobs * batch_advantages).sum()

    advantages = torch.tensor([s.advantage for g in groups for s in g.samples for _ in range(s.tokens)])
    weight(per_sample_logprobs(model, groups)[0], advantages).backward()
    expected = {name: grad.clone() for name, grad in gradients(model).items()}
    model.zero_grad()
    tri = TriModel(model, way, self_check=False)
    batches = tri.micro_batches(groups, budget)
    for batch in batches:
        weight(tri.logprobs(batch, 1.0).policy, batch.advantages).backward()
    assert sum(batch.tokens for batch in batches) == sum(group.tokens for group in groups)
    for name, grad in gradients(model).items():
        assert relative(grad, expected[name]) < 1e-5, name


def test_a_response_does_not_see_its_siblings_or_other_groups() -> None:
    groups = random_groups(RAGGED)
    tri = TriModel(tiny_model("llama"), self_check=False)
    before = tri.logprobs(pack(groups), 1.0).policy.detach()
    changed = copy.deepcopy(groups)
    changed[0].samples[0].token_ids[:] = 3
    after = tri.logprobs(pack(changed), 1.0).policy.detach()
    first = groups[0].samples[0].tokens
    assert torch.equal(before[first:], after[first:])
    assert not torch.allclose(before[:first], after[:first])


def test_attention_keeps_no_scores_for_the_backward_pass() -> None:
    """What a layer saves grows linearly with the prompt: less than 2.2 times as much for twice the length."""

    def saved(prompt_length: int) -> int:
        model = tiny_model("llama")
        tri = TriModel(model, self_check=False)
        kept = 0

        def count(tensor: Tensor) -> Tensor:
            nonlocal kept
            kept += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            tri.logprobs(pack(random_groups([(prompt_length, (8, 8, 8, 8))])), 1.0)
        return kept

    assert saved(1600) < 2.2 * saved(800)


def test_the_self_check_accepts_exact_attention() -> None:
    for way in ("shared_prompt", "per_sample"):
        difference = TriModel(tiny_model("qwen3"), way).self_check_difference
        assert difference is not None and difference < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("broken", ["sees_future", "no_prompt", "prompt_shifted"])
def test_the_self_check_refuses_broken_attention(
    monkeypatch: pytest.MonkeyPatch, broken: str, dtype: torch.dtype
) -> None:
    class Broken(kernels.CpuFlashKernel):
        def forward(self, q, k, v, causal, mask, scale):  # type: ignore[no-untyped-def]
            if broken == "sees_future" and causal:
                causal = False
            out, lse = super().forward(q, k, v, causal, mask, scale)
            if not causal and broken == "no_prompt":
                lse = lse - 50
            if not causal and broken == "prompt_shifted":
                out = out.roll(1, dims=2)
            return out, lse

    _use(monkeypatch, Broken())
    with pytest.raises(ModelError, match=r"model\.attention=per_sample"):
        TriModel(tiny_model("llama", dtype=dtype))


def test_the_self_check_refuses_a_model_whose_head_is_not_its_last_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    class Scaled(LlamaForCausalLM):
        def forward(self, *args, **kwargs):  # type: ignore[no-untyped-def]
            output = super().forward(*args, **kwargs)
            output.logits = output.logits * 2
            return output

    model = tiny_model("llama")
    model.__class__ = Scaled
    with pytest.raises(ModelError, match=r"per_sample.*between its last hidden state and its logits"):
        TriModel(model, "per_sample")


def test_an_attention_keyword_of_a_newer_model_is_refused() -> None:
    layout = pack(random_groups([(3, (2,))])).layout
    q = torch.zeros(1, 1, 4, 8)
    with pytest.raises(ModelError, match=r"novelty.*set model\.attention=per_sample"):
        attention.shared_prompt_attention(torch.nn.Module(), q, q, q, None, shared_prompt=layout, novelty=q)


def test_a_group_above_the_budget_is_split_by_responses() -> None:
    (group,) = random_groups([(10, (6, 6, 6, 6))])
    parts = micro_batches([group], 22)
    assert [[len(part.samples) for part in batch] for batch in parts] == [[2], [2]]
