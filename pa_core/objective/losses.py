"""The GRPO objective as sums, so that gradients accumulate over micro-batches and are normalised once, before the step.

Streaming makes this necessary: the token count of an iteration is known only when its last group has arrived. The
gradient of an iteration is (sum of the micro-batches' gradients) / (sum of their denominators):

=============== ================================================= ===================
normalization   numerator                                         denominator
=============== ================================================= ===================
``token``       sum over tokens (DAPO, arXiv 2503.14476, eq. 8)    tokens
``sequence``    sum over samples of their token mean               samples
                (GRPO, arXiv 2402.03300, eq. 3)
``constant``    sum over tokens / max_tokens                       samples
                (Dr. GRPO, arXiv 2503.20783)
=============== ================================================= ===================

What counts. *Samples*: the scored samples of groups with at least two scored ones, an empty response included.
*Tokens*: those of their tokens with loss mask 1. Groups whose rewards are all alike count, although their advantages
are 0; unscored samples, and groups with fewer than two scored samples, do not count.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Literal

import torch
from torch import Tensor

from pa_core.config import ObjectiveConfig

Normalization = Literal["token", "sequence", "constant"]


@dataclass
class MetricSums:
    """Sums over tokens (and one maximum), to be added over micro-batches and divided by ``tokens`` at the end.

    Attributes:
        tokens: trained tokens. samples: samples.
        surrogate: of the clipped surrogate loss. kl: of k3 against the reference. entropy: in nats.
        ratio: of policy / old policy. clipped: tokens whose gradient the clip removes.
        mismatch: of |log-probability of the old policy here - that of the engine|, in nats.
        mismatch_max: largest of them.
    """

    tokens: float = 0.0
    samples: float = 0.0
    surrogate: float = 0.0
    kl: float = 0.0
    entropy: float = 0.0
    ratio: float = 0.0
    clipped: float = 0.0
    mismatch: float = 0.0
    mismatch_max: float = 0.0

    def add(self, other: MetricSums) -> None:
        """Take in another micro-batch."""
        for item in fields(self):
            mine, theirs = getattr(self, item.name), getattr(other, item.name)
            setattr(self, item.name, max(mine, theirs) if item.name == "mismatch_max" else mine + theirs)

    def means(self) -> dict[str, float]:
        """Per-token means (0 without tokens); ``mismatch_max`` as it is."""
        count = max(self.tokens, 1.0)
        names = ("surrogate", "kl", "entropy", "ratio", "clipped", "mismatch")
        return {name: getattr(self, name) / count for name in names} | {"mismatch_max": self.mismatch_max}


@dataclass(frozen=True)
class LossSums:
    """One micro-batch's share of the objective.

    Attributes:
        loss: scalar with gradient: the numerator. denominator: its share of the denominator.
    """

    loss: Tensor
    denominator: float
    metrics: MetricSums = field(default_factory=MetricSums)


def denominator(normalization: Normalization, *, samples: int, tokens: int) -> float:
    """What ``samples`` samples with ``tokens`` trained tokens add to the denominator.

    For groups that :func:`needs_forward` lets skip: they count without being computed.
    """
    return float(tokens if normalization == "token" else samples)


def needs_forward(advantages: Tensor, config: ObjectiveConfig) -> bool:
    """Whether samples with these advantages can have a gradient at all.

    Without KL and entropy terms, the loss is proportional to the advantage: a group whose advantages are all 0 adds
    to the denominator only (:func:`denominator`).
    """
    return config.beta > 0 or config.entropy_coefficient > 0 or bool((advantages != 0).any())


def k3(policy: Tensor, reference: Tensor) -> Tensor:
    """KL(policy || reference) per token by the k3 estimator, exp(Δ) - 1 - Δ with Δ = reference - policy.

    GRPO, arXiv 2402.03300, eq. 4.
    """
    delta = reference - policy
    return torch.expm1(delta) - delta


def clipped_surrogate(policy: Tensor, old: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) per token, r = exp(policy - old).

    GRPO, arXiv 2402.03300, eq. 3; unequal bounds (clip-higher) are DAPO's, arXiv 2503.14476, eq. 10.
    """
    ratio = torch.exp(policy - old)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def grpo_loss(
    policy: Tensor,
    old: Tensor,
    reference: Tensor | None,
    entropy: Tensor,
    *,
    advantages: Tensor,
    engine_logprobs: Tensor,
    sample_index: Tensor,
    sample_tokens: Tensor,
    config: ObjectiveConfig,
    max_tokens: int,
) -> LossSums:
    """Clipped surrogate + beta k3 - entropy_coefficient entropy, summed as ``config.loss_normalization`` says.

    Args:
        policy, old, entropy, advantages, engine_logprobs: ``[T]``; log-probabilities and entropy in nats.
        reference: ``[T]``, needed when ``config.beta`` > 0.
        sample_index: i64[T], each token's sample. sample_tokens: i64[S], tokens per sample.
        max_tokens: the constant of ``constant``: ``sampling.max_tokens``.
    """
    per_token = clipped_surrogate(policy, old, advantages, config.clip_low, config.clip_high)
    metrics = _metrics(policy.detach(), old, entropy.detach(), per_token.detach(), advantages, engine_logprobs, config)
    metrics.samples = float(len(sample_tokens))
    if config.beta > 0:
        if reference is None:
            raise ValueError(f"objective.beta={config.beta} needs the reference's log-probabilities")
        kl = k3(policy, reference)
        per_token = per_token + config.beta * kl
        metrics.kl = float(kl.detach().sum())
    if config.entropy_coefficient > 0:
        per_token = per_token - config.entropy_coefficient * entropy
    if config.loss_normalization == "sequence":
        per_token = per_token / sample_tokens[sample_index]
    loss = per_token.sum()
    if config.loss_normalization == "constant":
        loss = loss / max_tokens
    share = denominator(config.loss_normalization, samples=len(sample_tokens), tokens=len(policy))
    return LossSums(loss, share, metrics)


def _metrics(
    policy: Tensor,
    old: Tensor,
    entropy: Tensor,
    surrogate: Tensor,
    advantages: Tensor,
    engine_logprobs: Tensor,
    config: ObjectiveConfig,
) -> MetricSums:
    ratio = torch.exp(policy - old)
    above = (ratio > 1 + config.clip_high) & (advantages > 0)
    below = (ratio < 1 - config.clip_low) & (advantages < 0)
    # The old policy is the one the engine sampled with.
    mismatch = (old - engine_logprobs).abs()
    return MetricSums(
        tokens=float(len(policy)),
        surrogate=float(surrogate.sum()),
        entropy=float(entropy.sum()),
        ratio=float(ratio.sum()),
        clipped=float((above | below).sum()),
        mismatch=float(mismatch.sum()),
        mismatch_max=float(mismatch.max()) if len(mismatch) else 0.0,
    )
