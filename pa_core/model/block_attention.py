"""Attention over a packed row, block by block, merged by log-sum-exp.

Scores between responses or between groups are never computed, keys are not repeated for grouped queries, and no
probabilities are kept for the backward pass, so memory grows with the number of tokens only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pa_core.model.backend import AttentionRule
from pa_core.model.blocks import Block, attention_blocks
from pa_core.model.kernels import Kernel
from pa_core.model.layout import PromptLayout
from pa_core.model.lse_merge import give_to_sinks, merged, sinks_gradient


class BlockAttention:
    """A :class:`~pa_core.model.backend.Backend` made of a kernel; the kernel does the rule's soft-capping."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    @property
    def name(self) -> str:
        """The kernel's name."""
        return self._kernel.name

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layout: PromptLayout, rule: AttentionRule) -> Tensor:
        """See :class:`~pa_core.model.backend.Backend`."""
        blocks = attention_blocks(layout, rule.window)
        out: Tensor = _BlockAttention.apply(q, k, v, rule.sinks, blocks, rule.scale, self._kernel)
        return out


class _BlockAttention(torch.autograd.Function):
    """``q[N, H, D], k[N, Hkv, D], v[N, Hkv, D], sinks[H] or None -> [N, H, D]``."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        blocks: tuple[Block, ...],
        scale: float,
        kernel: Kernel,
    ) -> Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
        for block in blocks:
            queries, keys = block.queries, block.keys
            operands = (queries.gather(q), keys.gather(k), keys.gather(v))
            part, part_lse = _attend(kernel, *operands, block.causal, block.mask(q.dtype), scale)
            if block.causal:
                queries.write(out, part)
                queries.write(lse, part_lse)
            else:
                both, both_lse = merged(queries.gather(out), queries.gather(lse), part, part_lse)
                queries.write(out, both)
                queries.write(lse, both_lse)
        if sinks is not None:
            lse = give_to_sinks(out, lse, sinks)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.blocks, ctx.scale, ctx.kernel = blocks, scale, kernel
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        grad = grad.contiguous()
        grad_q, grad_k, grad_v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for block in ctx.blocks:
            queries, keys = block.queries, block.keys
            parts = _attend_backward(
                ctx.kernel,
                queries.gather_zeroed(grad),
                queries.gather(q),
                keys.gather(k),
                keys.gather(v),
                queries.gather(out),
                queries.gather(lse),
                block.causal,
                block.mask(q.dtype),
                ctx.scale,
            )
            queries.add(grad_q, parts[0])
            keys.add(grad_k, parts[1])
            keys.add(grad_v, parts[2])
        grad_sinks = None
        if sinks is not None and ctx.needs_input_grad[3]:
            grad_sinks = sinks_gradient(grad, out, lse, sinks)
        return grad_q, grad_k, grad_v, grad_sinks, None, None, None


def _attend(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Output ``[B, Lq, H, D]`` and log-sum-exp ``[B, Lq, H]`` of ``q[B, Lq, H, D]`` against ``k, v[B, Lk, Hkv, D]``."""
    batch, _, heads, _ = q.shape
    parts = [
        kernel.forward(*operands, causal, mask, scale)
        for operands in zip(_fold(q, k.shape[2]), _fold_keys(k, heads), _fold_keys(v, heads), strict=True)
    ]
    return _unfold([out for out, _ in parts], batch), _unfold([lse for _, lse in parts], batch)


def _attend_backward(
    kernel: Kernel,
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
    batch, _, heads, _ = q.shape
    kv_heads = k.shape[2]
    sides = (grad, q, out, lse.unsqueeze(-1))
    query_side = zip(*(_fold(side, kv_heads) for side in sides), strict=True)
    key_side = zip(_fold_keys(k, heads), _fold_keys(v, heads), strict=True)
    parts = [
        kernel.backward(grad_, q_, k_, v_, out_, lse_.squeeze(-1), causal, mask, scale)
        for (grad_, q_, out_, lse_), (k_, v_) in zip(query_side, key_side, strict=True)
    ]
    return (
        _unfold([part[0] for part in parts], batch),
        _unfold_keys([part[1] for part in parts], batch, heads, kv_heads),
        _unfold_keys([part[2] for part in parts], batch, heads, kv_heads),
    )


def _fold(x: Tensor, kv_heads: int) -> list[Tensor]:
    """Query-side ``[B, L, H, D]`` as kernel batches ``[b, H / kv_heads (or H), L, D]``, all of them views."""
    batch, _, heads, _ = x.shape
    if heads == kv_heads:
        return [x.transpose(1, 2)]
    grouped = x.unflatten(2, (kv_heads, heads // kv_heads))
    if batch == 1:
        return [grouped[0].permute(1, 2, 0, 3)]
    return [grouped[:, :, head].transpose(1, 2) for head in range(kv_heads)]


def _fold_keys(x: Tensor, heads: int) -> list[Tensor]:
    """Key-side ``[B, L, Hkv, D]`` to match :func:`_fold`; repetition over query heads has stride 0."""
    batch, _, kv_heads, _ = x.shape
    if heads == kv_heads:
        return [x.transpose(1, 2)]
    repeats = heads // kv_heads
    if batch == 1:
        return [x[0].transpose(0, 1).unsqueeze(1).expand(-1, repeats, -1, -1)]
    return [x[:, :, head].unsqueeze(1).expand(-1, repeats, -1, -1) for head in range(kv_heads)]


def _unfold(parts: list[Tensor], batch: int) -> Tensor:
    """Back from :func:`_fold`: ``[B, L, H, D]`` (or ``[B, L, H]`` for log-sum-exp)."""
    if len(parts) > 1:
        return torch.cat([part.transpose(1, 2) for part in parts], dim=2)
    part = parts[0]
    if part.shape[0] == batch:
        return part.transpose(1, 2)
    return part.flatten(0, 1).transpose(0, 1).unsqueeze(0)


def _unfold_keys(parts: list[Tensor], batch: int, heads: int, kv_heads: int) -> Tensor:
    """Key-side gradients back to ``[B, L, Hkv, D]``, summed over the query heads that shared a key."""
    if heads == kv_heads:
        return parts[0].transpose(1, 2)
    if batch == 1:
        return parts[0].sum(1).transpose(0, 1).unsqueeze(0)
    return torch.stack([part.sum(1) for part in parts], dim=2)
