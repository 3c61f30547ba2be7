"""Rewards to advantages: (r - baseline) / (std + eps) within a group (GRPO, arXiv 2402.03300, section 4.1.2).

Statistics are those of the scored samples; an unscored one (NaN) has no influence and advantage 0. They are taken in
float64 whatever the rewards' type.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pa_core.objective.conventions import AdvantageConvention

# Rewards that agree to float32 resolution are equal: weighted sums of equal parts may differ in their last bits, and
# a small eps would blow such a difference up to advantages of size 1.
_RESOLUTION = 8 * torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class GroupAdvantages:
    """Advantages of one group.

    Attributes:
        values: f32[K]; 0 for unscored samples.
        scored: number of scored samples.
        zero_variance: at least two samples are scored, and all of them alike: advantages are exactly 0.
    """

    values: Tensor
    scored: int
    zero_variance: bool

    @property
    def trainable(self) -> bool:
        """Whether the group takes part in the update: with fewer than two scored samples it does not."""
        return self.scored >= 2


def group_advantages(rewards: Tensor, convention: AdvantageConvention) -> GroupAdvantages:
    """Advantages within one group.

    Args:
        rewards: ``[K]``, NaN where a sample is unscored.
        convention: std within the group or none; that of a batch needs :func:`batch_advantages`.

    Fewer than two scored samples give zeros and ``trainable`` False. ``leave_one_out`` takes both statistics over the
    *other* samples and does not divide where their std is 0, as NeMo-RL does.

    Raises:
        ValueError: for a batch-level std.
    """
    if convention.whole_batch:
        raise ValueError(f"std={convention.std!r} needs the rewards of every group; use batch_advantages")
    return _advantages(rewards, convention, None)


def batch_advantages(rewards: Sequence[Tensor], convention: AdvantageConvention) -> list[GroupAdvantages]:
    """Advantages of all groups of an iteration; with a batch-level std they share one std.

    ``batch``: the root of the summed squared distances to each group's mean over (samples - 1), as AReaL has it (mean
    level group, std level batch); groups with fewer than two scored samples stay out of it. ``batch_rewards``: the
    unbiased std of all scored rewards (TRL's ``scale_rewards="batch"``; arXiv 2508.08221).
    """
    if not convention.whole_batch:
        return [group_advantages(group, convention) for group in rewards]
    scored = [group[~group.isnan()].double() for group in rewards]
    if convention.std == "batch":
        scored = [group - group.mean() for group in scored if len(group) >= 2]
    sample = torch.cat([torch.empty(0).double(), *scored])
    std = float(sample.std()) if len(sample) >= 2 else 0.0
    return [_advantages(group, convention, std) for group in rewards]


def _advantages(rewards: Tensor, convention: AdvantageConvention, batch_std: float | None) -> GroupAdvantages:
    mask = ~rewards.isnan()
    scored = rewards[mask].double()
    values = torch.zeros(rewards.shape, dtype=torch.float64)
    zero_variance = False
    if len(scored) >= 2:
        spread = float(scored.max() - scored.min())
        zero_variance = spread <= _RESOLUTION * float(scored.abs().max())
        if not zero_variance:
            values[mask] = _normalised(scored, convention, batch_std)
    return GroupAdvantages(values.float(), len(scored), zero_variance)


def _normalised(scored: Tensor, convention: AdvantageConvention, batch_std: float | None) -> Tensor:
    """(r - baseline) / (std + eps) of ``scored[n]``, n >= 2, which are not all equal."""
    if convention.baseline == "leave_one_out":
        others = torch.stack([torch.cat([scored[:i], scored[i + 1 :]]) for i in range(len(scored))])
        baseline, sample = others.mean(1), others
    else:
        baseline, sample = scored.mean(), scored.unsqueeze(0)
    advantages = scored - baseline
    if convention.std == "none":
        return advantages
    if convention.whole_batch:
        assert batch_std is not None
        return advantages / (batch_std + convention.eps)
    divisor = max(sample.shape[1] - (1 if convention.std == "unbiased" else 0), 1)
    std = ((sample - sample.mean(1, keepdim=True)).square().sum(1) / divisor).sqrt()
    return torch.where(std > 0, advantages / (std + convention.eps), advantages)
