"""Attention of one batch of blocks, with the log-sum-exp that lets several blocks be merged exactly.

``forward`` returns a block's output and log-sum-exp; ``backward`` takes those of the *merged* attention and then
yields the block's exact share of the gradient, because softmax probabilities are ``exp(score - lse)`` whichever
block a score is from (the identity that ring attention rests on, arXiv 2310.01889). Neither keeps probabilities.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

_flash_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

# Scores that plain matrix products hold at a time: 64 MB in float32.
_SCORES = 1 << 24


class Kernel(Protocol):
    """Queries ``[B, H, Lq, D]`` against keys and values ``[B, H, Lk, D]``, in any strides.

    ``mask`` is additive, ``[B or 1, 1, Lq or 1, Lk]`` in the dtype of the queries; it leaves every query a key.
    ``causal`` comes without a mask and with Lq = Lk. ``lse`` is ``[B, H, Lq]``, float32 or wider.

    Attributes:
        name: what the log calls it.
    """

    name: str

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Output ``[B, H, Lq, D]`` and log-sum-exp of the scores."""
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

    name = "cpu-flash"

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
    """Plain matrix products: every device, and scores that no fused kernel computes; few queries at a time.

    ``softcap`` c turns a scaled score s into c · tanh(s / c) (Gemma 2, arXiv 2408.00118, section 2).
    """

    name = "matmul"

    def __init__(self, softcap: float | None = None) -> None:
        self._softcap = softcap

    @staticmethod
    def _parts(q: Tensor, k: Tensor, causal: bool) -> Iterator[tuple[slice, slice]]:
        """Queries whose scores fit the memory, and the keys that any of them may see."""
        queries, keys = q.shape[-2], k.shape[-2]
        step = max(1, _SCORES // (q.shape[0] * q.shape[1] * keys))
        for start in range(0, queries, step):
            end = min(start + step, queries)
            yield slice(start, end), slice(0, end if causal else keys)

    def _scores(self, q: Tensor, k: Tensor, first: int | None, mask: Tensor | None, scale: float) -> Tensor:
        """Scores before softmax; ``first`` is the number of q's first row in a causal block, else None."""
        scores = (q @ k.transpose(-1, -2)).to(torch.promote_types(q.dtype, torch.float32)) * scale
        if self._softcap is not None:
            scores = scores.div_(self._softcap).tanh_().mul_(self._softcap)
        if mask is not None:
            scores = scores + mask
        if first is not None:
            future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1 + first)
            scores = scores.masked_fill(future, -torch.inf)
        return scores

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See :class:`Kernel`."""
        out = torch.empty(*q.shape[:-1], v.shape[-1], dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:-1], dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
        for rows, seen in self._parts(q, k, causal):
            first = rows.start if causal else None
            scores = self._scores(q[..., rows, :], k[..., seen, :], first, _rows_of(mask, rows), scale)
            lse[..., rows] = scores.logsumexp(-1)
            probabilities = (scores - lse[..., rows, None]).exp().to(v.dtype)
            out[..., rows, :] = probabilities @ v[..., seen, :]
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
        wide = lse.dtype
        grad_q = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        grad_k = torch.zeros(k.shape, dtype=wide, device=k.device)
        grad_v = torch.zeros(v.shape, dtype=wide, device=v.device)
        for rows, seen in self._parts(q, k, causal):
            queries, grads, keys = q[..., rows, :], grad[..., rows, :], k[..., seen, :]
            scores = self._scores(queries, keys, rows.start if causal else None, _rows_of(mask, rows), scale)
            probabilities = (scores - lse[..., rows, None]).exp()
            drift = (grads.to(wide) * out[..., rows, :].to(wide)).sum(-1, keepdim=True)
            slopes = probabilities * ((grads @ v[..., seen, :].transpose(-1, -2)).to(wide) - drift) * scale
            if self._softcap is not None:
                # d c tanh(s / c) / d s; a hidden score is -inf and has no slope.
                slopes *= 1 - (scores.clamp_min_(-self._softcap) / self._softcap).square()
            slopes = slopes.to(q.dtype)
            grad_q[..., rows, :] = slopes @ keys
            grad_k[..., seen, :] += slopes.transpose(-1, -2) @ queries
            grad_v[..., seen, :] += probabilities.to(grad.dtype).transpose(-1, -2) @ grads
        return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype)


def _rows_of(mask: Tensor | None, rows: slice) -> Tensor | None:
    return mask if mask is None or mask.shape[-2] == 1 else mask[..., rows, :]
