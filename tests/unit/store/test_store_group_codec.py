from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pa_core.errors import StoreError
from pa_core.records import Group, Prompt, Sample
from pa_core.store import group_codec
from pa_core.store.group_codec import from_table, to_table


def _ipc(table: pa.Table) -> pa.Table:
    """The table after a journey through a file."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return pa.ipc.open_file(sink.getvalue()).read_all()


def assert_same(found: Group, expected: Group) -> None:
    """Equal in every field, arrays in dtype and bits too."""
    assert (found.version, found.replica, found.generated_at) == (
        expected.version,
        expected.replica,
        expected.generated_at,
    )
    for a, b in [(found.prompt, expected.prompt), *zip(found.samples, expected.samples, strict=True)]:
        for name, value in vars(b).items():
            other = getattr(a, name)
            if isinstance(value, np.ndarray):
                assert (other.dtype, other.shape, other.tobytes()) == (value.dtype, value.shape, value.tobytes()), name
                assert other.flags.writeable
            elif name == "sampling_mask" and value is not None:
                assert [ids.tolist() for ids in other] == [ids.tolist() for ids in value]
            else:
                assert other == value, name


def test_every_field_of_a_group_survives(make_group: Callable[..., Group]) -> None:
    group = make_group()
    (found,) = from_table(_ipc(to_table([group])))
    assert_same(found, group)
    assert found.samples[1].reward is None
    assert found.samples[1].unscored == "timeout: exact"


def test_several_groups_keep_their_order_and_samples(make_group: Callable[..., Group]) -> None:
    groups = [make_group("b"), make_group("a", version=2)]
    for found, expected in zip(from_table(_ipc(to_table(groups))), groups, strict=True):
        assert_same(found, expected)


def test_a_table_of_before_the_engine_columns_is_read(make_group: Callable[..., Group]) -> None:
    table = to_table([make_group()]).drop_columns(["routed_experts", "sampling_mask"])
    (found,) = from_table(_ipc(table))
    assert found.samples[0].routed_experts is None
    assert found.samples[0].token_ids.tolist() == [9, 8, 7]


floats32 = st.floats(width=32, allow_nan=True, allow_infinity=True)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    spans = draw(st.lists(st.tuples(st.integers(0, 2**40), st.integers(0, 5)), max_size=4))
    length = sum(tokens for _, tokens in spans)
    return Sample(
        token_ids=np.array(draw(st.lists(st.integers(0, 2**31 - 1), min_size=length, max_size=length)), np.int32),
        logprobs=np.array(draw(st.lists(floats32, min_size=length, max_size=length)), np.float32),
        versions=spans,
        loss_mask=np.array(draw(st.lists(st.integers(0, 1), min_size=length, max_size=length)), np.uint8),
        finish_reason=draw(st.sampled_from(["stop", "length"])),
        text=draw(st.text()),
        reward=draw(st.none() | st.floats(allow_nan=False)),
        rewards=draw(st.dictionaries(st.text(), st.floats(allow_nan=False), max_size=3)),
        unscored=draw(st.none() | st.text()),
    )


@st.composite
def generated_groups(draw: st.DrawFn) -> Group:
    prompt = Prompt(
        id=draw(st.from_regex(r"[a-z0-9-]{1,8}", fullmatch=True)),
        index=draw(st.integers(0, 2**62)),
        text=draw(st.text()),
        token_ids=np.array(draw(st.lists(st.integers(0, 2**31 - 1), max_size=6)), np.int32),
        answer=draw(st.text()),
        metadata=draw(st.dictionaries(st.text(), json_values, max_size=3)),
    )
    found = draw(st.lists(samples(), min_size=1, max_size=3))
    return Group(prompt, found, draw(st.integers(0, 2**40)), draw(st.text()), (0.1, draw(st.floats(0, 1e10))))


@settings(max_examples=30, deadline=None)
@given(generated_groups())
def test_any_group_survives(group: Group) -> None:
    (found,) = from_table(_ipc(to_table([group])))
    assert_same(found, group)


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"array": np.arange(2), "number": np.float32(0.5)}, {"array": [0, 1], "number": 0.5}),
        ({"tuple": (1, (2,)), 3: "int key"}, {"tuple": [1, [2]], "3": "int key"}),
        ({"other": 1 + 2j}, {"other": "(1+2j)"}),
    ],
)
def test_metadata_beyond_json_is_kept_in_its_terms(
    make_group: Callable[..., Group], metadata: dict[Any, Any], expected: dict[str, Any]
) -> None:
    group = make_group()
    group = replace(group, prompt=replace(group.prompt, metadata=metadata))
    (found,) = from_table(to_table([group]))
    assert found.prompt.metadata == expected


def test_advantages_are_null_where_there_is_no_reward(make_group: Callable[..., Group]) -> None:
    groups = [make_group("a"), make_group("b"), make_group("c")]
    advantages = {"a": [0.5, 0.0], "b": [float("nan"), float("nan")]}
    assert to_table(groups, advantages).column("advantage").to_pylist() == [0.5, None, None, None, None, None]
    with pytest.raises(ValueError, match="zip"):
        to_table(groups, {"a": [0.5]})


def test_another_schema_version_is_refused_with_both_numbers(make_group: Callable[..., Group]) -> None:
    table = to_table([make_group()]).replace_schema_metadata({group_codec.SCHEMA_KEY: b"9"})
    with pytest.raises(StoreError, match="schema version 9; this program reads version 1"):
        from_table(table)


def test_every_column_is_documented() -> None:
    documentation = group_codec.__doc__ or ""
    assert [name for name in group_codec.SCHEMA.names if f"\n{name} " not in documentation] == []


def test_metadata_is_json_text(make_group: Callable[..., Group]) -> None:
    (text, _) = to_table([make_group()]).column("metadata").to_pylist()
    assert json.loads(text) == {"difficulty": 2, "source": "sums"}
