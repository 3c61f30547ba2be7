"""Attention of one batch of blocks, with the log-sum-exp that lets several blocks be merged exactly.

``forward`` returns a block's output and log-sum-exp; ``backward`` takes those of the *merged* attention and then
yields the block's exact share of the gradient, because softmax probabilities are ``exp(score - lse)`` whichever
block a score is from (the identity that ring attention rests on, arXiv 2310.01889). Neither keeps probabilities.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

_flash_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Kernel(Protocol):
    """Queries ``[B, H, Lq, D]`` against keys and values ``[B, H, Lk, D]``, in any strides.

    ``mask`` is additive, ``[B, 1, 1, Lk]`` in the dtype of the queries. ``lse`` is ``[B, H, Lq]``, float32 or wider.
    """

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Output ``[B, H, Lq, D]`` and log-sum-exp of the scaled scores."""
        ...

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        mask: Tensor | None,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """This block's share of the gradients of q, k and v, given the merged ``out`` and ``lse``."""
        ...


class CpuFlashKernel:
    """PyTorch's fused CPU attention: tiles in cache, probabilities recomputed in the backward pass."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See :class:`Kernel`."""
        out, lse = _flash_forward(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
        return out, lse

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        mask: Tensor | None,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See :class:`Kernel`."""
        grads = _flash_backward(grad, q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=scale)
        return grads[0], grads[1], grads[2]


class MatmulKernel:
    """Plain matrix products: works on every device; memory is the scores of one batch of blocks at a time."""

    def _scores(self, q: Tensor, k: Tensor, causal: bool, mask: Tensor | None, scale: float) -> Tensor:
        scores = (q @ k.transpose(-1, -2)).to(torch.promote_types(q.dtype, torch.float32)) * scale
        if mask is not None:
            scores = scores + mask
        if causal:
            future = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).triu(1)
            scores = scores.masked_fill(future, -torch.inf)
        return scores

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See :class:`Kernel`."""
        scores = self._scores(q, k, causal, mask, scale)
        lse = scores.logsumexp(-1)
        return (scores - lse.unsqueeze(-1)).exp().to(v.dtype) @ v, lse

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        mask: Tensor | None,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See :class:`Kernel`."""
        probabilities = (self._scores(q, k, causal, mask, scale) - lse.unsqueeze(-1)).exp()
        wide = probabilities.dtype
        drift = (grad.to(wide) * out.to(wide)).sum(-1, keepdim=True)
        grad_scores = (probabilities * ((grad @ v.transpose(-1, -2)).to(wide) - drift) * scale).to(q.dtype)
        grad_v = probabilities.to(grad.dtype).transpose(-1, -2) @ grad
        return grad_scores @ k, grad_scores.transpose(-1, -2) @ q, grad_v


def kernel_for(device: torch.device) -> Kernel:
    """The fastest kernel for ``device``."""
    return CpuFlashKernel() if device.type == "cpu" else MatmulKernel()
