"""Importance correction of the engine's mismatch, by hand: two samples of 2 and 1 tokens, cap 2.

Trainer / engine per token: 3, 0.5 | 0.4; per sample: 1.5 | 0.4.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from token_batch import TokenBatch
from torch import Tensor

from pa_core.config import ObjectiveConfig
from pa_core.objective.losses import LossSums, policy_loss

RATIOS = torch.tensor([3.0, 0.5, 0.4])


OLD = torch.tensor([-1.0, -2.0, -0.5])
ENGINE = OLD - RATIOS.log()


def _loss(policy: Tensor = OLD, engine: Tensor = ENGINE, **settings: Any) -> LossSums:
    batch = TokenBatch(
        policy=policy,
        old=OLD,
        reference=torch.tensor([-1.5, -2.0, -0.5]),
        entropy=torch.ones(3),
        advantages=torch.tensor([2.0, 2.0, -1.0]),
        engine_logprobs=engine,
        sample_index=torch.tensor([0, 0, 1]),
        sample_tokens=torch.tensor([2, 1]),
    )
    return policy_loss(batch, batch, ObjectiveConfig(**settings), 4)


@pytest.mark.parametrize(
    ("kind", "level", "weights", "corrected"),
    [
        ("truncate", "token", [2.0, 0.5, 0.4], 1),
        ("truncate", "sequence", [1.5, 1.5, 0.4], 0),
        ("mask", "token", [0.0, 0.5, 0.0], 2),
        ("mask", "sequence", [1.5, 1.5, 0.0], 1),
    ],
)
def test_weights_multiply_the_policy_gradient_and_are_reported(
    kind: str, level: str, weights: list[float], corrected: int
) -> None:
    policy = OLD.clone().requires_grad_()
    result = _loss(policy, correction={"kind": kind, "level": level})
    result.loss.backward()
    assert policy.grad is not None
    expected = [-weight * advantage for weight, advantage in zip(weights, [2.0, 2.0, -1.0], strict=True)]
    assert policy.grad.tolist() == pytest.approx(expected, rel=1e-6)
    assert float(result.loss.detach()) == pytest.approx(sum(expected), rel=1e-6)
    assert result.metrics.weight == pytest.approx(sum(weights), rel=1e-6)
    assert result.metrics.corrected == corrected
    assert result.denominator == 3  # a masked token still counts


def test_without_correction_the_mismatch_is_only_reported() -> None:
    result = _loss()
    assert float(result.loss) == pytest.approx(-3.0)
    assert (result.metrics.weight, result.metrics.corrected) == (3.0, 0.0)
    assert result.metrics.mismatch == pytest.approx(sum(abs(math.log(r)) for r in RATIOS.tolist()), rel=1e-6)


def test_neither_kl_nor_entropy_is_weighted() -> None:
    settings = {"beta": 0.5, "entropy_coefficient": 0.1}
    mask = {"kind": "mask", "cap": 1.01}
    result = _loss(correction=mask, **settings)
    assert result.metrics.corrected == 3
    assert float(result.loss) == pytest.approx(0.5 * (math.exp(-0.5) - 1 + 0.5) - 0.3, rel=1e-5)


def test_a_mismatch_beyond_any_float_is_masked_or_capped() -> None:
    far = OLD - torch.tensor([200.0, 0.0, -200.0])
    for kind, expected in (("truncate", 4.0 + 2.0), ("mask", 2.0)):
        assert float(_loss(engine=far, correction={"kind": kind}).loss) == pytest.approx(-expected)
