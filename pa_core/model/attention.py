"""Shared-prompt attention: a prompt is computed once for its K responses (Periodic Asynchrony, arXiv 2511.18871).

Registered with transformers' ``AttentionInterface``, so that the library's own modelling code runs unpatched over a
packed row; the row's layout travels as the forward keyword ``shared_prompt``. Prompt tokens attend causally to the
prompt; a response's tokens attend to its prompt and causally to the response. Scores between responses or between
groups are never computed, keys are not repeated for grouped queries, and no probabilities are kept for the backward
pass, so memory grows with the number of tokens only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig

from pa_core.errors import ModelError
from pa_core.model.kernels import Kernel, kernel_for
from pa_core.model.layout import CrossBlock, PromptLayout, Rows

ATTENTION_NAME = "pa_shared_prompt"

#: Model types whose attention is tested against the library's per-sample forward.
SUPPORTED_MODEL_TYPES = ("llama", "qwen2", "qwen3")

# Rotary embeddings whose frequencies depend on the longest position of the whole row, hence on other samples.
_ROW_DEPENDENT_ROPE = ("dynamic", "longrope")
# What the supported models pass along that has no influence on attention.
_HARMLESS_KEYWORDS = frozenset({"position_ids", "use_cache", "output_attentions", "is_causal"})
_FIX = "set model.attention=per_sample"


def require_exact(config: PretrainedConfig) -> None:
    """Raise :class:`ModelError`, naming the fix, when attention of this model would not be exact over a packed row."""
    reason = _inexact(config)
    if reason is not None:
        raise ModelError(f"model.attention=shared_prompt: {reason}; {_FIX}")


def _inexact(config: PretrainedConfig) -> str | None:
    if config.model_type not in SUPPORTED_MODEL_TYPES:
        return f"model type {config.model_type!r} is not among the tested ones ({', '.join(SUPPORTED_MODEL_TYPES)})"
    for name in ("attn_logit_softcapping", "attention_chunk_size", "sinks"):
        if getattr(config, name, None):
            return f"the model's {name}={getattr(config, name)} is not computed exactly"
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    if kind in _ROW_DEPENDENT_ROPE:
        return f"rotary embedding {kind!r} depends on the longest sample in the row"
    return None


def _sliding_window(config: PretrainedConfig) -> int | None:
    """The window of the model's sliding layers, None when it has none."""
    layers = getattr(config, "layer_types", None)
    if layers is not None and "sliding_attention" not in layers:
        return None
    if layers is None and not getattr(config, "use_sliding_window", True):
        return None
    window: int | None = getattr(config, "sliding_window", None)
    return window


def require_window(config: PretrainedConfig, layout: PromptLayout) -> None:
    """Raise :class:`ModelError` when a sliding window is shorter than the longest prompt + response of a row."""
    window = _sliding_window(config)
    if window is not None and window < layout.longest:
        raise ModelError(
            f"model.attention=shared_prompt: the model's sliding window of {window} tokens is shorter than a "
            f"sample of {layout.longest} tokens; {_FIX}"
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


def _key_mask(keys: Rows, dtype: torch.dtype) -> Tensor | None:
    if keys.padding is None:
        return None
    mask = torch.zeros(keys.padding.shape, dtype=dtype, device=keys.padding.device)
    return mask.masked_fill_(keys.padding, -torch.inf)[:, None, None, :]


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


class _SharedPromptAttention(torch.autograd.Function):
    """``q[N, H, D], k[N, Hkv, D], v[N, Hkv, D] -> [N, H, D]`` over a packed row."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, layout: PromptLayout, scale: float, kernel: Kernel
    ) -> Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
        for rows in layout.own:
            part, part_lse = _attend(kernel, rows.gather(q), rows.gather(k), rows.gather(v), True, None, scale)
            rows.write(out, part)
            rows.write(lse, part_lse)
        for block in layout.cross:
            _merge_prompt(kernel, block, q, k, v, out, lse, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.layout, ctx.scale, ctx.kernel = layout, scale, kernel
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        grad = grad.contiguous()
        # Every row is a query of exactly one `own` block, hence these are written before the cross blocks add.
        grad_q, grad_k, grad_v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        blocks = [(rows, rows, True) for rows in ctx.layout.own]
        blocks += [(block.queries, block.keys, False) for block in ctx.layout.cross]
        for queries, keys, causal in blocks:
            parts = _attend_backward(
                ctx.kernel,
                queries.gather_zeroed(grad),
                queries.gather(q),
                keys.gather(k),
                keys.gather(v),
                queries.gather(out),
                queries.gather(lse),
                causal,
                None if causal else _key_mask(keys, q.dtype),
                ctx.scale,
            )
            queries.add(grad_q, parts[0])
            keys.add(grad_k, parts[1])
            keys.add(grad_v, parts[2])
        return grad_q, grad_k, grad_v, None, None, None


def _merge_prompt(
    kernel: Kernel, block: CrossBlock, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
) -> None:
    """Merge the responses' attention to their prompt into ``out`` and ``lse``, which hold that to themselves."""
    keys, queries = block.keys, block.queries
    mask = _key_mask(keys, q.dtype)
    part, part_lse = _attend(kernel, queries.gather(q), keys.gather(k), keys.gather(v), False, mask, scale)
    own, own_lse = queries.gather(out), queries.gather(lse)
    total = torch.logaddexp(own_lse, part_lse)
    # In place of three temporaries: own + w (prompt - own), with w the prompt's share of the probability.
    weight = (part_lse - total).exp().unsqueeze(-1).to(out.dtype)
    queries.write(out, torch.lerp(own, part, weight.expand_as(own)))
    queries.write(lse, total)


def shared_prompt_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    shared_prompt: PromptLayout | None = None,
    sliding_window: int | None = None,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """The function that transformers calls in every layer.

    Args:
        query: ``[1, H, N, D]``; key and value ``[1, Hkv, N, D]``.
        shared_prompt: layout of the N tokens; given to the model's forward under this name.

    Returns:
        ``[1, N, H, D]`` and no attention weights.

    Raises:
        ModelError: when the model asks for something that would not be exact.
    """
    if shared_prompt is None:
        raise ModelError("shared-prompt attention was called without a layout; pass shared_prompt= or use sdpa")
    asked = {name for name, given in keywords.items() if given is not None} - _HARMLESS_KEYWORDS
    if asked:
        raise ModelError(
            f"model.attention=shared_prompt: attention keywords {', '.join(sorted(asked))} are not supported; {_FIX}"
        )
    if attention_mask is not None or dropout:
        what = "a mask" if attention_mask is not None else f"dropout {dropout}"
        raise ModelError(f"model.attention=shared_prompt: attention with {what} is not exact; {_FIX}")
    if sliding_window is not None and sliding_window < shared_prompt.longest:
        raise ModelError(
            f"model.attention=shared_prompt: a sliding window of {sliding_window} tokens is shorter than a sample "
            f"of {shared_prompt.longest} tokens; {_FIX}"
        )
    if query.shape[0] != 1 or query.shape[2] != shared_prompt.tokens or key.shape[2] != shared_prompt.tokens:
        raise ValueError(f"expected one row of {shared_prompt.tokens} tokens, got {tuple(query.shape)}")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    rows = (query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1))
    out = _SharedPromptAttention.apply(*rows, shared_prompt, scale, kernel_for(query.device))
    return out.unsqueeze(0), None


def _no_mask(*_arguments: Any, **_keywords: Any) -> None:
    """The layout says who attends to whom; a mask would be quadratic in the row."""


def register() -> None:
    """Make :data:`ATTENTION_NAME` known to transformers. Idempotent."""
    AttentionInterface.register(ATTENTION_NAME, shared_prompt_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, _no_mask)


register()
