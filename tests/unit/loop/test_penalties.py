"""The KL penalty in the reward and masked truncated responses, through the learner, against Hugging Face's forward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from pa_core.config_files import parse_config
from pa_core.loop.learner import Learner
from pa_core.loop.penalties import response_kl
from pa_core.model.loading import load_policy
from pa_core.records import Group, Prompt, Sample

BETA = 0.5


def _group(name: str, rewards: list[float | None], seed: int) -> Group:
    random = np.random.default_rng(seed)
    samples = []
    for length, reward in zip((4, 0, 6, 5), rewards, strict=True):
        mask = np.ones(length, dtype=np.uint8)
        mask[1:2] = 0
        ids = random.integers(5, 200, length).astype(np.int32)
        samples.append(Sample(ids, np.full(length, -5, np.float32), [(0, length)], mask, "stop", reward=reward))
    prompt = Prompt(name, 0, "q", random.integers(5, 200, 7).astype(np.int32), "a")
    return Group(prompt, samples, 0, "r0")


def _learner(tiny_model: Path, objective: dict[str, Any], **changes: Any) -> Learner:
    """A learner whose policy has moved away from its reference."""
    tree = {
        "prompts_per_iteration": 2,
        "group_size": 4,
        "model": {"path": str(tiny_model)},
        "data": {"name": "chain_sum"},
        "optimizer": {"learning_rate": 1e-2, "eps": 1e-2},
        "trainer": {"micro_batch_tokens": 16},
        "objective": objective,
        **changes,
    }
    config = parse_config(tree)
    learner = Learner(config, load_policy(config.model).model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in learner.tri.policy.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    learner.begin_iteration()
    return learner


def _logprobs(model: Any, group: Group, sample: Sample) -> Tensor:
    """Log-probabilities of the sample's trained tokens by the model's own forward."""
    ids = torch.tensor([*group.prompt.token_ids.tolist(), *sample.token_ids.tolist()])
    with torch.no_grad():
        logprobs = model(input_ids=ids.unsqueeze(0)).logits[0].log_softmax(-1)
    rows = torch.from_numpy(np.flatnonzero(sample.loss_mask)) + len(group.prompt.token_ids) - 1
    return logprobs[rows].gather(1, ids[rows + 1].unsqueeze(1)).squeeze(1)


def _kl(learner: Learner, tiny_model: Path, group: Group) -> Tensor:
    """k1 of each response, f32[K]."""
    policy, reference = (AutoModelForCausalLM.from_pretrained(tiny_model) for _ in range(2))
    policy.load_state_dict(learner.tri.policy.state_dict())
    return torch.stack([(_logprobs(policy, group, s) - _logprobs(reference, group, s)).sum() for s in group.samples])


def test_the_kl_of_a_response_is_the_sum_over_its_trained_tokens(tiny_model: Path) -> None:
    learner = _learner(tiny_model, {"beta": BETA, "kl": {"placement": "reward"}})
    group = _group("g", [1.0, 0.0, None, 0.5], 3)
    truth = _kl(learner, tiny_model, group)
    truth[2] = 0.0
    assert truth.abs().max() > 0.01
    torch.testing.assert_close(response_kl(group, learner.tri, learner.config), truth, rtol=1e-4, atol=1e-5)


def test_kl_in_the_reward_makes_the_advantages_and_gives_even_equal_rewards_a_gradient(tiny_model: Path) -> None:
    objective = {"beta": BETA, "kl": {"placement": "reward"}, "advantage": "dr_grpo"}
    learner = _learner(tiny_model, objective)
    group = _group("g", [1.0, 1.0, 1.0, 1.0], 3)
    penalty = BETA * _kl(learner, tiny_model, group)
    learner.accumulate([group])
    assert learner.advantages["g"] == pytest.approx((penalty.mean() - penalty).tolist(), abs=1e-4)
    assert any(p.grad is not None and p.grad.abs().max() > 0 for p in learner.tri.policy.parameters())
    assert learner.metrics()["train/kl"] != 0.0


@pytest.mark.parametrize(
    "objective",
    [
        {"beta": BETA, "kl": {"placement": "reward"}},
        {"loss": "gspo", "clip_low": 0.2, "clip_high": 0.2, "correction": {"kind": "truncate", "level": "sequence"}},
        {"loss": "cispo", "beta": BETA, "kl": {"estimator": "k2"}, "correction": {"kind": "mask", "cap": 1e4}},
    ],
    ids=["kl in reward", "gspo", "cispo"],
)
def test_objectives_stream(tiny_model: Path, objective: dict[str, Any]) -> None:
    optimizer = {"learning_rate": 1e-2, "eps": 1e-2, "steps_per_iteration": 2}
    together, streamed = (_learner(tiny_model, objective, optimizer=optimizer) for _ in range(2))
    halves = [
        [_group("a", [1.0, 0.0, None, 0.5], 3), _group("b", [0.0, 0.0, 1.0, 0.25], 4)],
        [_group("c", [1.0, 1.0, 1.0, 1.0], 5), _group("d", [0.5, 0.0, 1.0, 0.25], 6)],
    ]
    for groups in halves:  # one optimizer step each: in the second the ratio is not 1
        together.accumulate(groups)
        for group in reversed(groups):
            streamed.accumulate([group])
        for learner in (together, streamed):
            learner.step()
    assert streamed.advantages["d"] == pytest.approx(together.advantages["d"], abs=1e-4)
    for name, value in together.weights().items():
        torch.testing.assert_close(streamed.weights()[name], value, rtol=1e-4, atol=1e-6)


def _weights_after(tiny_model: Path, group: Group, **objective: Any) -> dict[str, Tensor]:
    learner = _learner(tiny_model, objective)
    learner.accumulate([group])
    learner.step()
    return {name: value.clone() for name, value in learner.weights().items()}


def _same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return all(torch.equal(left[name], value) for name, value in right.items())


def test_a_truncated_response_gives_no_gradient_but_its_reward_counts(tiny_model: Path) -> None:
    def cut(reward: float, token: int) -> Group:
        group = _group("g", [1.0, 0.0, reward, 0.5], 3)
        group.samples[2].finish_reason = "length"
        group.samples[2].token_ids[3] = token
        return group

    masked = _weights_after(tiny_model, cut(0.0, 9), mask_truncated=True)
    assert _same(masked, _weights_after(tiny_model, cut(0.0, 99), mask_truncated=True))
    assert not _same(masked, _weights_after(tiny_model, cut(1.0, 9), mask_truncated=True))
    assert not _same(masked, _weights_after(tiny_model, cut(0.0, 9)))


def test_a_group_of_truncated_responses_only_counts_and_computes_nothing(tiny_model: Path) -> None:
    group = _group("g", [1.0, 0.0, 0.25, 0.5], 3)
    for sample in group.samples:
        sample.finish_reason = "length"
    learner = _learner(tiny_model, {"mask_truncated": True, "loss_normalization": "sequence"})
    other = _learner(tiny_model, {"mask_truncated": True, "loss_normalization": "sequence"})
    trained = _group("h", [1.0, 0.0, 0.25, 0.5], 4)
    learner.accumulate([group, trained])
    other.accumulate([trained])
    for each in (learner, other):
        each.step()
    # Twice the samples in the denominator: half the gradient.
    assert learner.metrics()["train/grad_norm"] == pytest.approx(other.metrics()["train/grad_norm"] / 2, rel=1e-5)


def test_the_correction_is_reported(tiny_model: Path) -> None:
    learner = _learner(tiny_model, {"correction": {"kind": "mask", "cap": 1.5}})
    group = _group("g", [1.0, 0.0, 0.25, 0.5], 3)
    learner.accumulate([group])
    metrics = learner.metrics()
    assert 0 < metrics["train/corrected_share"] <= 1  # the engine's log-probabilities above are made up
    assert metrics["train/correction_weight"] < 1.5
