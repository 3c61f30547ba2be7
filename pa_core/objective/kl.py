"""KL(policy || reference) per token from samples of the policy: the estimators k1, k2, k3 of J. Schulman.

With Δ = policy - reference (log-probabilities of a sampled token, nats):

==== ================= ==================================================================
k1   Δ                 unbiased value, either sign
k2   Δ² / 2            biased value, small variance
k3   exp(-Δ) - 1 + Δ   unbiased value, never negative (GRPO, arXiv 2402.03300, eq. 4)
==== ================= ==================================================================

A good value is not a good gradient. What is minimised should be the reverse KL divergence; on-policy (arXiv 2510.01555
and 2512.21852):

- In the *reward* (a constant to the gradient) k1 is right; k2 and k3 there are biased.
- As a *loss* term k2 is right: its gradient Δ ∇log pi is that of k1 in the reward. k1 has expected gradient 0: it
  regularises nothing. k3, which GRPO published, has (1 - exp(-Δ)) ∇log pi: right to first order in Δ.
- A loss term *weighted* by the importance ratio, r k with gradient through r, is right with k1 and k3 alike, and when
  the policy has moved away from the old one: DeepSeek-V3.2, arXiv 2512.02556, section 3.1; arXiv 2510.01555.
  It is ``use_bias_correction_kl`` in TRL.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Estimator = Literal["k1", "k2", "k3"]

# Beyond this log-ratio exp() would leave float32; verl limits it to the same.
_LOG_RATIO_LIMIT = 20.0


def k1(policy: Tensor, reference: Tensor) -> Tensor:
    """Δ = policy - reference."""
    return policy - reference


def k2(policy: Tensor, reference: Tensor) -> Tensor:
    """Δ² / 2."""
    return (policy - reference).square() / 2


def k3(policy: Tensor, reference: Tensor) -> Tensor:
    """exp(-Δ) - 1 + Δ."""
    delta = reference - policy
    return torch.expm1(delta) - delta


ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}


def kl_estimate(policy: Tensor, reference: Tensor, estimator: Estimator, clamp: float | None = None) -> Tensor:
    """The estimate per token, ``[T]``; with ``clamp`` limited to [-clamp, clamp], without gradient beyond it.

    ``clamp`` 10 is what verl does.
    """
    if clamp is None:
        return ESTIMATORS[estimator](policy, reference)
    delta = (policy - reference).clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT)
    return ESTIMATORS[estimator](delta, torch.zeros_like(delta)).clamp(-clamp, clamp)
