"""What the objective takes from a group before its advantages: the KL penalty in the reward, truncated responses."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from pa_core.config import TrainConfig
from pa_core.model.packing import train_group
from pa_core.model.tri_model import TriModel
from pa_core.objective.kl import kl_estimate
from pa_core.records import Group, Sample


def group_rewards(group: Group, tri: TriModel, config: TrainConfig) -> Tensor:
    """Rewards f32[K] of which advantages are made; NaN where a sample is unscored.

    With the KL term in the reward: minus beta times the response's KL divergence from the reference.
    """
    rewards = torch.tensor([math.nan if sample.reward is None else sample.reward for sample in group.samples])
    if config.objective.kl_in_reward:
        rewards = rewards - config.objective.beta * response_kl(group, tri, config)
    return rewards


@torch.no_grad()
def response_kl(group: Group, tri: TriModel, config: TrainConfig) -> Tensor:
    """Sum over each response's trained tokens of KL(old policy || reference), f32[K]; 0 for unscored samples.

    The old policy is the one that sampled. A group arrives whole, so that its advantages can still be known before its
    gradient is computed, on every schedule; it costs one more forward pass of both models, without gradient. Every
    process of a parallel trainer computes it for every group, so that all agree.
    """
    size = len(group.samples)
    # A batch says of each token the advantage of its sample: here that is the sample's number.
    numbered = train_group(group, torch.arange(size, dtype=torch.float32))
    total = torch.zeros(size)
    if not numbered.tokens:
        return total
    for batch in tri.micro_batches([numbered], config.trainer.micro_batch_tokens):
        logprobs = tri.logprobs(batch, config.sampling.temperature)
        assert logprobs.reference is not None, "objective.beta > 0 keeps a reference"
        kl = kl_estimate(logprobs.old, logprobs.reference, config.objective.kl.estimator, config.objective.kl.clamp)
        total.index_add_(0, batch.advantages.long().cpu(), kl.float().cpu())
    return total


def without_truncated(group: Group) -> Group:
    """The group with loss mask 0 on responses that were cut at ``sampling.max_tokens``: they count, with no token.

    Overlong filtering, DAPO, arXiv 2503.14476, section 3.4; TRL's ``mask_truncated_completions``.
    """

    def masked(sample: Sample) -> Sample:
        cut = sample.finish_reason == "length"
        return replace(sample, loss_mask=np.zeros_like(sample.loss_mask)) if cut else sample

    return replace(group, samples=[masked(sample) for sample in group.samples])
