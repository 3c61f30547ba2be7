"""Reading data sets: every schema in the wild, and one clear message for everything that is wrong with one."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pa_core.config import DataConfig
from pa_core.data.answers import canonical_answer
from pa_core.data.sources import read_rows
from pa_core.errors import DataError

SHARED = Path(__file__).resolve().parents[4] / "shared" / "data"


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read(**fields: Any) -> list[tuple[str, str]]:
    return [(row.question, row.answer) for row in read_rows(DataConfig(**fields), seed=0)]


ROWS = [{"question": "1+1?", "answer": 2}, {"question": "half of 3?", "answer": 1.5}]
PAIRS = [("1+1?", "2"), ("half of 3?", "1.5")]


def test_jsonl_gzip_json_array_and_parquet_give_the_same_rows(tmp_path: Path) -> None:
    plain = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(Path(plain).read_bytes()))
    (tmp_path / "rows.json").write_text(json.dumps(ROWS, indent=1))
    table = pa.table({"question": [row["question"] for row in ROWS], "answer": [2.0, 1.5]})
    pq.write_table(table, tmp_path / "rows.parquet")
    for name in ("rows.jsonl", "rows.jsonl.gz", "rows.json", "rows.parquet"):
        assert read(path=str(tmp_path / name)) == PAIRS, name
    assert read(path=(tmp_path / "rows.jsonl").as_uri()) == PAIRS


def test_a_url_of_any_fsspec_protocol_is_read() -> None:
    import fsspec

    with fsspec.open("memory://sets/rows.jsonl", "w") as file:
        file.write("".join(json.dumps(row) + "\n" for row in ROWS))
    assert read(path="memory://sets/rows.jsonl") == PAIRS


def test_a_local_folder_is_read_as_a_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "set").mkdir()
    write_jsonl(tmp_path / "set" / "train.jsonl", [{"question": "1+1?", "answer": "2"}])
    assert read(path=str(tmp_path / "set")) == [("1+1?", "2")]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (14.0, "14"),
        (14, "14"),
        (" 14 ", "14"),
        (0.6666666667, "0.6666666667"),
        (-3.0, "-3"),
        (1e20, "100000000000000000000"),
        (True, "true"),
        ([1, 2], "[1,2]"),
        ({"x": "ä"}, '{"x":"ä"}'),
        ("025", "025"),
    ],
)
def test_answers_of_any_json_type_become_text(value: Any, text: str) -> None:
    assert canonical_answer(value) == text


@pytest.mark.parametrize("value", [None, "", "  ", float("nan"), float("inf")])
def test_a_row_without_an_answer_is_an_error_that_names_it(tmp_path: Path, value: Any) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [*ROWS, {"question": "?", "answer": value}])
    with pytest.raises(DataError, match=r"row 3 of data.path=.*answer_column='answer'"):
        read(path=path)


def test_answer_pattern_takes_the_first_group_and_keeps_the_worked_solution_for_rewards(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [{"question": "q", "answer": "6*3=18\n#### 18", "source": "s"}])
    (row,) = read_rows(DataConfig(path=path, answer_pattern=r"####\s*(.+)"), seed=0)
    assert row.answer == "18"
    assert row.metadata == {"answer": "6*3=18\n#### 18", "source": "s"}


def test_rows_that_the_answer_pattern_does_not_match_are_named(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "r.jsonl", [{"question": "a", "answer": "#### 1"}, {"question": "b", "answer": "2"}])
    with pytest.raises(DataError, match=r"row 2 .*answer_pattern"):
        read(path=path, answer_pattern=r"####\s*(.+)")


@pytest.mark.parametrize(("pattern", "fault"), [("(", "not a regular expression"), ("####", "has no group")])
def test_a_wrong_answer_pattern_is_named(tmp_path: Path, pattern: str, fault: str) -> None:
    with pytest.raises(DataError, match=fault):
        read(path=write_jsonl(tmp_path / "rows.jsonl", ROWS), answer_pattern=pattern)


def test_a_missing_column_lists_the_columns_and_suggests_the_nearest(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [{"problem": "a", "target": 1}])
    with pytest.raises(DataError) as caught:
        read(path=path, prompt_column="problems", answer_column="target")
    message = str(caught.value)
    assert "data.prompt_column='problems'" in message
    assert "did you mean 'problem'?" in message
    assert "columns: problem, target" in message


def test_a_missing_file_names_the_field_and_the_path(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data.path='.*gone.jsonl' does not exist"):
        read(path=str(tmp_path / "gone.jsonl"))
    with pytest.raises(DataError, match=r"data.path='no/such/file.csv' is neither a file"):
        read(path="no/such/file.csv")


def test_an_unknown_protocol_is_an_error_of_data_path() -> None:
    with pytest.raises(DataError, match=r"data.path='gopher://x/rows.jsonl' cannot be read"):
        read(path="gopher://x/rows.jsonl")


@pytest.mark.parametrize(
    ("content", "fault"),
    [("", "has no rows"), ('{"question": 1', "line 1 is not JSON"), ("3\n", "line 1 is not an object")],
)
def test_empty_and_broken_files_are_named(tmp_path: Path, content: str, fault: str) -> None:
    (tmp_path / "rows.jsonl").write_text(content)
    with pytest.raises(DataError, match=fault):
        read(path=str(tmp_path / "rows.jsonl"))


def test_a_broken_parquet_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "rows.parquet").write_bytes(b"not parquet at all")
    with pytest.raises(DataError, match=r"rows.parquet' cannot be read"):
        read(path=str(tmp_path / "rows.parquet"))


def test_a_hub_set_that_cannot_be_reached_names_data_path_and_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def unreachable(*_: Any, **__: Any) -> None:
        raise ConnectionError("Couldn't reach 'some/set' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(DataError, match=r"data.path='some/set'.*Couldn't reach.*local .jsonl"):
        read(path="some/set")


def test_limit_reads_only_the_first_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "1+1?", "answer": 2}\nnever read')
    assert read(path=str(path), limit=1) == PAIRS[:1]


def test_a_reasoning_gym_task_is_reproducible_by_seed() -> None:
    def sums(seed: int) -> list[str]:
        config = DataConfig(name="chain_sum", options={"size": 20})
        return [row.question for row in read_rows(config, seed)]

    assert sums(1) == sums(1)
    assert sums(1) != sums(2)


def test_an_unknown_reasoning_gym_task_suggests_the_nearest() -> None:
    with pytest.raises(DataError, match=r"data.name='chain_sums'.*did you mean 'chain_sum'"):
        read(name="chain_sums")


def test_wrong_reasoning_gym_options_are_named() -> None:
    with pytest.raises(DataError, match=r"data.options.min_term .*did you mean 'min_terms'"):
        read(name="chain_sum", options={"min_term": 2})
    with pytest.raises(DataError, match="do not suit the task chain_sum"):
        read(name="chain_sum", options={"min_terms": 5, "max_terms": 2})


@pytest.mark.skipif(not SHARED.is_dir(), reason="the shared data sets are not here")
@pytest.mark.parametrize(
    ("file", "fields", "rows", "first"),
    [
        ("gsm8k/train.jsonl", {"answer_pattern": r"####\s*(.+)"}, 7473, "72"),
        ("gsm8k/test.jsonl", {"answer_pattern": r"####\s*(.+)"}, 1319, "18"),
        ("mawps/addsub.jsonl", {"prompt_column": "input", "answer_column": "target"}, 395, "43"),
        ("mawps/singleop.jsonl", {"prompt_column": "input", "answer_column": "target"}, 562, "14"),
        ("aime24/test.jsonl", {"prompt_column": "problem"}, 30, "204"),
    ],
)
def test_every_shared_data_set_is_read(file: str, fields: dict[str, Any], rows: int, first: str) -> None:
    pairs = read(path=str(SHARED / file), **fields)
    assert len(pairs) == rows
    assert pairs[0][1] == first
