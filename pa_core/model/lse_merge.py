"""Merging attention to several sets of keys by log-sum-exp, and sinks, which are one more key without a value.

Softmax over a union of keys is the mean of the softmaxes over its parts, weighted by exp(lse) (arXiv 2205.14135,
section 3.1). A kernel's backward pass given the *merged* output and log-sum-exp yields its part's exact share.
"""

from __future__ import annotations

import torch
from torch import Tensor


def merged(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Two attentions ``[…, D]`` of the same queries to disjoint keys, with their log-sum-exp ``[…]``, as one."""
    total = torch.logaddexp(lse, part_lse)
    # In place of three temporaries: out + w (part - out), with w the part's share of the probability.
    weight = (part_lse - total).exp().unsqueeze(-1).to(out.dtype)
    return torch.lerp(out, part, weight.expand_as(out)), total


def give_to_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Take the share of ``sinks[H]`` from ``out[N, H, D]``, in place; returns the log-sum-exp ``[N, H]`` with sinks."""
    total = torch.logaddexp(lse, sinks.to(lse.dtype))
    out.mul_((lse - total).exp().unsqueeze(-1))
    return total


def sinks_gradient(grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Gradient of ``sinks[H]`` from that of ``out[N, H, D]``; ``out`` and ``lse`` are those with sinks.

    A sink's value is zero, so its score's gradient is p (0 - sum of p_j grad · v_j), which is -p grad · out.
    """
    probabilities = (sinks.to(lse.dtype) - lse).exp()
    drift = (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    return -(probabilities * drift).sum(0).to(sinks.dtype)
