"""What a way of computing attention over a packed row has to provide.

A further way is one file and one line in
:func:`pa_core.model.attention.backend_for`. It is a :class:`Backend`, which gets the whole row at once; or, where a
fused kernel returns the log-sum-exp and takes it back in its backward pass, only a
:class:`pa_core.model.kernels.Kernel`, which :class:`pa_core.model.block_attention.BlockAttention` makes a backend of.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from pa_core.model.layout import PromptLayout


@dataclass(frozen=True)
class AttentionRule:
    """How a layer turns queries and keys into probabilities, besides who sees whom.

    Attributes:
        scale: factor on q · k.
        window: a query at position p sees keys from position p - window + 1 on; None: all before it.
        softcap: c in c · tanh(score / c), after scaling; None: scores as they are.
        sinks: ``[H]``, a learned score per head that takes probability and has no value (GPT-OSS, arXiv 2508.10925,
            section 2.3); may require gradient. None: no sink.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


class Backend(Protocol):
    """Exact shared-prompt attention, differentiable in q, k, v and the rule's sinks."""

    @property
    def name(self) -> str:
        """What the log calls it."""
        ...

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layout: PromptLayout, rule: AttentionRule) -> Tensor:
        """``q[N, H, D], k[N, Hkv, D], v[N, Hkv, D] -> [N, H, D]`` over a packed row of N tokens.

        H is a multiple of Hkv; any strides. What is derived from the layout belongs into
        :meth:`~pa_core.model.layout.PromptLayout.derived`, under a key that begins with the backend's name.
        """
        ...
