"""Where prompts and responses lie in a packed row, and which blocks of attention that leaves to compute.

A row is ``[p1 | r11 … r1K | p2 | r21 … ]``. Attention over it falls into two kinds of blocks: every segment (a
prompt or a response) attends causally to itself, and the responses of a group attend to the whole prompt. Nothing
else is allowed, so nothing else is computed. Blocks of about equal size are batched into one kernel call.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# A batch takes a shorter block along while the padding stays below a quarter of its length or below 16 tokens, where
# a further kernel call would cost more than the padding does.
_PADDED_SHARE = 0.75
_PADDED_TOKENS = 16
# Blocks with this many scores per head keep a kernel busy on their own; batching would only add copies.
_LARGE_BLOCK = 1 << 16


@dataclass(frozen=True)
class Segment:
    """``length`` consecutive tokens of the row from ``start``."""

    start: int
    length: int


@dataclass(frozen=True)
class Rows:
    """A batch of equally long segments of the row, ``[B, L]``; shorter ones are padded on the right.

    Attributes:
        batch: B. length: L.
        start: first row when the segments follow each other without padding (then they are a view), else None.
        index: i64[B * L] rows, where ``start`` is None. Padding repeats a row of its segment.
        padding: bool[B, L], True at padding; None without padding.
    """

    batch: int
    length: int
    start: int | None
    index: Tensor | None = None
    padding: Tensor | None = None

    @staticmethod
    def of(segments: Sequence[Segment]) -> Rows:
        """The batch of ``segments``, none of them empty."""
        length = max(segment.length for segment in segments)
        first = segments[0].start
        if all(s == Segment(first + number * length, length) for number, s in enumerate(segments)):
            return Rows(len(segments), length, first)
        starts = torch.tensor([segment.start for segment in segments]).unsqueeze(1)
        lengths = torch.tensor([segment.length for segment in segments]).unsqueeze(1)
        offsets = torch.arange(length).unsqueeze(0)
        index = (starts + torch.minimum(offsets, lengths - 1)).flatten()
        padding = offsets >= lengths
        return Rows(len(segments), length, None, index, padding if bool(padding.any()) else None)

    def to(self, device: torch.device) -> Rows:
        """The same rows with their index on ``device``."""
        if self.index is None:
            return self
        padding = None if self.padding is None else self.padding.to(device)
        return Rows(self.batch, self.length, self.start, self.index.to(device), padding)

    def gather(self, source: Tensor) -> Tensor:
        """``source[N, …]`` at these rows: ``[B, L, …]``, a view where the rows are consecutive."""
        if self.start is not None:
            rows = source.narrow(0, self.start, self.batch * self.length)
        else:
            assert self.index is not None
            rows = source.index_select(0, self.index)
        return rows.view(self.batch, self.length, *source.shape[1:])

    def gather_zeroed(self, source: Tensor) -> Tensor:
        """As :meth:`gather`, with zeros at the padding."""
        rows = self.gather(source)
        if self.padding is None:
            return rows
        return rows.masked_fill(self.padding.view(self.batch, self.length, *(1,) * (rows.dim() - 2)), 0)

    def write(self, target: Tensor, values: Tensor) -> None:
        """Set ``target[N, …]`` at these rows to ``values[B, L, …]``; padding is left out."""
        if self.start is not None:
            self.gather(target).copy_(values)
        elif self.padding is None:
            assert self.index is not None
            target.index_copy_(0, self.index, values.flatten(0, 1))
        else:
            assert self.index is not None
            kept = ~self.padding
            target.index_copy_(0, self.index[kept.flatten()], values[kept])

    def add(self, target: Tensor, values: Tensor) -> None:
        """Add ``values[B, L, …]`` to ``target[N, …]``; ``values`` must be zero at the padding."""
        if self.start is not None:
            self.gather(target).add_(values)
        else:
            assert self.index is not None
            target.index_add_(0, self.index, values.flatten(0, 1))


@dataclass(frozen=True)
class CrossBlock:
    """The responses of B groups (queries) against the prompts of the same groups (keys)."""

    queries: Rows
    keys: Rows


@dataclass(frozen=True)
class PromptLayout:
    """All attention blocks of a packed row of ``tokens`` tokens.

    Attributes:
        longest: longest prompt + response, in tokens: the context that a position really spans.
        own: segments that attend causally to themselves.
        cross: responses that attend to their prompt.
    """

    tokens: int
    longest: int
    own: tuple[Rows, ...]
    cross: tuple[CrossBlock, ...]

    def to(self, device: torch.device) -> PromptLayout:
        """The same layout with its indices on ``device``."""
        return PromptLayout(
            self.tokens,
            self.longest,
            tuple(rows.to(device) for rows in self.own),
            tuple(CrossBlock(block.queries.to(device), block.keys.to(device)) for block in self.cross),
        )


def build_layout(groups: Iterable[tuple[int, Sequence[int]]]) -> PromptLayout:
    """Lay groups ``(prompt length >= 1, response lengths >= 0)`` one after the other into a row."""
    segments: list[Segment] = []
    crosses: list[tuple[Segment, Segment]] = []
    position = longest = 0
    for prompt_length, response_lengths in groups:
        prompt = Segment(position, prompt_length)
        segments.append(prompt)
        position += prompt_length
        responses = Segment(position, sum(response_lengths))
        for length in response_lengths:
            if length:
                segments.append(Segment(position, length))
            position += length
        if responses.length:
            crosses.append((responses, prompt))
        longest = max(longest, prompt_length + max(response_lengths, default=0))
    return PromptLayout(
        tokens=position,
        longest=longest,
        own=tuple(Rows.of(bucket) for bucket in _bucket_segments(segments)),
        cross=tuple(
            CrossBlock(Rows.of([queries for queries, _ in bucket]), Rows.of([keys for _, keys in bucket]))
            for bucket in _bucket_crosses(crosses)
        ),
    )


def _close(shorter: int, longer: int) -> bool:
    return shorter >= _PADDED_SHARE * longer or longer - shorter <= _PADDED_TOKENS


def _bucket_segments(segments: list[Segment]) -> list[list[Segment]]:
    """Segments of similar length together, longest first, in row order where lengths are equal."""
    buckets: list[list[Segment]] = []
    for segment in sorted(segments, key=lambda s: (-s.length, s.start)):
        head = buckets[-1][0] if buckets else None
        # Equal lengths share a bucket even when large: neighbours of equal length are a view.
        fits = head is not None and (
            segment.length == head.length or (head.length**2 < _LARGE_BLOCK and _close(segment.length, head.length))
        )
        if fits:
            buckets[-1].append(segment)
        else:
            buckets.append([segment])
    return buckets


def _bucket_crosses(crosses: list[tuple[Segment, Segment]]) -> list[list[tuple[Segment, Segment]]]:
    """Groups whose prompt and responses have similar lengths together; large groups alone."""
    buckets: list[list[tuple[Segment, Segment]]] = []
    sizes: list[tuple[int, int]] = []
    for queries, keys in sorted(crosses, key=lambda c: (-c[1].length, -c[0].length)):
        for number, (most_queries, most_keys) in enumerate(sizes):
            small = most_queries * most_keys < _LARGE_BLOCK
            near = _close(min(queries.length, most_queries), max(queries.length, most_queries))
            if small and near and _close(keys.length, most_keys):
                buckets[number].append((queries, keys))
                sizes[number] = (max(queries.length, most_queries), most_keys)
                break
        else:
            buckets.append([(queries, keys)])
            sizes.append((queries.length, keys.length))
    return buckets
