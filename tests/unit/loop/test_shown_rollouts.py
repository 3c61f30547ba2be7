"""What is shown of an iteration's rollouts: the table's rows, and the group that is traced."""

from __future__ import annotations

import numpy as np

from pa_core.loop.iteration import most_telling, sample_rows
from pa_core.records import Group, Prompt, Sample


def group(index: int, *rewards: float) -> Group:
    tokens = np.arange(2, dtype=np.int32)
    samples = [
        Sample(
            tokens,
            np.array([-1.0, -2.0], np.float32),
            [(4, 2)],
            np.ones(2, np.uint8),
            "stop",
            f"text {number}",
            reward,
            {"exact": reward},
        )
        for number, reward in enumerate(rewards)
    ]
    return Group(Prompt(f"p{index}", index, f"question {index}", tokens, "x"), samples, 4, "r0")


ADVANTAGES = {"p1": [0.0, 0.0], "p2": [1.0, -1.0], "p3": [0.5, -0.5]}


def test_the_traced_group_is_the_first_of_the_stream_that_taught_something_whatever_came_first() -> None:
    arrived = [group(3, 1, 0), group(1, 1, 1), group(2, 0, 1)]

    assert most_telling(arrived, ADVANTAGES).id == "p2"
    assert most_telling([group(1, 1, 1)], ADVANTAGES).id == "p1", "any is better than none"


def test_rows_tell_version_group_reward_and_advantage_of_a_few_samples_of_each_group() -> None:
    rows = sample_rows([group(2, 0, 1), group(9, 1, 1)], ADVANTAGES, limit=2)

    assert [(row["group"], row["response"], row["advantage"]) for row in rows] == [
        ("p2", "text 0", 1.0),
        ("p9", "text 0", None),
    ]
    assert (rows[0]["version"], rows[0]["reward_exact"], rows[0]["logprob_mean"]) == (4, 0.0, -1.5)


def test_more_groups_than_rows_give_a_row_for_the_first_ones() -> None:
    rows = sample_rows([group(index, 1, 0) for index in range(5)], {}, limit=3)

    assert [row["group"] for row in rows] == ["p0", "p1", "p2"]
