"""Policy-gradient terms per token, each one formula; minimised, hence the minus signs.

T is the number of trained tokens, S that of samples. ``advantages[T]`` are constants. With one optimizer step per
iteration the ratio is exactly 1, and the gradient of every term here with respect to a token's log-probability is
-A / 1 (of the sequence ratio: -A / the sample's tokens, spread over its tokens): all are REINFORCE then.
"""

from __future__ import annotations

import torch
from torch import Tensor


def token_ratio(policy: Tensor, old: Tensor) -> Tensor:
    """r_t = exp(policy - old), ``[T]``: the importance ratio of PPO, arXiv 1707.06347, section 3."""
    return torch.exp(policy - old)


def sequence_ratio(policy: Tensor, old: Tensor, sample_index: Tensor, sample_tokens: Tensor) -> Tensor:
    """s = exp(mean over the sample's tokens of (policy - old)), repeated for each of its tokens, ``[T]``.

    GSPO, arXiv 2507.18071, eq. 7. Its token variant (eq. 14) has the same value and gradient as long as all tokens of
    a sample share one advantage, which they do here.

    Args:
        sample_index: i64[T], each token's sample. sample_tokens: i64[S], trained tokens per sample.
    """
    log_ratio = policy - old
    total = torch.zeros(len(sample_tokens), dtype=log_ratio.dtype, device=log_ratio.device)
    mean = total.index_add(0, sample_index, log_ratio) / sample_tokens.clamp(min=1)
    return torch.exp(mean)[sample_index]


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, clip_dual: float | None = None
) -> Tensor:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), ``[T]``; with ``clip_dual`` c at most c |A| where A < 0.

    PPO, arXiv 1707.06347, eq. 7; per token of a group: GRPO, arXiv 2402.03300, eq. 3. Unequal bounds (clip-higher):
    DAPO, arXiv 2503.14476, eq. 10. Dual clip, max(min(…), c A) for A < 0, keeps a token that became far more likely
    from an unbounded loss: arXiv 1912.09729.
    """
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    surrogate = torch.minimum(ratio * advantages, clipped * advantages)
    if clip_dual is not None:
        surrogate = torch.where(advantages < 0, torch.maximum(surrogate, clip_dual * advantages), surrogate)
    return -surrogate


def clipped_weight_surrogate(
    policy: Tensor, ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> Tensor:
    """-sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi, ``[T]``: the weight is clipped, no token loses its gradient.

    CISPO: MiniMax-M1, arXiv 2506.13585, eq. 4 and 5. There the lower bound is left open (``clip_low`` 1).
    """
    return -ratio.detach().clamp(1 - clip_low, 1 + clip_high) * advantages * policy


def reinforce_surrogate(policy: Tensor, advantages: Tensor) -> Tensor:
    """-A log pi, ``[T]``: REINFORCE, for samples of the very policy that is trained.

    With advantages over a leave-one-out baseline it is RLOO, arXiv 2402.14740.
    """
    return -advantages * policy


def outside_clip(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, clip_dual: float | None = None
) -> Tensor:
    """bool[T]: where clipping acts against the update: above for A > 0, below (or beyond ``clip_dual``) for A < 0."""
    above = (ratio > 1 + clip_high) & (advantages > 0)
    below = (ratio < 1 - clip_low) & (advantages < 0)
    if clip_dual is None:
        return above | below
    return above | below | ((ratio > clip_dual) & (advantages < 0))
