"""Shared-prompt attention: a prompt is computed once for its K responses (Periodic Asynchrony, arXiv 2511.18871).

Registered with transformers' ``AttentionInterface``, so that the library's own modelling code runs unpatched over a
packed row; the row's layout travels as the forward keyword ``shared_prompt``. Prompt tokens attend causally to the
prompt; a response's tokens attend to its prompt and causally to the response. How that is computed is a backend's
business.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from pa_core.errors import ModelError
from pa_core.model.backend import AttentionRule, Backend
from pa_core.model.block_attention import BlockAttention
from pa_core.model.flex import FlexAttention
from pa_core.model.kernels import CpuFlashKernel, MatmulKernel
from pa_core.model.layout import PromptLayout
from pa_core.model.npu_fusion import NpuFusionKernel
from pa_core.model.varlen import VarlenAttention
from pa_core.model.varlen_kernels import CudaFlashKernel, cuda_flash_runs

ATTENTION_NAME = "pa_shared_prompt"

# What the supported models pass along that has no influence on attention.
_HARMLESS_KEYWORDS = frozenset({"position_ids", "use_cache", "output_attentions", "is_causal"})
_FIX = "set model.attention=per_sample"


def backend_for(device: torch.device, dtype: torch.dtype, softcap: float | None) -> Backend:
    """The fastest exact backend for tensors of ``dtype`` on ``device``, with or without soft-capped scores."""
    if device.type == "cpu" and softcap is None:
        return BlockAttention(CpuFlashKernel())
    general: Backend = BlockAttention(MatmulKernel(softcap))
    if device.type == "cuda":
        if dtype != torch.float64 and importlib.util.find_spec("triton") is not None:
            general = FlexAttention()
        if softcap is None and cuda_flash_runs(device, dtype):
            return VarlenAttention(CudaFlashKernel(), general)
    elif device.type == "npu" and softcap is None and dtype != torch.float64:
        return VarlenAttention(NpuFusionKernel(), general)
    return general


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
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """The function that transformers calls in every layer.

    Args:
        query: ``[1, H, N, D]``; key and value ``[1, Hkv, N, D]``.
        shared_prompt: layout of the N tokens; given to the model's forward under this name.
        sliding_window, softcap, s_aux: the library's names for the fields of
            :class:`~pa_core.model.backend.AttentionRule`.

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
    if query.shape[0] != 1 or query.shape[2] != shared_prompt.tokens or key.shape[2] != shared_prompt.tokens:
        raise ValueError(f"expected one row of {shared_prompt.tokens} tokens, got {tuple(query.shape)}")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    rows = (query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1))
    rule = AttentionRule(scale, sliding_window, softcap, s_aux)
    backend = backend_for(query.device, query.dtype, softcap)
    return backend.attend(*rows, shared_prompt, rule).unsqueeze(0), None


def _no_mask(*_arguments: Any, **_keywords: Any) -> None:
    """The layout says who attends to whom; a mask would be quadratic in the row."""


def register() -> None:
    """Make :data:`ATTENTION_NAME` known to transformers. Idempotent."""
    AttentionInterface.register(ATTENTION_NAME, shared_prompt_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, _no_mask)


register()
