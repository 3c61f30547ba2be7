"""Policy, old policy and reference."""

from __future__ import annotations

from pathlib import Path

import torch
from model_truth import per_sample_logprobs, random_groups, tiny_model
from transformers import AutoModelForCausalLM

from pa_core.model.packing import pack
from pa_core.model.tri_model import TriModel

GROUPS = random_groups([(6, (3, 4, 0)), (9, (5, 1))])


def _shift(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.ones_like(parameter))


def test_with_one_step_per_iteration_the_old_policy_is_the_policy_itself() -> None:
    tri = TriModel(tiny_model("llama"))
    out = tri.logprobs(pack(GROUPS), 1.0)
    assert torch.equal(out.old, out.policy) and not out.old.requires_grad and out.policy.requires_grad
    assert out.reference is None and tri.old is None and tri.reference is None


def test_the_reference_stays_the_initial_policy() -> None:
    initial = per_sample_logprobs(tiny_model("llama"), GROUPS)[0].detach()
    tri = TriModel(tiny_model("llama"), with_reference=True)
    _shift(tri.policy)
    tri.snapshot_old()
    out = tri.logprobs(pack(GROUPS), 1.0)
    assert out.reference is not None and torch.allclose(out.reference, initial, atol=1e-5)
    assert not torch.allclose(out.policy, initial, atol=1e-3)
    assert not out.reference.requires_grad


def test_the_old_policy_is_the_policy_at_the_last_snapshot() -> None:
    tri = TriModel(tiny_model("llama"), with_old=True)
    _shift(tri.policy)
    tri.snapshot_old()
    at_snapshot = tri.logprobs(pack(GROUPS), 1.0).policy.detach()
    _shift(tri.policy)
    out = tri.logprobs(pack(GROUPS), 1.0)
    assert torch.equal(out.old, at_snapshot)
    assert not torch.allclose(out.policy, at_snapshot, atol=1e-3)


def test_only_the_policy_gets_gradients() -> None:
    tri = TriModel(tiny_model("llama"), with_old=True, with_reference=True)
    out = tri.logprobs(pack(GROUPS), 1.0)
    assert out.reference is not None
    (out.policy + out.old + out.reference + out.entropy).sum().backward()
    assert all(parameter.grad is not None for parameter in tri.policy.parameters())
    for frozen in (tri.old, tri.reference):
        assert frozen is not None and all(parameter.grad is None for parameter in frozen.parameters())


def test_logprobs_of_a_batch_without_a_single_trained_token_are_empty_and_differentiable() -> None:
    tri = TriModel(tiny_model("llama"), self_check=False)
    out = tri.logprobs(pack(random_groups([(4, (0, 0))])), 1.0)
    assert out.policy.shape == (0,)
    out.policy.sum().backward()


def test_a_bfloat16_model_is_served() -> None:
    tri = TriModel(tiny_model("llama", dtype=torch.bfloat16))
    out = tri.logprobs(pack(GROUPS), 1.0)
    truth = per_sample_logprobs(tiny_model("llama"), GROUPS)[0]
    assert out.policy.dtype is torch.float32
    assert float((out.policy - truth).detach().abs().mean()) < 0.1


def test_a_trained_model_is_saved_as_a_plain_one(tmp_path: Path) -> None:
    tri = TriModel(tiny_model("llama"))
    tri.policy.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config._attn_implementation == "sdpa"
    ours = tri.logprobs(pack(GROUPS), 1.0).policy
    torch.testing.assert_close(per_sample_logprobs(again, GROUPS)[0], ours, rtol=1e-5, atol=1e-5)


def test_a_model_can_change_from_shared_prompt_to_per_sample() -> None:
    model = tiny_model("llama")
    shared = TriModel(model, "shared_prompt").logprobs(pack(GROUPS), 1.0).policy
    single = TriModel(model, "per_sample").logprobs(pack(GROUPS, "per_sample"), 1.0).policy
    torch.testing.assert_close(shared, single, rtol=1e-5, atol=1e-5)
