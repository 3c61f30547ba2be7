"""Which blocks of attention a packed row leaves to compute: those with a visible pair, and nothing else.

Without a sliding window these are two kinds: every segment (a prompt or a response) attends causally to itself, and
all responses of a group at once attend to the whole prompt. With a window of W, segments are cut into tiles of at
most W tokens. A tile attends causally to itself; of what lies before it, the keys that all its queries see are a
block without a mask, and only the strip that the window's edge crosses, at most one tile wide, has one. Keys beyond
the window of a tile's first query are never read.

Blocks of about equal size are batched into one kernel call. That pads: a batch takes a shorter block along while the
padding stays below a quarter of its length or below 16 tokens, where a further kernel call would cost more than the
padding does. It concerns these small attention blocks alone; no other part of the model sees a padded token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pa_core.model.layout import GroupSegments, PromptLayout, Segment
from pa_core.model.rows import RowNumbers, Rows, padded_rows

_PADDED_SHARE = 0.75
_PADDED_TOKENS = 16
# Blocks with this many scores per head keep a kernel busy on their own; batching would only add copies.
_LARGE_BLOCK = 1 << 16
# Smaller tiles waste less at a window's edge, larger ones need fewer merges.
_SMALLEST_TILE = 64


@dataclass(frozen=True)
class Block:
    """B batched blocks of attention.

    Attributes:
        causal: query i sees keys 0 … i; queries and keys are then the same rows.
        hidden: bool[B or 1, Lq or 1, Lk], True where a query does not see a key; None when it sees all of them. Every
            query sees at least one.
    """

    queries: Rows
    keys: Rows
    causal: bool
    hidden: Tensor | None = None

    def mask(self, dtype: torch.dtype) -> Tensor | None:
        """:attr:`hidden` as additive mask ``[B or 1, 1, Lq or 1, Lk]``."""
        if self.hidden is None:
            return None
        mask = torch.zeros(self.hidden.shape, dtype=dtype, device=self.hidden.device)
        return mask.masked_fill_(self.hidden, -torch.inf).unsqueeze(1)


@dataclass(frozen=True)
class _Piece:
    """Queries against the keys of their prompt (``shared``) or of their own segment.

    They see all of these keys or, at the window's ``edge``, those less than the window behind. Among pieces with the
    same two flags no query occurs twice, so that they may be merged in one call.
    """

    queries: RowNumbers
    keys: RowNumbers
    shared: bool
    edge: bool


def attention_blocks(layout: PromptLayout, window: int | None) -> tuple[Block, ...]:
    """All blocks of ``layout`` in a layer with that sliding window (None: full attention), built once.

    Each row is a query of exactly one causal block; those come first.
    """
    reach = layout.reach(window)
    return layout.derived(("blocks", reach), lambda: _build(layout, reach))


def _build(layout: PromptLayout, window: int | None) -> tuple[Block, ...]:
    own: list[RowNumbers] = []
    pieces: list[_Piece] = []
    for group in layout.groups:
        if window is None or group.longest <= window:
            own += [_rows(segment) for segment in (group.prompt, *group.responses)]
            if group.responses:
                responses = np.arange(group.responses[0].start, group.responses[-1].end)
                pieces.append(_Piece(responses, _rows(group.prompt), True, False))
        else:
            tile = min(window, max(_SMALLEST_TILE, window // 4))
            own += [_rows(part) for segment in (group.prompt, *group.responses) for _, part in _tiles(segment, tile)]
            pieces += _windowed(group, window, tile)
    positions = _positions(layout)
    causal = [Rows.of(bucket, layout.device) for bucket in _bucket_own(own)]
    blocks = [Block(rows, rows, True) for rows in causal]
    for shared, edge in product((True, False), (False, True)):
        buckets = _bucket_pieces([piece for piece in pieces if (piece.shared, piece.edge) == (shared, edge)])
        blocks += [_block(bucket, positions, window if edge else None, layout.device) for bucket in buckets]
    return tuple(blocks)


def _rows(segment: Segment) -> RowNumbers:
    return np.arange(segment.start, segment.end)


def _positions(layout: PromptLayout) -> NDArray[np.int64]:
    """Each row's position in its sample, i64[N]."""
    positions = np.empty(layout.tokens, dtype=np.int64)
    for group in layout.groups:
        positions[group.prompt.start : group.prompt.end] = np.arange(group.prompt.length)
        for response in group.responses:
            positions[response.start : response.end] = group.prompt.length + np.arange(response.length)
    return positions


def _tiles(segment: Segment, tile: int) -> Iterator[tuple[int, Segment]]:
    """Consecutive parts of at most ``tile`` tokens, each with its offset in ``segment``."""
    for offset in range(0, segment.length, tile):
        yield offset, Segment(segment.start + offset, min(tile, segment.length - offset))


def _windowed(group: GroupSegments, window: int, tile: int) -> Iterator[_Piece]:
    """What the tiles of a group attend to besides themselves."""
    for segment in (group.prompt, *group.responses):
        for offset, part in _tiles(segment, tile):
            yield from _history([part], offset, Segment(segment.start, offset), window, shared=False)
    prompt = group.prompt
    # The n-th tiles of all responses are at the same positions: they see the same part of the prompt.
    for offset in range(0, window - 1, tile):
        parts = [
            Segment(response.start + offset, min(tile, response.length - offset))
            for response in group.responses
            if response.length > offset
        ]
        yield from _history(parts, prompt.length + offset, prompt, window, shared=True)


def _history(parts: Sequence[Segment], position: int, keys: Segment, window: int, shared: bool) -> Iterator[_Piece]:
    """``parts``, all beginning at ``position``, against ``keys``, which begin at position 0 and end before them."""
    if not parts:
        return
    seen_by_all = max(0, position + max(part.length for part in parts) - window)
    seen_by_first = max(0, position - window + 1)
    if seen_by_all < keys.length:
        queries = np.concatenate([_rows(part) for part in parts])
        yield _Piece(queries, np.arange(keys.start + seen_by_all, keys.end), shared, False)
    edge = min(seen_by_all, keys.length)
    if seen_by_first < edge:
        # Later queries see nothing of the strip, not even its last key.
        seeing = edge - 1 - position + window
        queries = np.concatenate([_rows(part)[:seeing] for part in parts])
        yield _Piece(queries, np.arange(keys.start + seen_by_first, keys.start + edge), shared, True)


def _block(bucket: Sequence[_Piece], positions: NDArray[np.int64], window: int | None, device: torch.device) -> Block:
    queries, keys = [piece.queries for piece in bucket], [piece.keys for piece in bucket]
    key_rows, padding = padded_rows(keys)
    hidden: NDArray[np.bool_] | None = padding[:, None, :] if padding.any() else None
    if window is not None:
        query_rows, _ = padded_rows(queries)
        hidden = positions[key_rows][:, None, :] <= positions[query_rows][:, :, None] - window
        hidden |= padding[:, None, :]
        if (hidden == hidden[:1]).all():
            hidden = hidden[:1]
    return Block(
        Rows.of(queries, device),
        Rows.of(keys, device),
        False,
        None if hidden is None else torch.from_numpy(hidden).to(device),
    )


def _close(shorter: int, longer: int) -> bool:
    return shorter >= _PADDED_SHARE * longer or longer - shorter <= _PADDED_TOKENS


def _bucket_own(segments: list[RowNumbers]) -> list[list[RowNumbers]]:
    """Segments of similar length together, longest first, in row order where lengths are equal."""
    buckets: list[list[RowNumbers]] = []
    for rows in sorted(segments, key=lambda rows: (-len(rows), rows[0])):
        longest = len(buckets[-1][0]) if buckets else 0
        # Equal lengths share a bucket even when large: neighbours of equal length are a view.
        fits = len(rows) == longest or (longest**2 < _LARGE_BLOCK and _close(len(rows), longest))
        if buckets and fits:
            buckets[-1].append(rows)
        else:
            buckets.append([rows])
    return buckets


@dataclass
class _Bucket:
    """Pieces of one kernel call; the first has the most keys."""

    pieces: list[_Piece]
    fewest: int
    most: int

    def takes(self, piece: _Piece) -> bool:
        """Whether ``piece`` may join: the call stays small and its padding within bounds."""
        fewest, most = min(self.fewest, len(piece.queries)), max(self.most, len(piece.queries))
        return self.most * len(self.pieces[0].keys) < _LARGE_BLOCK and _close(fewest, most)

    def add(self, piece: _Piece) -> None:
        self.pieces.append(piece)
        self.fewest, self.most = min(self.fewest, len(piece.queries)), max(self.most, len(piece.queries))


def _bucket_pieces(pieces: list[_Piece]) -> list[list[_Piece]]:
    """Pieces of similar shape together; large ones alone."""
    buckets: list[list[_Piece]] = []
    candidates: list[_Bucket] = []
    for piece in sorted(pieces, key=lambda piece: (-len(piece.keys), -len(piece.queries))):
        queries, keys = len(piece.queries), len(piece.keys)
        if queries * keys >= _LARGE_BLOCK:
            buckets.append([piece])
            continue
        # Keys only get fewer from here on: what is too long for this piece is too long for all that follow.
        candidates = [bucket for bucket in candidates if _close(keys, len(bucket.pieces[0].keys))]
        fitting = next((bucket for bucket in candidates if bucket.takes(piece)), None)
        if fitting is None:
            fitting = _Bucket([], queries, queries)
            candidates.append(fitting)
            buckets.append(fitting.pieces)
        fitting.add(piece)
    return buckets
