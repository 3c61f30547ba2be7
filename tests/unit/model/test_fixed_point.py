"""Fixed-point gradient sums against exact arithmetic, in every order."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from pa_core.errors import TrainingError
from pa_core.model.fixed_point import LARGEST, FixedPointSum


def _sum(gradients: list[Tensor], groups: int = 8, units: float = 4.0, dtype: torch.dtype = torch.float32) -> Tensor:
    weight = nn.Parameter(torch.zeros(len(gradients[0]), dtype=dtype))
    total = FixedPointSum({"weight": weight}, groups, units)
    for number, gradient in enumerate(gradients):
        weight.grad = gradient.to(dtype)
        total.take(f"g{number}")
        assert weight.grad is None
    total.give()
    assert weight.grad is not None
    return weight.grad


VALUES = st.floats(-float(LARGEST), float(LARGEST), width=32)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(VALUES, VALUES), min_size=1, max_size=8), st.randoms())
def test_the_sum_is_the_exact_one_rounded_and_the_same_in_every_order(rows: list[tuple[float, ...]], random) -> None:
    gradients = [torch.tensor(row) for row in rows]
    ours = _sum(gradients)
    random.shuffle(gradients)
    assert torch.equal(_sum(gradients), ours)
    exponent = FixedPointSum({}, 8, 4.0).exponent
    for column, value in enumerate(ours.tolist()):
        exact = sum((Fraction(row[column]) for row in rows), Fraction())
        rounding = abs(exact) * Fraction(2) ** -24 + Fraction(len(rows), 2) * Fraction(2) ** -exponent
        assert abs(Fraction(value) - exact) <= rounding


def test_terms_that_float_addition_swallows_in_some_orders_are_never_lost() -> None:
    gradients = [torch.tensor([value]) for value in (4096.0, 1e-5, -4096.0)]
    floats = {float(a + b + c) for a, b, c in itertools.permutations(gradients)}
    assert len(floats) > 1
    (ours,) = {float(_sum(list(order))) for order in itertools.permutations(gradients)}
    assert ours == pytest.approx(1e-5, rel=1e-5)


def test_as_many_groups_as_there_are_at_the_edge_of_the_range_do_not_overflow() -> None:
    edge = 4096.0 * 4  # LARGEST per unit, of 4 units
    assert float(_sum([torch.tensor([edge])] * 8)) == 8 * edge
    assert float(_sum([torch.tensor([-edge])] * 8)) == -8 * edge


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3e38, -1e9])
def test_what_cannot_be_summed_is_refused_with_group_parameter_and_fix(value: float) -> None:
    with pytest.raises(TrainingError, match=r"group g1: its gradient of weight .* deterministic=false"):
        _sum([torch.tensor([1.0, 0.0]), torch.tensor([0.0, value])])


def test_mean_gradients_below_adams_eps_are_resolved_at_the_size_of_real_runs() -> None:
    groups, units = 512, 16 * 32_768.0  # 512 groups of 16 responses of up to 32k tokens
    weight = nn.Parameter(torch.zeros(1))
    total = FixedPointSum({"weight": weight}, groups, units)
    mean = 1e-9
    for number in range(groups):
        weight.grad = torch.tensor([mean * units / 100])  # responses of 1 % of the longest
        total.take(f"g{number}")
    total.give()
    assert weight.grad is not None
    assert float(weight.grad) / (groups * units / 100) == pytest.approx(mean, rel=0.03)


def test_bfloat16_gradients_are_summed_exactly_and_rounded_once() -> None:
    gradients = [torch.tensor([1.0]), *[torch.tensor([2.0**-9])] * 4]  # each of them alone vanishes beside 1
    assert float(_sum(gradients, dtype=torch.bfloat16)) == 1.0 + 2.0**-7


def test_a_parameter_without_gradient_stays_without() -> None:
    used, idle = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    total = FixedPointSum({"used": used, "idle": idle}, 2, 1.0)
    used.grad = torch.ones(1)
    total.take("g0")
    total.give()
    assert used.grad is not None and float(used.grad) == 1.0
    assert idle.grad is None
