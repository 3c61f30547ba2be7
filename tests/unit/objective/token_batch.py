"""Inputs of the loss: tokens and log-probabilities, as a micro-batch and the models would give them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class TokenBatch:
    """Both sides of the loss's input in one; fields as in ``TokenFields`` and ``Logprobs``."""

    policy: Tensor
    old: Tensor
    reference: Tensor | None
    entropy: Tensor
    advantages: Tensor
    engine_logprobs: Tensor
    sample_index: Tensor
    sample_tokens: Tensor
