"""What a packed row looks like, and how groups are spread over micro-batches."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_truth import random_groups
from numpy.typing import NDArray

from pa_core.model import blocks
from pa_core.model.flex import block_mask
from pa_core.model.layout import build_layout
from pa_core.model.packing import TrainGroup, TrainSample, micro_batches, pack, train_group
from pa_core.model.rope import RopeLimit
from pa_core.model.rows import Rows
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


def _visible(shapes: list[tuple[int, tuple[int, ...]]], window: int | None) -> NDArray[np.int64]:
    """1 where a row (first index) sees another, written down sample by sample."""
    tokens = sum(prompt + sum(responses) for prompt, responses in shapes)
    visible = np.zeros((tokens, tokens), dtype=np.int64)
    row = 0
    for prompt_length, responses in shapes:
        prompt = np.arange(row, row + prompt_length)
        row += prompt_length
        for length in (0, *responses):
            sample = np.concatenate([prompt, np.arange(row, row + length)])
            seen = np.tri(len(sample)) if window is None else np.tri(len(sample)) - np.tri(len(sample), k=-window)
            visible[np.ix_(sample, sample)] = seen
            row += length
    return visible


def _rows(rows: Rows, batch: int) -> NDArray[np.int64]:
    return rows.gather(torch.arange(1000))[batch].numpy()


@settings(deadline=None, max_examples=50)
@given(SHAPES, st.none() | st.integers(1, 60), st.sampled_from([1, 4, 64]))
def test_the_blocks_are_exactly_the_pairs_that_may_attend(
    shapes: list[tuple[int, tuple[int, ...]]], window: int | None, tile: int
) -> None:
    layout = build_layout(shapes)
    computed = np.zeros((layout.tokens, layout.tokens), dtype=np.int64)
    with mock.patch.object(blocks, "_SMALLEST_TILE", tile):
        found = blocks.attention_blocks(layout, window)
    for block in found:
        queries, keys = block.queries, block.keys
        merged = [queries.gather(torch.arange(1000))[b][~_padding(queries, b)] for b in range(queries.batch)]
        assert len(torch.cat(merged).unique()) == len(torch.cat(merged)), "a query that is merged twice at once"
        for batch in range(queries.batch):
            pairs = np.ones((queries.length, keys.length), dtype=np.int64)
            if block.causal:
                pairs = np.tril(pairs)
            if block.hidden is not None:
                pairs = pairs * ~block.hidden[min(batch, len(block.hidden) - 1)].numpy()
            assert pairs.any(axis=1).all(), "a query that sees nothing"
            pairs[_padding(queries, batch).numpy()] = 0
            np.add.at(computed, np.ix_(_rows(queries, batch), _rows(keys, batch)), pairs)
    assert (computed == _visible(shapes, window)).all()


def _padding(rows: Rows, batch: int) -> torch.Tensor:
    return torch.zeros(rows.length, dtype=torch.bool) if rows.padding is None else rows.padding[batch]


@settings(deadline=None, max_examples=20)
@given(SHAPES, st.none() | st.integers(1, 60))
def test_the_mask_for_flex_attention_is_exactly_the_pairs_that_may_attend(
    shapes: list[tuple[int, tuple[int, ...]]], window: int | None
) -> None:
    layout = build_layout(shapes)
    mask = block_mask(layout, window).mask_mod
    query, key = torch.meshgrid(torch.arange(layout.tokens), torch.arange(layout.tokens), indexing="ij")
    assert (mask(None, None, query, key).numpy() == _visible(shapes, window)).all()


def test_what_lies_beyond_a_window_is_not_computed() -> None:
    """A window of 256 over a prompt of 4096 and 8 responses of 128 leaves little more than the visible pairs."""
    layout = build_layout([(4096, (128,) * 8)])
    visible = 4096 * 256 + 8 * 128 * 256
    computed = sum(
        block.queries.batch * block.queries.length * block.keys.length / (2 if block.causal else 1)
        for block in blocks.attention_blocks(layout, 256)
    )
    assert visible * 0.9 < computed < visible * 1.25
    everything = sum(
        block.queries.batch * block.queries.length * block.keys.length
        for block in blocks.attention_blocks(layout, None)
    )
    assert everything > 10 * computed


def _cost(part: list[TrainGroup], way: str) -> int:
    return pack(part, way).input_ids.numel()


@settings(deadline=None, max_examples=50)
@given(SHAPES, st.integers(1, 200), st.sampled_from(["shared_prompt", "per_sample"]), st.none() | st.integers(1, 60))
def test_micro_batches_hold_every_sample_once_within_the_budget(
    shapes: list[tuple[int, tuple[int, ...]]], budget: int, way: str, limit: int | None
) -> None:
    groups = random_groups(shapes)
    rope = None if limit is None else RopeLimit("longrope", limit)
    batches = micro_batches(groups, budget, way, rope)  # type: ignore[arg-type]
    placed = [id(sample) for batch in batches for group in batch for sample in group.samples]
    assert sorted(placed) == sorted(id(sample) for group in groups for sample in group.samples)
    for batch in batches:
        samples = sum(len(group.samples) for group in batch)
        assert _cost(batch, way) <= budget or samples == 1
        if rope is not None:
            packed = pack(batch, way)  # type: ignore[arg-type]
            rope.check(packed.shortest, packed.longest)


def test_first_fit_fills_earlier_micro_batches_first() -> None:
    groups = random_groups([(10, (11,)), (10, (21,)), (4, (5,)), (3, (4,))])  # 20, 30, 8 and 6 tokens are computed
    assert [[group.id for group in batch] for batch in micro_batches(groups, 30)] == [["g0", "g2"], ["g1"], ["g3"]]


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
