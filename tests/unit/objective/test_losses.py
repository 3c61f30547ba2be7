"""The loss against values computed by hand.

Two samples of 2 and 1 tokens, max_tokens 4. Ratios policy/old: 1.5, 1.0 | 0.5. Advantages 2 | -1. Clip 0.2 / 0.28:
token 1: min(1.5 * 2, 1.28 * 2) = 2.56 -> -2.56, clipped; token 2: -2; token 3: min(-0.5, -0.8) -> 0.8, clipped.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from pa_core.config import ObjectiveConfig
from pa_core.objective.losses import LossSums, MetricSums, denominator, grpo_loss, k3, needs_forward

OLD = torch.tensor([-1.0, -2.0, -0.5])
POLICY = OLD + torch.tensor([1.5, 1.0, 0.5]).log()
REFERENCE = POLICY + torch.tensor([0.0, 1.0, -2.0])
K3 = [0.0, math.e - 2, math.exp(-2) + 1]
ENTROPY = torch.tensor([0.5, 1.0, 2.0])


def _loss(policy: Tensor = POLICY, **settings: Any) -> LossSums:
    config = ObjectiveConfig(**({"clip_high": 0.28} | settings))
    return grpo_loss(
        policy,
        OLD,
        REFERENCE if config.beta else None,
        ENTROPY,
        advantages=torch.tensor([2.0, 2.0, -1.0]),
        engine_logprobs=OLD + torch.tensor([0.0, 0.1, -0.3]),
        sample_index=torch.tensor([0, 0, 1]),
        sample_tokens=torch.tensor([2, 1]),
        config=config,
        max_tokens=4,
    )


@pytest.mark.parametrize(
    ("normalization", "numerator", "share"),
    [("token", -2.56 - 2 + 0.8, 3), ("sequence", (-2.56 - 2) / 2 + 0.8, 2), ("constant", (-2.56 - 2 + 0.8) / 4, 2)],
)
def test_each_normalization_sums_and_counts_as_published(normalization: str, numerator: float, share: int) -> None:
    result = _loss(loss_normalization=normalization)
    assert float(result.loss) == pytest.approx(numerator, rel=1e-6)
    assert result.denominator == share


def test_clip_higher_moves_the_upper_bound_only() -> None:
    assert float(_loss(clip_high=0.2).loss) == pytest.approx(-2.4 - 2 + 0.8, rel=1e-6)
    assert float(_loss(clip_high=0.6).loss) == pytest.approx(-3 - 2 + 0.8, rel=1e-6)
    assert float(_loss(clip_low=0.6).loss) == pytest.approx(-2.56 - 2 + 0.5, rel=1e-6)


@pytest.mark.parametrize(
    ("normalization", "kl"),
    [("token", sum(K3)), ("sequence", (K3[0] + K3[1]) / 2 + K3[2]), ("constant", sum(K3) / 4)],
)
def test_k3_is_added_with_weight_beta_under_the_same_normalization(normalization: str, kl: float) -> None:
    without, with_kl = _loss(loss_normalization=normalization), _loss(loss_normalization=normalization, beta=0.1)
    assert float(with_kl.loss - without.loss) == pytest.approx(0.1 * kl, rel=1e-5)
    assert with_kl.metrics.kl == pytest.approx(sum(K3), rel=1e-6)


def test_k3_is_zero_at_equality_and_never_negative_for_tiny_differences() -> None:
    policy = torch.linspace(-3, -1, 101)
    assert k3(policy, policy).abs().max() == 0
    assert k3(policy, policy + 1e-4).min() >= 0


def test_entropy_is_a_bonus() -> None:
    assert float(_loss(entropy_coefficient=0.2).loss - _loss().loss) == pytest.approx(-0.2 * 3.5, rel=1e-5)


def test_gradient_is_ratio_times_advantage_and_nothing_where_the_clip_acts() -> None:
    policy = POLICY.clone().requires_grad_()
    _loss(policy).loss.backward()
    assert policy.grad is not None
    torch.testing.assert_close(policy.grad, torch.tensor([0.0, -2.0, 0.0]))


def test_metrics_are_sums_over_tokens() -> None:
    metrics = _loss().metrics
    assert (metrics.tokens, metrics.samples, metrics.clipped) == (3, 2, 2)
    assert metrics.ratio == pytest.approx(3.0, rel=1e-6)
    assert metrics.entropy == pytest.approx(3.5)
    assert metrics.surrogate == pytest.approx(-3.76, rel=1e-6)
    assert metrics.mismatch == pytest.approx(0.4, rel=1e-5)
    assert metrics.mismatch_max == pytest.approx(0.3, rel=1e-5)


def test_metrics_of_micro_batches_add_up_to_means_and_a_maximum() -> None:
    total = MetricSums()
    for part in (MetricSums(tokens=1, kl=0.2, mismatch_max=0.5), MetricSums(tokens=3, kl=0.6, mismatch_max=0.1)):
        total.add(part)
    assert total.means()["kl"] == pytest.approx(0.2)
    assert total.means()["mismatch_max"] == 0.5
    assert MetricSums().means()["ratio"] == 0.0


def test_beta_without_a_reference_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"objective\.beta"):
        grpo_loss(
            POLICY, OLD, None, ENTROPY, advantages=POLICY, engine_logprobs=OLD, sample_index=torch.zeros(3).long(),
            sample_tokens=torch.tensor([3]), config=ObjectiveConfig(beta=0.1), max_tokens=4,
        )  # fmt: skip


def test_only_groups_without_any_gradient_may_skip_the_forward() -> None:
    zeros, some = torch.zeros(4), torch.tensor([0.0, 1.0])
    assert not needs_forward(zeros, ObjectiveConfig())
    assert needs_forward(some, ObjectiveConfig())
    assert needs_forward(zeros, ObjectiveConfig(beta=0.01))
    assert needs_forward(zeros, ObjectiveConfig(entropy_coefficient=0.01))


def test_a_skipped_group_still_counts() -> None:
    assert denominator("token", samples=3, tokens=50) == 50
    assert denominator("sequence", samples=3, tokens=50) == denominator("constant", samples=3, tokens=50) == 3
