"""Batches of rows of a packed row's ``[N, …]`` tensors, gathered for one kernel call and scattered back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

#: Row numbers of one element of a batch, ascending.
RowNumbers = NDArray[np.int64]


def padded_rows(elements: Sequence[RowNumbers]) -> tuple[RowNumbers, NDArray[np.bool_]]:
    """Row numbers i64[B, L] and padding bool[B, L]; padding repeats the last row of its element."""
    lengths = np.array([len(element) for element in elements])[:, None]
    offsets = np.arange(int(lengths.max()))[None, :]
    starts = np.concatenate([[0], np.cumsum(lengths[:-1, 0])])[:, None]
    return np.concatenate(elements)[starts + np.minimum(offsets, lengths - 1)], offsets >= lengths


@dataclass(frozen=True)
class Rows:
    """B elements of L rows each, ``[B, L]``; shorter elements are padded on the right.

    Attributes:
        batch: B. length: L.
        start: first row when all rows follow each other without padding (then they are a view), else None.
        index: i64[B * L] rows, where ``start`` is None. Padding repeats a row of its element.
        padding: bool[B, L], True at padding; None without padding.
    """

    batch: int
    length: int
    start: int | None
    index: Tensor | None = None
    padding: Tensor | None = None

    @staticmethod
    def of(elements: Sequence[RowNumbers], device: torch.device) -> Rows:
        """The batch of ``elements``, none of them empty."""
        rows, padding = padded_rows(elements)
        batch, length = rows.shape
        first = int(rows[0, 0])
        if not padding.any() and np.array_equal(rows.ravel(), np.arange(first, first + rows.size)):
            return Rows(batch, length, first)
        index = torch.from_numpy(rows.ravel()).to(device)
        return Rows(batch, length, None, index, torch.from_numpy(padding).to(device) if padding.any() else None)

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
