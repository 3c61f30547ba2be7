"""Stand-ins for device calls on a machine without the device: PyTorch's flash operator and ``torch_npu``.

Both answer with plain matrix products over one sequence at a time. The first is registered under the operator's own
schema, so PyTorch itself checks names, order and types of what our kernel passes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Scores ``[H, Lq, Lk]`` and the keys repeated for all query heads ``[Lk, H, D]``."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if causal:
        assert scores.shape[-2] == scores.shape[-1]
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    return scores, k


def _pieces(q_offsets: Sequence[int], k_offsets: Sequence[int]) -> Iterator[tuple[slice, slice]]:
    assert len(q_offsets) == len(k_offsets)
    for (q_start, q_end), (k_start, k_end) in zip(pairwise(q_offsets), pairwise(k_offsets), strict=True):
        yield slice(q_start, q_end), slice(k_start, k_end)


def plain_forward(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Sequence[int], k_offsets: Sequence[int], causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Output ``[Tq, H, D]``; maximum of the scores and sum of exp(score - maximum), both ``[Tq, H]``."""
    assert q_offsets[-1] == len(q) and k_offsets[-1] == len(k)
    out, largest, total = torch.empty_like(q), q.new_empty(q.shape[:2]), q.new_empty(q.shape[:2])
    for queries, keys in _pieces(q_offsets, k_offsets):
        scores, _ = _scores(q[queries], k[keys], causal, scale)
        values = v[keys].repeat_interleave(q.shape[1] // v.shape[1], dim=1)
        out[queries] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
        largest[queries] = scores.amax(-1).T
        total[queries] = (scores - scores.amax(-1, keepdim=True)).exp().sum(-1).T
    return out, largest, total


def plain_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    largest: Tensor,
    total: Tensor,
    q_offsets: Sequence[int],
    k_offsets: Sequence[int],
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients with probabilities exp(score - largest) / total, as a flash kernel's backward pass has them."""
    grad_q, grad_k, grad_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    heads, kv_heads = q.shape[1], k.shape[1]
    for queries, keys in _pieces(q_offsets, k_offsets):
        scores, repeated = _scores(q[queries], k[keys], causal, scale)
        values = v[keys].repeat_interleave(heads // kv_heads, dim=1)
        probabilities = (scores - largest[queries].T.unsqueeze(-1)).exp() / total[queries].T.unsqueeze(-1)
        drift = (grad[queries] * out[queries]).sum(-1).T.unsqueeze(-1)
        slopes = probabilities * (torch.einsum("qhd,khd->hqk", grad[queries], values) - drift) * scale
        grad_q[queries] = torch.einsum("hqk,khd->qhd", slopes, repeated)
        of_keys = torch.einsum("hqk,qhd->khd", slopes, q[queries])
        of_values = torch.einsum("hqk,qhd->khd", probabilities, grad[queries])
        grad_k[keys] = of_keys.unflatten(1, (kv_heads, -1)).sum(2)
        grad_v[keys] = of_values.unflatten(1, (kv_heads, -1)).sum(2)
    return grad_q, grad_k, grad_v


def _flash_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor,
    max_q: int,
    max_k: int,
    dropout: float,
    causal: bool,
    debug_mask: bool,
    *,
    scale: float,
) -> tuple[Tensor, ...]:
    _check_flash(q_offsets, k_offsets, max_q, max_k, dropout)
    assert not debug_mask
    out, largest, total = plain_forward(q, k, v, q_offsets.tolist(), k_offsets.tolist(), causal, scale)
    lse = (largest + total.log()).T.contiguous()
    return out, lse, torch.zeros(2, dtype=torch.uint64), torch.empty(0), torch.empty(0)


def _flash_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor,
    max_q: int,
    max_k: int,
    dropout: float,
    causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    _check_flash(q_offsets, k_offsets, max_q, max_k, dropout)
    assert rng_state.shape == (2,) and rng_state.dtype == torch.uint64 and not unused.numel()
    assert lse.shape == (q.shape[1], q.shape[0]) and lse.is_contiguous() and lse.dtype == torch.float32
    largest, total = lse.T, torch.ones_like(lse.T)
    return plain_backward(grad, q, k, v, out, largest, total, q_offsets.tolist(), k_offsets.tolist(), causal, scale)


def _check_flash(q_offsets: Tensor, k_offsets: Tensor, max_q: int, max_k: int, dropout: float) -> None:
    assert dropout == 0
    for offsets, longest in ((q_offsets, max_q), (k_offsets, max_k)):
        assert offsets.dtype == torch.int32 and offsets.is_contiguous() and offsets[0] == 0
        assert longest == max(2, int(offsets.diff().max()))


@contextmanager
def flash_on_cpu() -> Iterator[None]:
    """PyTorch's flash operators answer on the CPU, in any dtype."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", _flash_forward, "CPU")
    library.impl("_flash_attention_backward", _flash_backward, "CPU")
    try:
        yield
    finally:
        library._destroy()


class FakeTorchNpu:
    """The two functions of ``torch_npu`` with the keywords they document (op-plugin, ``npu_fusion_attention``)."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def npu_fusion_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        head_num: int,
        input_layout: str,
        *,
        atten_mask: Tensor | None = None,
        scale: float = 1.0,
        keep_prob: float = 1.0,
        actual_seq_qlen: list[int] | None = None,
        actual_seq_kvlen: list[int] | None = None,
        sparse_mode: int = 0,
        softmax_layout: str = "",
    ) -> tuple[Any, ...]:
        self.calls.append("forward")
        q_offsets, k_offsets, causal = _npu_sequences(
            (query, key, value), head_num, input_layout, atten_mask, actual_seq_qlen, actual_seq_kvlen, sparse_mode
        )
        assert keep_prob == 1
        out, largest, total = plain_forward(query, key, value, q_offsets, k_offsets, causal, scale)
        statistics = [
            _npu_order(of.float().unsqueeze(-1).expand(-1, -1, 8), q_offsets, softmax_layout) for of in (largest, total)
        ]
        return out, *statistics, torch.empty(0), 0, 0, 0

    def npu_fusion_attention_grad(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dy: Tensor,
        head_num: int,
        input_layout: str,
        *,
        atten_mask: Tensor | None = None,
        softmax_max: Tensor,
        softmax_sum: Tensor,
        attention_in: Tensor,
        scale_value: float = 1.0,
        keep_prob: float = 1.0,
        actual_seq_qlen: list[int] | None = None,
        actual_seq_kvlen: list[int] | None = None,
        sparse_mode: int = 0,
        softmax_layout: str = "",
    ) -> tuple[Tensor, ...]:
        self.calls.append("backward")
        q_offsets, k_offsets, causal = _npu_sequences(
            (query, key, value, dy, attention_in),
            head_num,
            input_layout,
            atten_mask,
            actual_seq_qlen,
            actual_seq_kvlen,
            sparse_mode,
        )
        assert keep_prob == 1 and softmax_layout == "TND"
        for statistic in (softmax_max, softmax_sum):
            assert statistic.shape == (*query.shape[:2], 8) and statistic.dtype == torch.float32
            assert statistic.is_contiguous() and (statistic == statistic[..., :1]).all()
        grads = plain_backward(
            dy,
            query,
            key,
            value,
            attention_in,
            softmax_max[..., 3],
            softmax_sum[..., 5],
            q_offsets,
            k_offsets,
            causal,
            scale_value,
        )
        return *grads, torch.empty(0), torch.empty(0)


def _npu_sequences(
    tensors: tuple[Tensor, ...],
    heads: int,
    layout: str,
    mask: Tensor | None,
    q_ends: list[int] | None,
    k_ends: list[int] | None,
    sparse_mode: int,
) -> tuple[list[int], list[int], bool]:
    """Offsets of queries and keys, and whether attention is causal; checks what CANN demands."""
    assert layout == "TND" and heads == tensors[0].shape[1] and all(tensor.is_contiguous() for tensor in tensors)
    assert isinstance(q_ends, list) and isinstance(k_ends, list) and 1 <= len(q_ends) <= 2048
    assert all(isinstance(end, int) for end in (*q_ends, *k_ends))
    assert (sparse_mode, mask is not None) in ((0, False), (3, True))
    if mask is not None:
        assert mask.shape == (2048, 2048) and mask.dtype == torch.bool
        assert not mask[5, 5] and mask[5, 6] and not mask[6, 5]
    return [0, *q_ends], [0, *k_ends], mask is not None


def _npu_order(statistic: Tensor, offsets: list[int], layout: str) -> Tensor:
    """Rows ``[T, H, 8]`` as asked for; by default in the order head, row within each sequence."""
    if layout == "TND":
        return statistic.contiguous()
    parts = [statistic[start:end].transpose(0, 1).flatten(0, 1) for start, end in pairwise(offsets)]
    return torch.cat(parts).view(statistic.shape)
