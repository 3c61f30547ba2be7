"""Where prompts and responses lie in a packed row ``[p1 | r11 … r1K | p2 | r21 … ]``.

A layout says who attends to whom and nothing about how that is computed: a prompt's token sees its prompt up to
itself; a response's token sees its whole prompt and its response up to itself; a sliding window of W tokens hides
what lies W or more positions back. What a backend derives from that (blocks, a mask) it keeps in the layout, since
all layers and all three models use the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

T = TypeVar("T")


@dataclass(frozen=True)
class Segment:
    """``length`` consecutive tokens of the row from ``start``."""

    start: int
    length: int

    @property
    def end(self) -> int:
        """The row after the last one."""
        return self.start + self.length


@dataclass(frozen=True)
class GroupSegments:
    """A prompt (positions 0 … Lp-1) and its responses (positions from Lp on), next to each other in the row.

    Empty responses are left out.
    """

    prompt: Segment
    responses: tuple[Segment, ...]

    @property
    def longest(self) -> int:
        """Longest prompt + response, in tokens."""
        return self.prompt.length + max((response.length for response in self.responses), default=0)


@dataclass(frozen=True)
class PromptLayout:
    """A packed row of ``tokens`` tokens.

    Attributes:
        longest: longest prompt + response, in tokens: the context that a position really spans.
        groups: in row order, without gaps.
        device: where tensors derived from the layout live.
    """

    tokens: int
    longest: int
    groups: tuple[GroupSegments, ...]
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    _derived: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False)

    def to(self, device: torch.device) -> PromptLayout:
        """The same layout for tensors on ``device``."""
        return self if device == self.device else PromptLayout(self.tokens, self.longest, self.groups, device)

    def derived(self, key: Hashable, build: Callable[[], T]) -> T:
        """What ``build`` returns, built once per ``key``."""
        if key not in self._derived:
            self._derived[key] = build()
        found: T = self._derived[key]
        return found

    def reach(self, window: int | None) -> int | None:
        """``window``, or None when every sample fits into it: then it hides nothing."""
        return None if window is None or window >= self.longest else window


def build_layout(groups: Iterable[tuple[int, Sequence[int]]]) -> PromptLayout:
    """Lay groups ``(prompt length >= 1, response lengths >= 0)`` one after the other into a row."""
    placed: list[GroupSegments] = []
    position = 0
    for prompt_length, response_lengths in groups:
        prompt = Segment(position, prompt_length)
        position += prompt_length
        responses = []
        for length in response_lengths:
            if length:
                responses.append(Segment(position, length))
            position += length
        placed.append(GroupSegments(prompt, tuple(responses)))
    return PromptLayout(position, max((group.longest for group in placed), default=0), tuple(placed))
