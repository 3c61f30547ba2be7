"""The endless prompt stream: complete epochs, order by seed, exact resumption."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pa_core.data.stream import PromptStream
from pa_core.errors import DataError
from pa_core.records import Prompt


def prompts(count: int) -> list[Prompt]:
    return [Prompt(f"p{i:08d}", i, f"question {i}", np.array([i], dtype=np.int32), str(i)) for i in range(count)]


def texts(batch: list[Prompt]) -> list[str]:
    return [prompt.text for prompt in batch]


def test_every_epoch_has_every_prompt_once_in_another_order() -> None:
    stream = PromptStream(prompts(20), seed=1)
    first, second = texts(stream.take(20)), texts(stream.take(20))
    assert sorted(first) == sorted(second) == sorted(texts(prompts(20)))
    assert first != second
    assert stream.epoch == 2


def test_the_order_depends_on_the_seed_and_on_nothing_else() -> None:
    assert texts(PromptStream(prompts(20), seed=1).take(30)) == texts(PromptStream(prompts(20), seed=1).take(30))
    assert texts(PromptStream(prompts(20), seed=1).take(20)) != texts(PromptStream(prompts(20), seed=2).take(20))
    unshuffled = PromptStream(prompts(3), seed=1, shuffle=False)
    assert texts(unshuffled.take(4)) == ["question 0", "question 1", "question 2", "question 0"]


def test_ids_name_the_position_and_never_repeat_across_epochs() -> None:
    batch = PromptStream(prompts(3), seed=0).take(8)
    assert [prompt.id for prompt in batch] == [f"p{index:08d}" for index in range(8)]
    assert [prompt.index for prompt in batch] == list(range(8))


@given(
    size=st.integers(1, 12),
    before=st.lists(st.integers(0, 15), max_size=5),
    after=st.lists(st.integers(1, 15), min_size=1, max_size=5),
    seed=st.integers(0, 2**31),
)
def test_a_resumed_stream_equals_the_unbroken_one_also_across_epochs(
    size: int, before: list[int], after: list[int], seed: int
) -> None:
    unbroken = PromptStream(prompts(size), seed)
    for count in before:
        unbroken.take(count)
    resumed = PromptStream(prompts(size), seed)
    resumed.restore(json.loads(json.dumps(unbroken.state())))
    for count in after:
        ours, theirs = resumed.take(count), unbroken.take(count)
        assert [(p.id, p.index, p.text) for p in ours] == [(p.id, p.index, p.text) for p in theirs]


def test_resuming_exactly_at_the_end_of_an_epoch_goes_on() -> None:
    unbroken = PromptStream(prompts(5), seed=3)
    unbroken.take(5)
    resumed = PromptStream(prompts(5), seed=3)
    resumed.restore(unbroken.state())
    assert texts(resumed.take(5)) == texts(unbroken.take(5))


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        (PromptStream(prompts(5), seed=2), "seed"),
        (PromptStream(prompts(5), seed=1, shuffle=False), "data.shuffle"),
        (PromptStream(prompts(6), seed=1), "data changed"),
    ],
)
def test_resuming_with_another_seed_order_or_data_set_is_refused(changed: PromptStream, field: str) -> None:
    with pytest.raises(DataError, match=field):
        changed.restore(PromptStream(prompts(5), seed=1).state())


def test_an_empty_stream_is_refused() -> None:
    with pytest.raises(DataError, match="no prompts"):
        PromptStream([], seed=0)
