"""The loss against values computed by hand.

Two samples of 2 and 1 tokens, max_tokens 4. Ratios policy/old: 1.5, 1.0 | 0.5. Advantages 2 | -1. Clip 0.2 / 0.28:
token 1: min(1.5 * 2, 1.28 * 2) = 2.56 -> -2.56, clipped; token 2: -2; token 3: min(-0.5, -0.8) -> 0.8, clipped.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from token_batch import TokenBatch

from pa_core.config import ObjectiveConfig
from pa_core.objective.losses import LossSums, denominator, needs_forward, policy_loss
from pa_core.objective.metrics import MetricSums

OLD = torch.tensor([-1.0, -2.0, -0.5])
POLICY = OLD + torch.tensor([1.5, 1.0, 0.5]).log()
REFERENCE = POLICY + torch.tensor([0.0, 1.0, -2.0])
K3 = [0.0, math.e - 2, math.exp(-2) + 1]


def _batch(**changes: Any) -> TokenBatch:
    given: dict[str, Any] = {
        "policy": POLICY,
        "old": OLD,
        "reference": REFERENCE,
        "entropy": torch.tensor([0.5, 1.0, 2.0]),
        "advantages": torch.tensor([2.0, 2.0, -1.0]),
        "engine_logprobs": OLD + torch.tensor([0.0, 0.1, -0.3]),
        "sample_index": torch.tensor([0, 0, 1]),
        "sample_tokens": torch.tensor([2, 1]),
    }
    return TokenBatch(**(given | changes))


def _loss(batch: TokenBatch | None = None, **settings: Any) -> LossSums:
    config = ObjectiveConfig(**({"clip_high": 0.28} | settings))
    batch = batch or _batch()
    return policy_loss(batch, batch, config, 4)


def _gradient(batch: TokenBatch, **settings: Any) -> list[float]:
    """Gradient with respect to the policy's log-probabilities."""
    policy = batch.policy.clone().requires_grad_()
    _loss(replace(batch, policy=policy), **settings).loss.backward()
    assert policy.grad is not None
    return policy.grad.tolist()


@pytest.mark.parametrize(
    ("normalization", "numerator", "share"),
    [
        ("token", -2.56 - 2 + 0.8, 3),
        ("sequence", (-2.56 - 2) / 2 + 0.8, 2),
        ("sequence_sum", -2.56 - 2 + 0.8, 2),
        ("constant", (-2.56 - 2 + 0.8) / 4, 2),
    ],
)
def test_each_normalization_sums_and_counts_as_published(normalization: str, numerator: float, share: int) -> None:
    result = _loss(loss_normalization=normalization)
    assert float(result.loss) == pytest.approx(numerator, rel=1e-6)
    assert result.denominator == share


def test_clip_higher_moves_the_upper_bound_only() -> None:
    assert float(_loss(clip_high=0.2).loss) == pytest.approx(-2.4 - 2 + 0.8, rel=1e-6)
    assert float(_loss(clip_high=0.6).loss) == pytest.approx(-3 - 2 + 0.8, rel=1e-6)
    assert float(_loss(clip_low=0.6).loss) == pytest.approx(-2.56 - 2 + 0.5, rel=1e-6)


def test_gradient_is_ratio_times_advantage_and_nothing_where_the_clip_acts() -> None:
    assert _gradient(_batch()) == pytest.approx([0.0, -2.0, 0.0])


def test_dual_clip_bounds_the_loss_of_a_bad_token_that_became_likely() -> None:
    # Ratios 5 for A = 2 and A = -1: the first is clipped at 1.28 anyway, the second counts 5 without, 3 with dual clip.
    batch = _batch(policy=OLD + math.log(5.0), advantages=torch.tensor([2.0, 2.0, -1.0]))
    assert float(_loss(batch).loss) == pytest.approx(-2.56 * 2 + 5, rel=1e-6)
    result = _loss(batch, clip_dual=3.0)
    assert float(result.loss) == pytest.approx(-2.56 * 2 + 3, rel=1e-6)
    assert _gradient(batch, clip_dual=3.0) == [0.0, 0.0, 0.0]
    assert result.metrics.clipped == 3
    assert float(_loss(clip_dual=3.0).loss) == float(_loss().loss)


def test_gspo_clips_the_geometric_mean_of_a_responses_ratios() -> None:
    # s = sqrt(1.5 * 1) = 1.2247 -> 1.2 of A = 2; s = 0.5 -> 0.8 of A = -1. Mean over responses.
    result = _loss(loss="gspo", clip_low=0.2, clip_high=0.2)
    assert float(result.loss) == pytest.approx(-2.4 + 0.8, rel=1e-6)
    assert (result.denominator, result.metrics.clipped) == (2, 3)
    # Unclipped: -s A, whose gradient is spread evenly over the response's tokens: s A / 2 each.
    wide = {"loss": "gspo", "clip_low": 0.9, "clip_high": 0.9}
    assert float(_loss(**wide).loss) == pytest.approx(-2 * math.sqrt(1.5) + 0.5, rel=1e-6)
    assert _gradient(_batch(), **wide) == pytest.approx([-math.sqrt(1.5), -math.sqrt(1.5), 0.5], rel=1e-6)


def test_cispo_clips_the_weight_and_keeps_every_gradient() -> None:
    # Weights min(r, 1.28) = 1.28, 1, 0.5, detached; loss -weight A log pi.
    result = _loss(loss="cispo")
    expected = -(1.28 * 2 * POLICY[0] + 2 * POLICY[1] - 0.5 * POLICY[2])
    assert float(result.loss) == pytest.approx(float(expected), rel=1e-6)
    assert _gradient(_batch(), loss="cispo") == pytest.approx([-2.56, -2.0, 0.5], rel=1e-6)
    assert result.metrics.clipped == 1


def test_reinforce_is_the_log_probability_of_the_whole_response() -> None:
    result = _loss(loss="reinforce")
    assert float(result.loss) == pytest.approx(float(-(2 * (POLICY[0] + POLICY[1]) - POLICY[2])), rel=1e-6)
    assert result.denominator == 2
    assert _gradient(_batch(), loss="reinforce") == [-2.0, -2.0, 1.0]
    assert result.metrics.clipped == 0


@pytest.mark.parametrize(("normalization", "shares"), [("token", [1, 1, 1]), ("sequence", [0.5, 0.5, 1])])
@pytest.mark.parametrize("loss", ["grpo", "gspo", "cispo", "reinforce"])
def test_with_one_step_every_loss_has_the_policy_gradient(loss: str, normalization: str, shares: list[float]) -> None:
    expected = [-advantage * share for advantage, share in zip([2.0, 2.0, -1.0], shares, strict=True)]
    batch = _batch(policy=OLD, old=OLD)
    assert _gradient(batch, loss=loss, loss_normalization=normalization) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("normalization", "kl"),
    [
        ("token", sum(K3)),
        ("sequence", (K3[0] + K3[1]) / 2 + K3[2]),
        ("sequence_sum", sum(K3)),
        ("constant", sum(K3) / 4),
    ],
)
def test_kl_is_added_with_weight_beta_under_the_same_normalization(normalization: str, kl: float) -> None:
    without, with_kl = _loss(loss_normalization=normalization), _loss(loss_normalization=normalization, beta=0.1)
    assert float(with_kl.loss - without.loss) == pytest.approx(0.1 * kl, rel=1e-5)
    assert with_kl.metrics.kl == pytest.approx(sum(K3), rel=1e-6)


def test_kl_in_the_reward_is_no_term_of_the_loss_but_still_reported() -> None:
    result = _loss(beta=0.1, kl={"placement": "reward"})
    assert float(result.loss) == float(_loss().loss)
    assert result.metrics.kl == pytest.approx(-1.0 + 2.0)  # k1: policy - reference


def test_weighted_kl_has_a_gradient_through_the_ratio() -> None:
    # Zero advantages leave beta r k3: value r k3, gradient r (k3 + 1 - exp(reference - policy)).
    batch = _batch(advantages=torch.zeros(3))
    kl = {"weighted": True}
    expected = [1.5 * 0.0, math.e - 2, 0.5 * (math.exp(-2) + 1)]
    assert float(_loss(batch, beta=1.0, kl=kl).loss) == pytest.approx(sum(expected), rel=1e-6)
    slope = [0.0, (math.e - 2) + 1 - math.e, 0.5 * (math.exp(-2) + 1 + 1 - math.exp(-2))]
    assert _gradient(batch, beta=1.0, kl=kl) == pytest.approx(slope, rel=1e-6)


def test_entropy_is_a_bonus() -> None:
    assert float(_loss(entropy_coefficient=0.2).loss - _loss().loss) == pytest.approx(-0.2 * 3.5, rel=1e-5)


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
        _loss(_batch(reference=None), beta=0.1)


@pytest.mark.parametrize("loss", ["grpo", "gspo", "cispo", "reinforce"])
def test_a_group_may_skip_the_forward_only_if_it_has_no_gradient(loss: str) -> None:
    zeros, some = torch.zeros(3), torch.tensor([0.0, 0.0, 1.0])
    silent: list[dict[str, Any]] = [
        {},
        {"correction": {"kind": "truncate"}},
        {"beta": 0.1, "kl": {"placement": "reward"}},
    ]
    for settings in silent:
        assert not needs_forward(zeros, ObjectiveConfig(loss=loss, **settings))
        assert needs_forward(some, ObjectiveConfig(loss=loss, **settings))
        assert _gradient(_batch(advantages=zeros), loss=loss, **settings) == [0.0, 0.0, 0.0]
    for settings in ({"beta": 0.1}, {"entropy_coefficient": 0.01}):
        assert needs_forward(zeros, ObjectiveConfig(loss=loss, **settings))


def test_a_skipped_group_still_counts() -> None:
    assert denominator("token", samples=3, tokens=50) == 50
    for normalization in ("sequence", "sequence_sum", "constant"):
        assert denominator(normalization, samples=3, tokens=50) == 3
