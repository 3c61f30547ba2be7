"""Advantages against values computed by hand from the formulas.

The group is [1, 0, 0, 1, unscored, 2]: scored mean 0.8, squared distances 0.04, 0.64, 0.64, 0.04, 1.44 (sum 2.8),
unbiased std sqrt(2.8 / 4) = 0.83666003, population std sqrt(2.8 / 5) = 0.74833148.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pa_core.objective.advantages import batch_advantages, group_advantages
from pa_core.objective.config import AdvantageConfig
from pa_core.objective.conventions import PRESETS, AdvantageConvention, resolve_advantage

NAN = math.nan
REWARDS = torch.tensor([1.0, 0.0, 0.0, 1.0, NAN, 2.0])
DISTANCES = [0.2, -0.8, -0.8, 0.2, None, 1.2]


def _scaled(divisor: float) -> Tensor:
    return torch.tensor([0.0 if d is None else d / divisor for d in DISTANCES])


@pytest.mark.parametrize(
    ("preset", "divisor"),
    [
        ("trl", 0.83666003 + 1e-4),
        ("trl_async", 0.74833148 + 1e-8),
        ("verl", 0.83666003 + 1e-6),
        ("openrlhf", 0.83666003 + 1e-9),
        ("open_instruct", 0.74833148 + 1e-8),
        ("dr_grpo", 1.0),
        ("rloo", 0.8),  # r - mean of the other four = (r - mean) * 5 / 4
    ],
)
def test_a_preset_gives_its_librarys_advantages(preset: str, divisor: float) -> None:
    result = group_advantages(REWARDS, PRESETS[preset])
    torch.testing.assert_close(result.values, _scaled(divisor), rtol=1e-6, atol=1e-7)
    assert (result.scored, result.zero_variance, result.trainable) == (5, False, True)
    assert result.values[4] == 0


def test_the_small_differences_in_eps_are_really_there() -> None:
    rewards = torch.tensor([0.0, 1e-3])
    values = {name: float(group_advantages(rewards, PRESETS[name]).values[1]) for name in ("trl", "verl", "openrlhf")}
    std = 1e-3 / math.sqrt(2)
    for name, eps in (("trl", 1e-4), ("verl", 1e-6), ("openrlhf", 1e-9)):
        assert values[name] == pytest.approx(5e-4 / (std + eps), rel=1e-6)


def test_leave_one_out_takes_both_statistics_over_the_others() -> None:
    # For r = [3, 0, 1, 2]: others of 3 are 0, 1, 2 (mean 1, unbiased std 1); of 0 are 1, 2, 3 (2, 1);
    # of 1 are 0, 2, 3 (5/3, sqrt(7/3)); of 2 are 0, 1, 3 (4/3, sqrt(7/3)).
    eps = 1e-6
    expected = [
        2 / (1 + eps),
        -2 / (1 + eps),
        (1 - 5 / 3) / (math.sqrt(7 / 3) + eps),
        (2 - 4 / 3) / (math.sqrt(7 / 3) + eps),
    ]
    result = group_advantages(torch.tensor([3.0, 0.0, 1.0, 2.0]), PRESETS["nemo_rl"])
    torch.testing.assert_close(result.values, torch.tensor(expected), rtol=1e-6, atol=0)


def test_leave_one_out_does_not_divide_where_the_others_agree() -> None:
    # The others of 1 are all 0; those of a 0 are 0, 0, 1: mean 1/3, unbiased std sqrt(1/3).
    result = group_advantages(torch.tensor([1.0, 0.0, 0.0, 0.0]), PRESETS["nemo_rl"])
    low = -(1 / 3) / (math.sqrt(1 / 3) + 1e-6)
    torch.testing.assert_close(result.values, torch.tensor([1.0, low, low, low]), rtol=1e-6, atol=0)
    assert group_advantages(torch.tensor([1.0, 0.0]), PRESETS["nemo_rl"]).values.tolist() == [1.0, -1.0]


def test_a_batch_level_std_is_taken_over_distances_to_each_groups_mean() -> None:
    # Distances: +-1 and +-3 -> squares sum 20, over 4 - 1 samples. The lone sample stays out.
    groups = [torch.tensor([0.0, 2.0, NAN]), torch.tensor([10.0, 4.0]), torch.tensor([99.0, NAN])]
    divisor = math.sqrt(20 / 3) + 1e-5
    results = batch_advantages(groups, PRESETS["areal"])
    torch.testing.assert_close(results[0].values, torch.tensor([-1 / divisor, 1 / divisor, 0.0]))
    torch.testing.assert_close(results[1].values, torch.tensor([3 / divisor, -3 / divisor]))
    assert results[2].values.tolist() == [0.0, 0.0] and not results[2].trainable


def test_reinforce_pp_divides_by_the_std_of_the_whole_batch() -> None:
    groups = [torch.tensor([0.0, 2.0]), torch.tensor([10.0, 4.0])]
    results = batch_advantages(groups, PRESETS["reinforce_pp"])
    expected = torch.tensor([-1.0, 1.0, 3.0, -3.0]) / math.sqrt(20 / 3)
    torch.testing.assert_close(torch.cat([result.values for result in results]), expected)


def test_a_std_of_the_batchs_rewards_ignores_groups() -> None:
    # 0, 2, 10, 4, 5: mean 4.2, squared distances sum 56.8, over 5 - 1. The lone sample's reward is one of them.
    groups = [torch.tensor([0.0, 2.0]), torch.tensor([10.0, 4.0]), torch.tensor([5.0, NAN])]
    results = batch_advantages(groups, AdvantageConvention("batch_rewards", 1e-4))
    expected = torch.tensor([-1.0, 1.0, 3.0, -3.0]) / (math.sqrt(56.8 / 4) + 1e-4)
    torch.testing.assert_close(torch.cat([result.values for result in results[:2]]), expected)
    assert not results[2].trainable


def test_a_group_alone_has_no_batch_level_std() -> None:
    with pytest.raises(ValueError, match="batch_advantages"):
        group_advantages(REWARDS, PRESETS["areal"])


def test_without_a_batch_level_std_a_batch_is_its_groups() -> None:
    groups = [REWARDS, torch.tensor([0.0, 3.0])]
    for ours, alone in zip(
        batch_advantages(groups, PRESETS["verl"]), [group_advantages(g, PRESETS["verl"]) for g in groups], strict=True
    ):
        assert torch.equal(ours.values, alone.values)


@pytest.mark.parametrize("preset", [name for name in PRESETS if not PRESETS[name].whole_batch])
@pytest.mark.parametrize("rewards", [[NAN, NAN, NAN], [1.0, NAN, NAN]])
def test_fewer_than_two_scored_samples_train_nothing(preset: str, rewards: list[float]) -> None:
    result = group_advantages(torch.tensor(rewards), PRESETS[preset])
    assert result.values.tolist() == [0.0, 0.0, 0.0]
    assert not result.trainable and not result.zero_variance


@pytest.mark.parametrize("preset", [name for name in PRESETS if not PRESETS[name].whole_batch])
@pytest.mark.parametrize(
    "rewards", [[0.0, 0.0, 0.0], [0.3, 0.1 + 0.2, 0.3], [1e6 / 3, 1e6 / 3, NAN], [-0.7, -0.6 - 0.1, -0.7]]
)
def test_equal_rewards_give_exact_zeros_whatever_their_last_bits(preset: str, rewards: list[float]) -> None:
    result = group_advantages(torch.tensor(rewards, dtype=torch.float64), PRESETS[preset])
    assert result.values.abs().max() == 0
    assert result.zero_variance and result.trainable


def test_config_fields_override_the_preset() -> None:
    convention = resolve_advantage(AdvantageConfig(preset="trl", std="none"))
    assert convention == AdvantageConvention("none", 1e-4)
    assert group_advantages(torch.tensor([0.0, 4.0]), convention).values.tolist() == [-2.0, 2.0]


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=8),
    st.integers(0, 3),
    st.sampled_from(sorted(name for name in PRESETS if not PRESETS[name].whole_batch)),
)
def test_unscored_samples_change_nobody_elses_advantage(rewards: list[float], unscored: int, preset: str) -> None:
    alone = group_advantages(torch.tensor(rewards), PRESETS[preset]).values
    among = group_advantages(torch.tensor([NAN] * unscored + rewards), PRESETS[preset]).values
    assert torch.equal(among[unscored:], alone)
