"""Shared-prompt attention in two calls of a kernel for sequences of any lengths, without padding and without a mask.

All segments (prompts and responses) attend causally to themselves in one call; the responses of each group attend to
their prompt in the other. The two are merged by log-sum-exp. What these calls do not express, sliding windows and
changed scores, another backend computes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pa_core.model.backend import AttentionRule, Backend
from pa_core.model.layout import PromptLayout
from pa_core.model.lse_merge import give_to_sinks, merged, sinks_gradient
from pa_core.model.rows import Rows
from pa_core.model.varlen_kernels import Sequences, VarlenKernel


@dataclass(frozen=True)
class _ToPrompts:
    """Per group, all its responses' rows against its prompt's rows."""

    queries: Rows
    keys: Rows
    query_sequences: Sequences
    key_sequences: Sequences


@dataclass(frozen=True)
class _Calls:
    """``own``: every segment of the row. ``to_prompts``: None when no group has a response."""

    own: Sequences
    to_prompts: _ToPrompts | None


class VarlenAttention:
    """A :class:`~pa_core.model.backend.Backend` made of a kernel, with another backend for what that does not take."""

    def __init__(self, kernel: VarlenKernel, otherwise: Backend) -> None:
        self._kernel = kernel
        self._otherwise = otherwise

    @property
    def name(self) -> str:
        """Both names, and when it is the second one's turn."""
        return f"{self._kernel.name} ({self._otherwise.name} for sliding windows and {self._kernel.limits})"

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layout: PromptLayout, rule: AttentionRule) -> Tensor:
        """See :class:`~pa_core.model.backend.Backend`."""
        calls = layout.derived("varlen", lambda: _calls(layout))
        plain = layout.reach(rule.window) is None and rule.softcap is None
        if not (plain and self._kernel.takes(q, len(calls.own.ends))):
            return self._otherwise.attend(q, k, v, layout, rule)
        out: Tensor = _VarlenAttention.apply(q, k, v, rule.sinks, calls, rule.scale, self._kernel)
        return out


def _calls(layout: PromptLayout) -> _Calls:
    segments = [segment for group in layout.groups for segment in (group.prompt, *group.responses)]
    own = Sequences.of([segment.length for segment in segments], layout.device)
    answered = [group for group in layout.groups if group.responses]
    if not answered:
        return _Calls(own, None)
    responses = [np.arange(group.responses[0].start, group.responses[-1].end) for group in answered]
    prompts = [np.arange(group.prompt.start, group.prompt.end) for group in answered]
    return _Calls(
        own,
        _ToPrompts(
            Rows.of([np.concatenate(responses)], layout.device),
            Rows.of([np.concatenate(prompts)], layout.device),
            Sequences.of([len(rows) for rows in responses], layout.device),
            Sequences.of([len(rows) for rows in prompts], layout.device),
        ),
    )


class _VarlenAttention(torch.autograd.Function):
    """``q[N, H, D], k[N, Hkv, D], v[N, Hkv, D], sinks[H] or None -> [N, H, D]``."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        calls: _Calls,
        scale: float,
        kernel: VarlenKernel,
    ) -> Tensor:
        out, lse = kernel.forward(q, k, v, calls.own, calls.own, True, scale)
        if calls.to_prompts is not None:
            call = calls.to_prompts
            queries, keys = call.queries, call.keys
            operands = (queries.gather(q)[0], keys.gather(k)[0], keys.gather(v)[0])
            part, part_lse = kernel.forward(*operands, call.query_sequences, call.key_sequences, False, scale)
            both, both_lse = merged(queries.gather(out)[0], queries.gather(lse)[0], part, part_lse)
            queries.write(out, both.unsqueeze(0))
            queries.write(lse, both_lse.unsqueeze(0))
        if sinks is not None:
            lse = give_to_sinks(out, lse, sinks)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.calls, ctx.scale, ctx.kernel = calls, scale, kernel
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        own, call = ctx.calls.own, ctx.calls.to_prompts
        grads = ctx.kernel.backward(grad, q, k, v, out, lse, own, own, True, ctx.scale)
        if call is not None:
            parts = ctx.kernel.backward(
                *(call.queries.gather(side)[0] for side in (grad, q)),
                *(call.keys.gather(side)[0] for side in (k, v)),
                *(call.queries.gather(side)[0] for side in (out, lse)),
                call.query_sequences,
                call.key_sequences,
                False,
                ctx.scale,
            )
            for rows, total, part in zip((call.queries, call.keys, call.keys), grads, parts, strict=True):
                rows.add(total, part.unsqueeze(0))
        grad_sinks = None
        if sinks is not None and ctx.needs_input_grad[3]:
            grad_sinks = sinks_gradient(grad, out, lse, sinks)
        return *grads, grad_sinks, None, None, None
