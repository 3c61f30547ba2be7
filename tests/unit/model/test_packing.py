"""What a packed row looks like, and how groups are spread over micro-batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_truth import random_groups

from pa_core.model.layout import build_layout
from pa_core.model.packing import TrainGroup, TrainSample, micro_batches, pack, train_group
from pa_core.records import Group, Prompt, Sample

SHAPES = st.lists(
    st.tuples(st.integers(1, 40), st.lists(st.integers(0, 30), min_size=1, max_size=6).map(tuple)),
    min_size=1,
    max_size=6,
)


def _sample(ids: list[int], advantage: float = 0.0, mask: list[int] | None = None) -> TrainSample:
    return TrainSample(
        np.array(ids, np.int32),
        np.array([-0.1 * i for i in ids], np.float32),
        np.array(mask if mask is not None else [1] * len(ids), np.bool_),
        advantage,
    )


def test_a_row_holds_each_prompt_once_and_positions_restart_after_it() -> None:
    groups = [
        TrainGroup("a", np.array([1, 2, 3], np.int32), (_sample([10, 11, 12], 0.5), _sample([]), _sample([20], -1.0))),
        TrainGroup("b", np.array([4], np.int32), (_sample([30, 31]),)),
    ]
    batch = pack(groups)
    # Last response tokens are targets only.
    assert batch.input_ids.tolist() == [[1, 2, 3, 10, 11, 4, 30]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 1]]
    assert batch.targets.tolist() == [10, 11, 12, 20, 30, 31]
    assert batch.predictors.tolist() == [2, 3, 4, 2, 5, 6]
    assert batch.advantages.tolist() == [0.5, 0.5, 0.5, -1.0, 0.0, 0.0]
    assert batch.sample_index.tolist() == [0, 0, 0, 2, 3, 3]
    assert batch.sample_tokens.tolist() == [3, 0, 1, 2]
    torch.testing.assert_close(batch.engine_logprobs, torch.tensor([-1.0, -1.1, -1.2, -2.0, -3.0, -3.1]))


def test_masked_tokens_are_inputs_but_never_targets_and_a_masked_tail_is_not_computed() -> None:
    group = TrainGroup("a", np.array([1, 2], np.int32), (_sample([10, 11, 12, 13, 14], mask=[1, 0, 1, 0, 0]),))
    batch = pack([group])
    assert batch.input_ids.tolist() == [[1, 2, 10, 11]]
    assert batch.targets.tolist() == [10, 12]
    assert batch.predictors.tolist() == [1, 3]


@settings(deadline=None, max_examples=50)
@given(SHAPES)
def test_both_packings_agree_on_everything_that_is_per_token(shapes: list[tuple[int, tuple[int, ...]]]) -> None:
    groups = random_groups(shapes, masked=True)
    shared, single = pack(groups, "shared_prompt"), pack(groups, "per_sample")
    for name in ("targets", "advantages", "engine_logprobs", "sample_index", "sample_tokens"):
        assert torch.equal(getattr(shared, name), getattr(single, name)), name
    for batch in (shared, single):
        before = batch.input_ids.flatten()[batch.predictors]
        positions = batch.position_ids.flatten()[batch.predictors]
        if batch is shared:
            expected = (before, positions)
    assert torch.equal(before, expected[0]) and torch.equal(positions, expected[1])


@settings(deadline=None, max_examples=50)
@given(SHAPES)
def test_the_blocks_are_exactly_the_pairs_that_may_attend(shapes: list[tuple[int, tuple[int, ...]]]) -> None:
    layout = build_layout(shapes)
    expected = np.zeros((layout.tokens, layout.tokens), dtype=np.int64)
    row = 0
    for prompt_length, responses in shapes:
        prompt = slice(row, row + prompt_length)
        expected[prompt, prompt] = np.tri(prompt_length)
        row += prompt_length
        for length in responses:
            own = slice(row, row + length)
            expected[own, prompt] = 1
            expected[own, own] = np.tri(length)
            row += length
    rows = torch.arange(layout.tokens)
    computed = np.zeros_like(expected)

    def add(queries, keys, causal: bool) -> None:  # type: ignore[no-untyped-def]
        for batch in range(queries.batch):
            real = [
                s.gather(rows)[batch][slice(None) if s.padding is None else ~s.padding[batch]] for s in (queries, keys)
            ]
            pairs = np.ones((len(real[0]), len(real[1])), dtype=np.int64)
            computed[np.ix_(real[0].numpy(), real[1].numpy())] += np.tril(pairs) if causal else pairs

    for own_rows in layout.own:
        add(own_rows, own_rows, True)
    for block in layout.cross:
        add(block.queries, block.keys, False)
    assert (computed == expected).all()


def _cost(part: list[TrainGroup], way: str) -> int:
    return pack(part, way).input_ids.numel()


@settings(deadline=None, max_examples=50)
@given(SHAPES, st.integers(1, 200), st.sampled_from(["shared_prompt", "per_sample"]))
def test_micro_batches_hold_every_sample_once_within_the_budget(
    shapes: list[tuple[int, tuple[int, ...]]], budget: int, way: str
) -> None:
    groups = random_groups(shapes)
    batches = micro_batches(groups, budget, way)  # type: ignore[arg-type]
    placed = [id(sample) for batch in batches for group in batch for sample in group.samples]
    assert sorted(placed) == sorted(id(sample) for group in groups for sample in group.samples)
    for batch in batches:
        samples = sum(len(group.samples) for group in batch)
        assert _cost(batch, way) <= budget or samples == 1


def test_groups_without_samples_vanish() -> None:
    empty = TrainGroup("e", np.array([1], np.int32), ())
    assert micro_batches([empty], 10) == []
    with pytest.raises(ValueError, match="nothing to pack"):
        pack([empty])


def test_unscored_samples_do_not_train() -> None:
    def sample(reward: float | None) -> Sample:
        return Sample(
            np.array([5, 6], np.int32), np.zeros(2, np.float32), [(0, 2)], np.ones(2, np.uint8), "stop", reward=reward
        )

    group = Group(Prompt("p", 0, "", np.array([1], np.int32), ""), [sample(1.0), sample(None), sample(0.0)], 0, "r")
    trained = train_group(group, torch.tensor([0.7, 0.0, -0.7]))
    assert [round(s.advantage, 6) for s in trained.samples] == [0.7, -0.7]
    assert trained.tokens == 4
    with pytest.raises(ValueError, match="2 advantages for 3 samples"):
        train_group(group, torch.zeros(2))
