"""Log-probabilities where each process has logits of its part of the vocabulary only.

Every process takes the statistics of its own logits; those are put together from three numbers per position, so that
neither logits nor the head's weight ever travel (the vocabulary-parallel loss of Megatron-LM, arXiv 1909.08053,
section 3, here with the entropy).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from pa_core.model.dtensors import split_over_tp


class VocabularyShard:
    """Tokens ``start`` … ``start + size - 1`` of the vocabulary; the other processes of ``group`` have the others.

    All processes of the group call the same methods with the same positions.
    """

    def __init__(self, start: int, size: int, group: dist.ProcessGroup) -> None:
        self._start, self._size, self._group = start, size, group

    @classmethod
    def of(cls, weight: Tensor) -> VocabularyShard | None:
        """The part of a head's ``weight[V, D]`` that is here; None when all of it is."""
        if not isinstance(weight, DTensor) or not split_over_tp(weight):
            return None
        mesh = weight.device_mesh
        sizes = [len(chunk) for chunk in torch.arange(weight.shape[0]).chunk(mesh.size())]
        rank = mesh.get_local_rank()
        return cls(sum(sizes[:rank]), sizes[rank], mesh.get_group())

    def own(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """``targets[T]`` counted from this part's start, 0 for those elsewhere; and which are here, bool[T]."""
        shifted = targets - self._start
        here = (shifted >= 0) & (shifted < self._size)
        return shifted.where(here, 0), here

    def joined(self, logprobs: Tensor, entropy: Tensor, lse: Tensor, here: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities, entropy and log-sum-exp over the whole vocabulary, ``[T]`` each, from those over parts.

        With Z the sum of the parts' Z_i, the mean logit is the parts' mean logits weighted by Z_i / Z.
        """
        target = (logprobs + lse).where(here, 0)
        mine = torch.stack([lse, lse - entropy, target])
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(parts, mine, group=self._group)
        lses, means, targets = torch.stack(parts, 1).unbind(0)
        total = lses.logsumexp(0)
        expected = ((lses - total).exp() * means).sum(0)
        return targets.sum(0) - total, total - expected, total

    def summed(self, gradient: Tensor) -> Tensor:
        """The gradient of what every part was computed from."""
        dist.all_reduce(gradient, group=self._group)
        return gradient
