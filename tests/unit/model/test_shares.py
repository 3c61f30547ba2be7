"""Groups spread over processes: every response once, about equal work, the same result for everybody."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from pa_core.model.packing import Attention, TrainGroup, TrainSample
from pa_core.model.shares import shares


def group(name: str, prompt: int, *responses: int) -> TrainGroup:
    samples = tuple(
        TrainSample(
            np.arange(length, dtype=np.int32), np.zeros(length, np.float32), np.ones(length, np.bool_), float(i)
        )
        for i, length in enumerate(responses)
    )
    return TrainGroup(name, np.zeros(prompt, np.int32), samples)


def contents(parts: list[list[TrainGroup]]) -> Counter[tuple[str, float]]:
    return Counter((part.id, sample.advantage) for share in parts for part in share for sample in part.samples)


def load(share: list[TrainGroup], attention: Attention = "shared_prompt") -> int:
    prompts = sum(len(part.prompt_ids) * (1 if attention == "shared_prompt" else len(part.samples)) for part in share)
    return prompts + sum(sample.inputs for part in share for sample in part.samples)


@pytest.mark.parametrize("attention", ["shared_prompt", "per_sample"])
@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_every_response_is_in_exactly_one_share(attention: Attention, count: int) -> None:
    random = np.random.default_rng(count)
    groups = [group(f"g{n}", int(random.integers(1, 50)), *random.integers(0, 40, 6)) for n in range(5)]
    found = shares(groups, count, attention)
    assert len(found) == count
    assert contents(found) == contents([groups])


def test_a_lone_group_is_split_by_responses() -> None:
    lone = group("g", 10, *[50] * 8)
    found = shares([lone], 2, "shared_prompt")
    assert [len(part.samples) for share in found for part in share] == [4, 4]
    assert all(part.id == "g" and len(part.prompt_ids) == 10 for share in found for part in share)


def test_whole_groups_stay_whole_where_they_balance() -> None:
    groups = [group(f"g{n}", 30, 20, 20) for n in range(4)]
    found = shares(groups, 2, "shared_prompt")
    assert [[len(part.samples) for part in share] for share in found] == [[2, 2], [2, 2]]


def test_work_is_about_even_for_ragged_groups() -> None:
    random = np.random.default_rng(0)
    groups = [group(f"g{n}", 20, *random.integers(1, 200, 16)) for n in range(7)]
    found = shares(groups, 4, "shared_prompt")
    loads = [load(share) for share in found]
    assert max(loads) <= 1.15 * sum(loads) / len(loads)


def test_a_long_prompt_is_not_computed_twice_for_nothing() -> None:
    """A single response cannot be split, and splitting off short ones would not relieve its process."""
    found = shares([group("g", 1000, 2)], 2, "shared_prompt")
    assert [len(share) for share in found] == [1, 0]


def test_nothing_to_spread_is_an_empty_share_for_everybody() -> None:
    assert shares([group("g", 5)], 3, "per_sample") == [[], [], []]
