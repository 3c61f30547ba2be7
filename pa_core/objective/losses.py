"""The objective as sums, so that gradients accumulate over micro-batches and are normalised once, before the step.

Streaming makes this necessary: the token count of an iteration is known only when its last group has arrived. The
gradient of an iteration is (sum of the micro-batches' gradients) / (sum of their denominators):

================ ================================================= ===================
normalization    numerator                                         denominator
================ ================================================= ===================
``token``        sum over tokens (DAPO, arXiv 2503.14476, eq. 8)    tokens
``sequence``     sum over samples of their token mean               samples
                 (GRPO, arXiv 2402.03300, eq. 3; GSPO)
``sequence_sum`` sum over tokens (RLOO, arXiv 2402.14740:           samples
                 log pi of a whole response)
``constant``     sum over tokens / max_tokens                       samples
                 (Dr. GRPO, arXiv 2503.20783)
================ ================================================= ===================

What counts. *Samples*: the scored samples of groups with at least two scored ones, an empty response included.
*Tokens*: those of their tokens with loss mask 1. Groups whose rewards are all alike count, although their advantages
are 0; unscored samples, and groups with fewer than two scored samples, do not count.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from pa_core.objective import surrogates
from pa_core.objective.config import Normalization, ObjectiveConfig
from pa_core.objective.correction import bounded_weight, mismatch_weight, outside_cap
from pa_core.objective.kl import kl_estimate
from pa_core.objective.metrics import MetricSums


class TokenFields(Protocol):
    """What the loss takes from a micro-batch of T trained tokens from S samples; samples are always whole."""

    @property
    def advantages(self) -> Tensor:
        """f32[T], each token's sample's advantage."""

    @property
    def engine_logprobs(self) -> Tensor:
        """f32[T], log-probabilities (nats) at sampling."""

    @property
    def sample_index(self) -> Tensor:
        """i64[T], each token's sample, 0 … S-1."""

    @property
    def sample_tokens(self) -> Tensor:
        """i64[S], trained tokens per sample."""


class Logprobs(Protocol):
    """What the loss takes from the models: log-probabilities (nats) of the T tokens."""

    @property
    def policy(self) -> Tensor:
        """f32[T], with gradient."""

    @property
    def old(self) -> Tensor:
        """f32[T], without."""

    @property
    def reference(self) -> Tensor | None:
        """f32[T], without; None when there is no reference."""

    @property
    def entropy(self) -> Tensor:
        """f32[T], entropy of the policy's distributions, with gradient."""


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

    Every policy-gradient term is proportional to the advantage. Without a KL or entropy term in the loss, a group whose
    advantages are all 0 adds to the denominator only (:func:`denominator`).
    """
    return config.kl_in_loss or config.entropy_coefficient > 0 or bool((advantages != 0).any())


def policy_loss(batch: TokenFields, logprobs: Logprobs, config: ObjectiveConfig, max_tokens: int) -> LossSums:
    """weight x surrogate + beta KL - entropy_coefficient entropy, summed as ``config.loss_normalization`` says.

    Args:
        max_tokens: the constant of ``constant``: ``sampling.max_tokens``.

    Raises:
        ValueError: beta > 0 without the reference's log-probabilities.
    """
    ratio = _ratio(batch, logprobs, config)
    surrogate = _surrogate(batch, logprobs, ratio, config)
    metrics = _metrics(batch, logprobs, ratio.detach(), surrogate.detach(), config)
    per_token = _corrected(surrogate, batch, logprobs, config, metrics)
    if config.beta > 0:
        kl = _kl(logprobs, config)
        metrics.kl = float(kl.detach().sum())
        if config.kl_in_loss:
            per_token = per_token + config.beta * kl
    if config.entropy_coefficient > 0:
        per_token = per_token - config.entropy_coefficient * logprobs.entropy
    if config.loss_normalization == "sequence":
        per_token = per_token / batch.sample_tokens[batch.sample_index]
    loss = per_token.sum()
    if config.loss_normalization == "constant":
        loss = loss / max_tokens
    share = denominator(config.loss_normalization, samples=len(batch.sample_tokens), tokens=len(logprobs.policy))
    return LossSums(loss, share, metrics)


def _ratio(batch: TokenFields, logprobs: Logprobs, config: ObjectiveConfig) -> Tensor:
    """Policy / old policy as the chosen loss has it, ``[T]``."""
    if config.loss == "gspo":
        return surrogates.sequence_ratio(logprobs.policy, logprobs.old, batch.sample_index, batch.sample_tokens)
    return surrogates.token_ratio(logprobs.policy, logprobs.old)


def _surrogate(batch: TokenFields, logprobs: Logprobs, ratio: Tensor, config: ObjectiveConfig) -> Tensor:
    """The chosen policy-gradient term, ``[T]``."""
    advantages, low, high = batch.advantages, config.clip_low, config.clip_high
    if config.loss == "reinforce":
        return surrogates.reinforce_surrogate(logprobs.policy, advantages)
    if config.loss == "cispo":
        return surrogates.clipped_weight_surrogate(logprobs.policy, ratio, advantages, low, high)
    return surrogates.clipped_surrogate(ratio, advantages, low, high, config.clip_dual)


def _corrected(
    surrogate: Tensor, batch: TokenFields, logprobs: Logprobs, config: ObjectiveConfig, metrics: MetricSums
) -> Tensor:
    """The policy-gradient term times the weight for the engine's mismatch, which is noted in ``metrics``."""
    correction = config.correction
    if correction.kind == "none":
        return surrogate
    weight = mismatch_weight(
        logprobs.old, batch.engine_logprobs, batch.sample_index, len(batch.sample_tokens), correction.level
    )
    bounded = bounded_weight(weight, correction)
    metrics.weight = float(bounded.sum())
    metrics.corrected = float(outside_cap(weight, correction).sum())
    return bounded * surrogate


def _kl(logprobs: Logprobs, config: ObjectiveConfig) -> Tensor:
    """The KL estimate per token, weighted by the token's ratio where the config asks for that."""
    if logprobs.reference is None:
        raise ValueError(f"objective.beta={config.beta} needs the reference's log-probabilities")
    kl = kl_estimate(logprobs.policy, logprobs.reference, config.kl.estimator, config.kl.clamp)
    return kl * surrogates.token_ratio(logprobs.policy, logprobs.old) if config.kl.weighted else kl


def _metrics(
    batch: TokenFields, logprobs: Logprobs, ratio: Tensor, surrogate: Tensor, config: ObjectiveConfig
) -> MetricSums:
    if config.loss == "reinforce":
        clipped = torch.zeros_like(ratio)
    else:
        dual = config.clip_dual if config.loss != "cispo" else None
        clipped = surrogates.outside_clip(ratio, batch.advantages, config.clip_low, config.clip_high, dual)
    # The old policy is the one the engine sampled with.
    mismatch = (logprobs.old - batch.engine_logprobs).abs()
    tokens = float(len(ratio))
    return MetricSums(
        tokens=tokens,
        samples=float(len(batch.sample_tokens)),
        surrogate=float(surrogate.sum()),
        entropy=float(logprobs.entropy.detach().sum()),
        ratio=float(ratio.sum()),
        clipped=float(clipped.sum()),
        mismatch=float(mismatch.sum()),
        mismatch_max=float(mismatch.max()) if len(mismatch) else 0.0,
        weight=tokens,
    )
