"""Attention of many sequences of any lengths in one call, without padding; and the flash kernel that does it on CUDA.

As with :class:`pa_core.model.kernels.Kernel`, ``backward`` takes the output and log-sum-exp of the *merged* attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sequences:
    """B sequences, one after the other in a tensor's rows.

    Attributes:
        ends: the row after each one's last, ascending.
        offsets: i32[B + 1], 0 and :attr:`ends`, on the device.
        longest: rows of the longest one.
    """

    ends: tuple[int, ...]
    offsets: Tensor
    longest: int

    @staticmethod
    def of(lengths: Sequence[int], device: torch.device) -> Sequences:
        """Sequences of these ``lengths``, at least one, none of them 0."""
        ends = tuple(accumulate(lengths))
        return Sequences(ends, torch.tensor([0, *ends], dtype=torch.int32, device=device), max(lengths))


class VarlenKernel(Protocol):
    """Queries ``[Tq, H, D]`` of B sequences against keys and values ``[Tk, Hkv, D]`` of as many, n-th against n-th.

    H is a multiple of Hkv; any strides. ``causal`` comes with the same sequences on both sides. ``lse`` is
    ``[Tq, H]`` in float32.

    Attributes:
        name: what the log calls it.
        limits: what it does not take, for the log.
    """

    name: str
    limits: str

    def takes(self, q: Tensor, sequences: int) -> bool:
        """Whether it computes attention of queries ``q`` in that many sequences."""
        ...

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, queries: Sequences, keys: Sequences, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Output ``[Tq, H, D]`` and log-sum-exp of the scores, both free to be written to."""
        ...

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
        """This call's share of the gradients of q, k and v, given the merged ``out`` and ``lse``."""
        ...


def cuda_flash_runs(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether PyTorch's flash attention computes ``dtype`` on ``device``, a CUDA device."""
    return (
        dtype in (torch.bfloat16, torch.float16)
        and torch.version.hip is None  # another kernel, another shape of log-sum-exp
        and torch.backends.cuda.is_flash_attention_available()
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


class CudaFlashKernel:
    """FlashAttention-2 as PyTorch ships it (arXiv 2307.08691), called as ``torch.nn.attention.varlen`` does.

    That public function gives no gradient of, and takes no, merged log-sum-exp; the operators below it do.
    """

    name = "varlen-flash"
    limits = "unusual head sizes"

    def takes(self, q: Tensor, sequences: int) -> bool:
        """See :class:`VarlenKernel`. Heads of more than 192 up to 224 have no backward pass on some devices."""
        size = q.shape[-1]
        return size % 8 == 0 and (size <= 192 or 224 < size <= 256)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, queries: Sequences, keys: Sequences, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See :class:`VarlenKernel`."""
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            *(_dense_heads(rows) for rows in (q, k, v)),
            queries.offsets,
            keys.offsets,
            _longest(queries),
            _longest(keys),
            0.0,  # dropout
            causal,
            False,  # no debug mask
            scale=scale,
        )
        return out, lse.transpose(0, 1)

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
        """See :class:`VarlenKernel`."""
        grad_q, grad_k, grad_v = torch.ops.aten._flash_attention_backward(
            grad.contiguous(),
            *(_dense_heads(rows) for rows in (q, k, v)),
            out.contiguous(),
            lse.transpose(0, 1).contiguous(),
            queries.offsets,
            keys.offsets,
            _longest(queries),
            _longest(keys),
            0.0,  # dropout
            causal,
            torch.zeros(2, dtype=torch.uint64, device=q.device),  # state of the dropout's generator
            torch.empty(0, device=q.device),  # unused
            scale=scale,
        )
        return grad_q, grad_k, grad_v


def _dense_heads(rows: Tensor) -> Tensor:
    """``rows`` with consecutive values of a head, which is all that the operator asks of strides."""
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _longest(sequences: Sequences) -> int:
    # An upper bound is enough. At 1 the operator turns to a path for decoding, with a log-sum-exp of another shape.
    return max(2, sequences.longest)
