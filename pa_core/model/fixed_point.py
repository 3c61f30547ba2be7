"""Gradient sums that do not depend on the order of their terms, in fixed-point integers.

Floating-point addition is not associative: the same groups in another order give a sum that differs in its last
bits, which Adam, dividing by the gradient's own size, may blow up. Integer addition is associative. So each group's
gradient, computed alone, is rounded to multiples of a constant power of two, summed as int64, and turned back once.

Resolution and range follow from the config alone, never from what has arrived. With U the largest number of units
(the loss's denominator: tokens or samples) that one group may have, and N the groups of an iteration:

- *range*: a group's gradient may reach :data:`LARGEST` per unit in every entry. Real gradients are smaller by many
  orders; more is an error that names the group. N such groups fit into 62 bits, so no sum can overflow.
- *resolution*: what is left of the 62 bits. Each group is rounded once, to 2^-exponent, which is about
  N LARGEST / 2^62 of gradient per unit where it has its U units, and 100 times that where it has 1 % of them. For
  512 groups the latter is 5e-11, a two-hundredth of Adam's default eps; for 16 groups it is 1e-12.

Memory: 8 bytes per trained number for the sums, beside the gradient's own 4, and 12 more for one parameter at a time.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.utils import deterministic

from pa_core.errors import TrainingError

LARGEST = 4096.0
"""Largest gradient entry per unit that a group may have."""

_BITS = 62


class FixedPointSum:
    """The sum of groups' gradients, bit for bit the same in every order of the groups.

    Args:
        parameters: the trained parameters, by name.
        groups: N, most groups that are ever summed.
        units: U, most units of one group.

    Attributes:
        exponent: gradients are rounded to multiples of 2^-exponent.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], groups: int, units: float) -> None:
        self._parameters = parameters
        bits = _BITS - math.ceil(math.log2(max(1, groups)))  # of one group: N of them stay below 2^62
        self.exponent = bits - math.ceil(math.log2(LARGEST * max(1.0, units)))
        self._scale = 2.0**self.exponent
        self._largest = 2.0 ** (bits - self.exponent)
        self._sums: dict[str, Tensor] = {}

    def begin(self) -> None:
        """Forget the sum."""
        self._sums = {}

    @torch.no_grad()
    def take(self, group_id: str) -> None:
        """Move the gradient that the parameters hold, that of group ``group_id`` alone, into the sum.

        Raises:
            TrainingError: an entry is not finite, or beyond the range. The sum is then of no use any more.
        """
        for name, parameter in self._parameters.items():
            if parameter.grad is None:
                continue
            low, high = torch.aminmax(parameter.grad)
            largest = max(-float(low), float(high))
            if not largest <= self._largest:  # written so that NaN is refused as well
                raise TrainingError(self._refusal(group_id, name, largest))
            # Scaling by a power of two is exact, and so is an integer-valued float as int64: this rounds once.
            scaled = parameter.grad.to(torch.promote_types(parameter.dtype, torch.float32)) * self._scale
            rounded = scaled.round_().to(torch.int64)
            if name in self._sums:
                self._sums[name] += rounded
            else:
                self._sums[name] = rounded
            parameter.grad = None

    def _refusal(self, group_id: str, name: str, largest: float) -> str:
        found = f"reaches {largest:.3g}" if math.isfinite(largest) else "is not finite"
        return (
            f"group {group_id}: its gradient of {name} {found}; deterministic=true sums up to {self._largest:.3g} per "
            "group. The version itself is intact in the store: lower optimizer.learning_rate, look for a reward with "
            "huge values, or set deterministic=false"
        )

    @torch.no_grad()
    def give(self) -> None:
        """Make the sum the parameters' gradient, in their type, and forget it."""
        for name in list(self._sums):
            parameter = self._parameters[name]
            wide = self._sums.pop(name).to(torch.promote_types(parameter.dtype, torch.float32)) / self._scale
            parameter.grad = wide.to(parameter.dtype)


def deterministic_kernels() -> None:
    """Have torch take kernels whose result is the same every time, for the whole process.

    It matters on accelerators, where index_add and scatter_add otherwise add in the order in which threads come. On
    a CPU the same number of threads gives the same result anyway; another number may not.
    """
    # cuBLAS reads this when it is first used; without it torch refuses its matrix products in this mode.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Filling fresh memory is for finding bugs; nothing here reads memory that was not written.
    deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # a property of the module
