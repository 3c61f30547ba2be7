"""Ascend's fused attention (``torch_npu.npu_fusion_attention``) over sequences of any lengths (layout TND).

The operator gives a softmax's maximum m and sum s, ``[T, H, 8]`` with eight equal columns, where lse = m + log s; its
backward pass computes probabilities as exp(score - m) / s. Handing it m = lse and s = 1 is therefore handing it the
merged log-sum-exp.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import torch
from torch import Tensor

from pa_core.errors import ModelError
from pa_core.model.varlen_kernels import Sequences

_COLUMNS = 8
# Limit of the operator on actual_seq_qlen, from CANN's aclnnFlashAttentionVarLenScore.
_MOST_SEQUENCES = 2048
# sparse_mode 3: causal, from this one mask for sequences of any length.
_CAUSAL = 3
_MASK_SIZE = 2048


def _torch_npu() -> Any:
    try:
        return importlib.import_module("torch_npu")
    except ImportError as error:
        raise ModelError(
            f"attention on an NPU needs the package torch-npu ({error}): install its release for torch "
            f"{torch.__version__}, or set model.device=cpu"
        ) from error


class NpuFusionKernel:
    """See :class:`~pa_core.model.varlen_kernels.VarlenKernel`.

    Raises:
        ModelError: without ``torch_npu``.
    """

    name = "npu-fusion"
    limits = f"more than {_MOST_SEQUENCES} segments in a row"

    def __init__(self) -> None:
        self._ops = _torch_npu()

    def takes(self, q: Tensor, sequences: int) -> bool:
        """See :class:`~pa_core.model.varlen_kernels.VarlenKernel`."""
        return sequences <= _MOST_SEQUENCES

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, queries: Sequences, keys: Sequences, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See :class:`~pa_core.model.varlen_kernels.VarlenKernel`."""
        out, largest, total, *_ = self._ops.npu_fusion_attention(
            q.contiguous(),
            k.contiguous(),
            v.contiguous(),
            q.shape[1],
            scale=scale,
            **_shared_arguments(q.device, queries, keys, causal),
        )
        return out, largest[..., 0] + total[..., 0].log()

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        queries: Sequences,
        keys: Sequences,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See :class:`~pa_core.model.varlen_kernels.VarlenKernel`."""
        largest = lse.unsqueeze(-1).expand(-1, -1, _COLUMNS).contiguous()
        grad_q, grad_k, grad_v, *_ = self._ops.npu_fusion_attention_grad(
            q.contiguous(),
            k.contiguous(),
            v.contiguous(),
            grad.contiguous(),
            q.shape[1],
            softmax_max=largest,
            softmax_sum=torch.ones_like(largest),
            attention_in=out.contiguous(),
            scale_value=scale,
            **_shared_arguments(q.device, queries, keys, causal),
        )
        return grad_q, grad_k, grad_v


def _shared_arguments(device: torch.device, queries: Sequences, keys: Sequences, causal: bool) -> dict[str, Any]:
    return {
        "input_layout": "TND",
        # By default the softmax's maxima and sums are in another order than the queries: by head in each sequence.
        "softmax_layout": "TND",
        "actual_seq_qlen": list(queries.ends),
        "actual_seq_kvlen": list(keys.ends),
        "keep_prob": 1.0,
        "sparse_mode": _CAUSAL if causal else 0,
        "atten_mask": _causal_mask(device) if causal else None,
    }


@cache
def _causal_mask(device: torch.device) -> Tensor:
    """True where a query does not see a key."""
    return torch.ones(_MASK_SIZE, _MASK_SIZE, dtype=torch.bool, device=device).triu_(1)
