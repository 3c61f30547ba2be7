"""Shared-prompt attention by FlexAttention: one call per layer over the whole row, its mask built from the layout.

Compiled on CUDA, where blocks of 128 x 128 without a visible pair are skipped. Elsewhere it runs uncompiled and holds
all N x N scores, which is good for checking the mask and nothing else. Soft-capping is a change of scores; a sink is
applied afterwards, as the share of probability that it leaves: sigmoid(lse - sink).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from pa_core.model.backend import AttentionRule
from pa_core.model.layout import PromptLayout


class FlexAttention:
    """See :class:`~pa_core.model.backend.Backend`."""

    name = "flex"

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layout: PromptLayout, rule: AttentionRule) -> Tensor:
        """See :class:`~pa_core.model.backend.Backend`."""
        out, aux = _call(q.device.type)(
            *(rows.transpose(0, 1).unsqueeze(0) for rows in (q, k, v)),
            score_mod=None if rule.softcap is None else _softcap(rule.softcap),
            block_mask=block_mask(layout, rule.window),
            scale=rule.scale,
            enable_gqa=q.shape[1] != k.shape[1],
            return_aux=AuxRequest(lse=rule.sinks is not None),
        )
        if rule.sinks is not None:
            share = torch.sigmoid(aux.lse - rule.sinks.to(aux.lse.dtype)[None, :, None])
            out = out * share.unsqueeze(-1).to(out.dtype)
        attended: Tensor = out[0].transpose(0, 1)
        return attended


@cache
def _call(device_type: str) -> Callable[..., Any]:
    """The function to call; compiled once, for rows of any length, where it is compiled."""
    function: Any = flex_attention
    return cast(Callable[..., Any], torch.compile(function, dynamic=True) if device_type == "cuda" else function)


@cache
def _softcap(cap: float) -> Callable[..., Tensor]:
    """The same function for the same ``cap``, so that nothing is compiled twice."""

    def score(value: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return cap * torch.tanh(value / cap)

    return score


def block_mask(layout: PromptLayout, window: int | None) -> BlockMask:
    """Who sees whom in ``layout`` under a sliding window (None: full attention), built once."""
    reach = layout.reach(window)
    return layout.derived(("flex", reach), lambda: _build(layout, reach))


def _build(layout: PromptLayout, window: int | None) -> BlockMask:
    segment, prompt, position = _row_tables(layout)

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        shared = (segment[key] == segment[query]) | (segment[key] == prompt[query])
        seen = shared & (key <= query)
        return seen if window is None else seen & (position[key] > position[query] - window)

    tokens, on_cuda = layout.tokens, layout.device.type == "cuda"
    return create_block_mask(visible, None, None, tokens, tokens, device=layout.device, _compile=on_cuda)


def _row_tables(layout: PromptLayout) -> tuple[Tensor, Tensor, Tensor]:
    """Per row, i32[N]: its segment's first row, its prompt's first row, and its position in the sample."""
    segments: list[tuple[int, int, int, int]] = []
    for group in layout.groups:
        start, length = group.prompt.start, group.prompt.length
        segments.append((start, start, 0, length))
        segments += [(response.start, start, length, response.length) for response in group.responses]
    columns = torch.tensor(segments, dtype=torch.int32)
    lengths = columns[:, 3].long()
    first, prompt, offset = (columns[:, column].repeat_interleave(lengths) for column in range(3))
    position = torch.arange(layout.tokens, dtype=torch.int32) - first + offset
    return first.to(layout.device), prompt.to(layout.device), position.to(layout.device)
