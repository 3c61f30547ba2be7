"""How long a prompt's responses were so far, so that the longest work of an iteration can begin first.

Longest processing time first (Graham 1969): what is long must not be begun last, because everybody waits for the end
of an iteration.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from pa_core.records import Group, Prompt

WEIGHT = 0.5
"""Of the newest group, in the moving average of a prompt's groups."""


class LengthHistory:
    """Mean response length by prompt text, from the groups of this run. Not thread-safe."""

    def __init__(self) -> None:
        self._tokens: dict[bytes, float] = {}

    def observe(self, group: Group) -> None:
        """Note the lengths of a finished group."""
        if not group.samples:
            return
        mean = sum(len(sample) for sample in group.samples) / len(group.samples)
        key = _key(group.prompt)
        self._tokens[key] = mean + (1 - WEIGHT) * (self._tokens.get(key, mean) - mean)

    def longest_first(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """The prompts by decreasing expected length; an unknown one counts as the mean of those known, and equals keep
        their order."""
        known = self._tokens.values()
        mean = sum(known) / len(known) if known else 0.0
        return sorted(prompts, key=lambda prompt: -self._tokens.get(_key(prompt), mean))


def _key(prompt: Prompt) -> bytes:
    return hashlib.blake2b(prompt.text.encode(), digest_size=16).digest()
