"""Importance weights for tokens that the engine and the trainer give different probabilities.

The engine sampled with its own arithmetic (another kernel, another precision); so even on-policy the samples are not
quite those of the trainer's old policy. The weight p_old / p_engine makes up for it, bounded, because its variance is
not: truncated importance sampling (TIS: F. Yao et al., 2025, "Your Efficient RL Framework Secretly Brings You
Off-Policy RL Training") or masked (IcePop, arXiv 2510.18855; MIS: J. Liu, Y. Li et al., 2025, "When Speed Kills
Stability").

The weight multiplies the policy-gradient term alone, neither the KL nor the entropy term. A masked token has weight 0
and still counts in the denominator, as in TRL (verl takes it out): so an iteration's denominator depends on its groups
only, not on what was computed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pa_core.objective.config import CorrectionConfig


def mismatch_weight(old: Tensor, engine: Tensor, sample_index: Tensor, samples: int, level: str) -> Tensor:
    """w = exp(old - engine) per token; for ``level`` sequence the product of the sample's tokens, for each of them.

    Args:
        old, engine: ``[T]``, log-probabilities (nats) of the old policy, computed here and by the engine.
        sample_index: i64[T], each token's sample, 0 … samples - 1.
    """
    difference = old - engine
    if level == "sequence":
        total = torch.zeros(samples, dtype=difference.dtype, device=difference.device)
        difference = total.index_add(0, sample_index, difference)[sample_index]
    return difference.exp()


def outside_cap(weight: Tensor, config: CorrectionConfig) -> Tensor:
    """bool[T]: weights that the correction changes: above the cap or, for masks, outside [1 / cap, cap]."""
    above = weight > config.cap
    return above | (weight < 1 / config.cap) if config.kind == "mask" else above


def bounded_weight(weight: Tensor, config: CorrectionConfig) -> Tensor:
    """min(w, cap) for ``truncate``; w inside [1 / cap, cap] and 0 outside for ``mask``."""
    if config.kind == "mask":
        return weight.masked_fill(outside_cap(weight, config), 0.0)
    return weight.clamp(max=config.cap)
