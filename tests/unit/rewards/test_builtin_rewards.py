"""The built-in rewards against gold answers of real data sets and cases worked out by hand."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from pa_core.config import DataConfig, RewardConfig
from pa_core.data.sources import Row, read_rows
from pa_core.rewards.registry import BUILT_IN, Reward, load_reward

SHARED = Path(__file__).resolve().parents[4] / "shared" / "data"


def built_in(name: str, **options: Any) -> Reward:
    return load_reward(RewardConfig(name=name, options=options))


def score(name: str, response: str, answer: str, **options: Any) -> float:
    value: float = built_in(name, **options)(response, answer, metadata={})
    return value


@pytest.mark.parametrize(
    ("response", "answer", "value"),
    [("7", "7", 1), (" 7\n", "7", 1), ("7.", "7", 0), ("07", "7", 0), ("It is 7", "7", 0), ("", "7", 0)],
)
def test_exact_wants_the_bare_answer(response: str, answer: str, value: float) -> None:
    assert score("exact", response, answer) == value


@pytest.mark.parametrize(
    ("tokens", "penalty"), [(0, 0.0), (16384, 0.0), (17408, -0.25), (20480, -1.0), (20481, -1.0), (50000, -1.0)]
)
def test_overlong_falls_linearly_over_the_buffer(tokens: int, penalty: float) -> None:
    reward = built_in("overlong", max_tokens=20480, buffer=4096)  # the numbers of DAPO
    assert reward("any text", "7", metadata={"response_tokens": tokens}) == penalty


@pytest.mark.parametrize("buffer", [0, 101])
def test_overlong_needs_a_buffer_below_its_limit(buffer: int) -> None:
    with pytest.raises(ValueError, match=f"buffer={buffer} must be above 0 and at most max_tokens=100"):
        built_in("overlong", max_tokens=100, buffer=buffer)("", "", metadata={"response_tokens": 1})


@pytest.mark.parametrize(
    ("response", "answer", "value"),
    [
        ("The answer is 7.", "7", 1),
        ("3 + 4 = 7", "7", 1),
        ("7 is 3 + 4", "7", 0),
        ("0 - 4 = -4", "-4", 1),
        ("8-4", "4", 1),
        ("8-4", "-4", 0),
        ("\N{MINUS SIGN}4", "-4", 1),
        ("$1,234.50", "1234.5", 1),
        ("1,080", "1080", 1),
        ("1080", "1,080", 1),
        ("1, 080", "1080", 0),
        ("7.0", "7", 1),
        (".5", "0.5", 1),
        ("x2", "2", 1),
        ("no number", "7", 0),
        ("", "0", 0),
    ],
)
def test_number_reads_the_last_number(response: str, answer: str, value: float) -> None:
    assert score("number", response, answer) == value


def test_a_gold_answer_without_a_number_is_an_error_and_not_a_zero() -> None:
    for name in ("number", "concise", "closeness"):
        with pytest.raises(ValueError, match="gold answer 'seven' is not a number"):
            score(name, "7", "seven")


def test_concise_grows_towards_the_bare_answer_and_pays_nothing_for_a_wrong_one() -> None:
    values = [score("concise", text, "7") for text in ("The final answer is 7.", "It is 7", "7.", "7")]
    assert values == sorted(values)
    assert values[-1] == 1
    assert values[-2] == 0.5
    assert score("concise", "8", "7") == 0


def test_closeness_is_linear_in_the_distance() -> None:
    assert score("closeness", "7", "7") == 1
    assert score("closeness", "10", "7") == pytest.approx(0.7)
    assert score("closeness", "-40", "7") == 0
    assert score("closeness", "none", "7") == 0
    assert score("closeness", "8", "7", scale=2) == 0.5


def test_integer_only_judges_form_alone() -> None:
    assert [score("integer_only", text, "7") for text in ("7", "-12 ", "8", "7.", "7 8", "seven")] == [1, 1, 1, 0, 0, 0]


@pytest.mark.parametrize(
    ("response", "answer", "value"),
    [
        ("so $x^2 + 1$", "1+x^2", 1),
        ("$\\boxed{\\frac{2}{4}}$", "1/2", 1),
        ("\\boxed{0.5}", "$\\frac{1}{2}$", 1),
        ("the interval $(1, 2)$", "(1,2)", 1),
        ("the interval $[1, 2)$", "(1,2)", 0),
        ("First 17, then \\boxed{18}", "18", 1),
        ("I do not know", "18", 0),
        ("", "18", 0),
    ],
)
def test_math_judges_equality_and_not_spelling(response: str, answer: str, value: float) -> None:
    assert score("math", response, answer) == value


def test_math_calls_a_gold_answer_it_cannot_parse_an_error() -> None:
    with pytest.raises(ValueError, match="gold answer '' cannot be parsed"):
        score("math", "18", "")


def rows_of(file: str, **fields: Any) -> list[Row]:
    return read_rows(DataConfig(path=str(SHARED / file), **fields), seed=0)


def wrong(answer: str) -> list[str]:
    """Near misses of a number: one more, ten times as much, the other sign."""
    value = float(answer.replace(",", ""))
    return [f"{value + 1:.10g}", f"{value * 10 + 3:.10g}", f"{-value - 1:.10g}"]


@pytest.mark.skipif(not SHARED.is_dir(), reason="the shared data sets are not here")
@pytest.mark.parametrize(
    ("file", "fields", "sample"),
    [
        ("aime24/test.jsonl", {"prompt_column": "problem"}, None),
        ("mawps/addsub.jsonl", {"prompt_column": "input", "answer_column": "target"}, None),
        ("mawps/singleop.jsonl", {"prompt_column": "input", "answer_column": "target"}, None),
        ("gsm8k/train.jsonl", {"answer_pattern": r"####\s*(.+)"}, 400),
        ("gsm8k/test.jsonl", {"answer_pattern": r"####\s*(.+)"}, 400),
    ],
)
def test_every_gold_answer_of_the_shared_data_sets_is_right_and_a_near_miss_is_wrong(
    file: str, fields: dict[str, Any], sample: int | None
) -> None:
    rows = rows_of(file, **fields)
    if sample is not None:
        odd = [row for row in rows if not row.answer.isdigit()]  # signs and thousands separators: all of them
        rows = odd + random.Random(0).sample(rows, sample)
    math, number = built_in("math"), built_in("number")
    for index, row in enumerate(rows):
        for response in (f"The answer is $\\boxed{{{row.answer}}}$.", f"So there are {row.answer}"):
            assert math(response, row.answer, metadata=row.metadata) == 1, row
            assert number(response, row.answer, metadata=row.metadata) == 1, row
        response = f"The answer is $\\boxed{{{wrong(row.answer)[index % 3]}}}$."
        assert math(response, row.answer, metadata=row.metadata) == 0, (row, response)
        assert number(response, row.answer, metadata=row.metadata) == 0, (row, response)


@pytest.mark.parametrize(
    "name", ["chain_sum", "basic_arithmetic", "arc_agi", "knights_knaves", "fraction_simplification"]
)
def test_reasoning_gym_scores_gold_answers_of_its_tasks_in_full(name: str) -> None:
    reward = built_in("reasoning_gym")
    for row in read_rows(DataConfig(name=name, options={"size": 3}), seed=1):
        assert reward(f" {row.answer}\n", row.answer, metadata=row.metadata) == 1
        assert reward("nothing of the kind", row.answer, metadata=row.metadata) < 0.2


def test_reasoning_gym_reads_a_tag_where_one_is_asked_for() -> None:
    (row,) = read_rows(DataConfig(name="chain_sum", options={"size": 1}), seed=1)
    reward = built_in("reasoning_gym", tag="answer")
    assert reward(f"thinking… <answer>{row.answer}</answer>", row.answer, metadata=row.metadata) == 1
    assert reward(row.answer, row.answer, metadata=row.metadata) == 0


def test_reasoning_gym_refuses_problems_of_another_source() -> None:
    with pytest.raises(ValueError, match="not a reasoning-gym task"):
        score("reasoning_gym", "7", "7")


def test_metadata_of_every_row_can_be_stored_as_json() -> None:
    for name in ("chain_sum", "arc_agi", "complex_arithmetic"):
        (row,) = read_rows(DataConfig(name=name, options={"size": 1}), seed=1)
        assert json.loads(json.dumps(row.metadata))["reasoning_gym"]["name"] == name


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_built_in_reward_loads_and_says_what_it_measures(name: str) -> None:
    required = {"overlong": {"max_tokens": 64, "buffer": 16}}
    reward = built_in(name, **required.get(name, {}))
    assert reward.func.__doc__ and len(reward.func.__doc__) > 60  # type: ignore[attr-defined]
