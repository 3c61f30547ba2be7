"""Scores and intervals against values computed by hand, and what counts as an answer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pa_core.config import TrainConfig
from pa_core.config_files import parse_config
from pa_core.errors import ConfigError, RewardError
from pa_core.evaluation.answers import answer_extractor
from pa_core.evaluation.result import EvaluationResult, summarise_groups
from pa_core.evaluation.scores import Judged, interval, majority, scores
from pa_core.evaluation.store import EvaluationStore, sample_table, shown_rows
from pa_core.records import Group, Prompt, Sample
from pa_core.store.objects import ObjectStore


def config(reward: str = "number", **evaluation: Any) -> TrainConfig:
    return parse_config({"data": {"name": "chain_sum"}, "rewards": [{"name": reward}], "evaluation": evaluation})


def judged(*pairs: tuple[float | None, str | None]) -> list[Judged]:
    return [Judged(value, answer) for value, answer in pairs]


@pytest.mark.parametrize(
    ("values", "samples", "expected"),
    [
        # Wilson's score intervals: 7 of 10, 10 of 10, 0 of 10.
        ([1.0] * 7 + [0.0] * 3, 10, (0.7, 0.3968, 0.8922)),
        ([1.0] * 10, 10, (1.0, 0.7225, 1.0)),
        ([0.0] * 10, 10, (0.0, 0.0, 0.2775)),
        # Two samples each that always agree are worth one: 2 of 4, not 4 of 8.
        ([1.0, 1.0, 0.0, 0.0], 8, (0.5, 0.1500, 0.8500)),
        # Samples that never agree are worth all of them: 4 of 8.
        ([0.5] * 4, 8, (0.5, 0.2152, 0.7848)),
        # Outside of 0 and 1: sd² = 8, so se = 2, and 1.96 times that to either side.
        ([0.0, 4.0], 2, (2.0, -1.92, 5.92)),
    ],
)
def test_intervals_are_those_of_the_closed_form(
    values: list[float], samples: int, expected: tuple[float, float, float]
) -> None:
    found = interval(values, samples)
    assert (found.value, found.low, found.high) == pytest.approx(expected, abs=1e-4)


def test_scores_are_means_over_problems_and_leave_out_what_has_no_score() -> None:
    found = scores(
        [
            judged((1.0, "7"), (1.0, "7"), (0.0, "8")),  # pass 2/3, majority right
            judged((0.0, "1"), (0.5, "2"), (0.0, "1")),  # nothing right, metric 1/6
            judged((1.0, "5"), (None, "6"), (None, "6")),  # one sample scored: 1
            judged((None, None), (None, "3"), (None, "3")),  # none scored: no problem
        ]
    )
    assert found["pass_at_1"].value == pytest.approx((2 / 3 + 0 + 1) / 3)
    assert found["avg_at_k"].value == pytest.approx((2 / 3 + 1 / 6 + 1) / 3)
    assert found["maj_at_k"].value == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        (judged((1.0, "7"), (1.0, "7"), (0.0, "8")), 1.0),
        (judged((0.0, "8"), (0.0, "8"), (1.0, "7")), 0.0),
        (judged((1.0, "7"), (0.0, "8")), 0.5),  # a tie counts in part
        (judged((1.0, "7"), (0.0, "8"), (0.0, "9")), 1 / 3),
        (judged((0.0, None), (0.0, None), (1.0, "7")), 1.0),  # unreadable answers cast no vote
        (judged((0.0, None), (0.0, None)), 0.0),  # and without a vote there is no majority
    ],
)
def test_the_majority_counts_ties_in_part_and_unreadable_answers_not_at_all(
    samples: list[Judged], expected: float
) -> None:
    assert majority(samples) == pytest.approx(expected)


def test_one_sample_per_problem_has_no_majority() -> None:
    assert set(scores([judged((1.0, "7")), judged((0.0, "8"))])) == {"pass_at_1", "avg_at_k"}


@pytest.mark.parametrize(
    ("reward", "response", "expected"),
    [
        ("math", r"first \boxed{3}, no: \boxed{\frac{1}{2}}", "1/2"),
        ("math", r"\boxed{0.50}", "1/2"),
        ("math", r"so $\boxed{1,000}$.", "1000"),
        ("math", r"\boxed{x^{2} + 1}", "x^{2}+1"),
        ("math", "the answer is 12.", "12"),
        ("math", r"cut off: \boxed{12", "12"),
        ("math", "no idea", None),
        ("number", "3 + 4 = 7.0", "7"),
        ("number", "none", None),
        ("exact", "  Paris \n France ", "Paris France"),
        ("exact", " ", None),
    ],
)
def test_the_answer_is_what_the_metric_looks_at(reward: str, response: str, expected: str | None) -> None:
    assert answer_extractor(config(reward))(response) == expected


def test_a_pattern_of_ones_own_reads_its_last_match() -> None:
    extract = answer_extractor(config("exact", answer_pattern=r"Answer: (\w+)"))
    assert extract("Answer: A, rather Answer: B") == "B"
    assert extract("C") is None
    with pytest.raises(ConfigError, match=r"evaluation.answer_pattern='B' has no group"):
        answer_extractor(config("exact", answer_pattern="B"))


def group(index: int, *samples: tuple[str, float | None]) -> Group:
    tokens = [np.arange(len(text), dtype=np.int32) for text, _ in samples]
    return Group(
        Prompt(f"e{index:08d}", index, "3 + 4 = ?", np.arange(3, dtype=np.int32), "7"),
        [
            Sample(
                token_ids=ids,
                logprobs=np.zeros(len(ids), np.float32),
                versions=[(5, len(ids))],
                loss_mask=np.ones(len(ids), np.uint8),
                finish_reason="length" if len(ids) > 2 else "stop",
                text=text,
                reward=value,
                rewards={} if value is None else {"number": value},
                unscored="timeout:number" if value is None else None,
            )
            for ids, (text, value) in zip(tokens, samples, strict=True)
        ],
        version=5,
        replica="r0",
    )


GROUPS = [group(0, ("7", 1.0), ("7!", 1.0), ("a 8", 0.0)), group(1, ("x", 0.0), ("7", None), ("6 or", 0.0))]
SETTINGS = config(samples=3, temperature=1.0)


def test_the_result_counts_what_has_no_score_by_cause_and_never_as_zero() -> None:
    found = summarise_groups(SETTINGS, 5, GROUPS)
    assert (found.version, found.problems, found.samples, found.samples_per_problem) == (5, 2, 6, 3)
    assert found.accuracy == pytest.approx((2 / 3 + 0) / 2)
    assert (found.unscored, found.unscored_by_cause) == (1, {"timeout:number": 1})
    assert found.unanswered == 1
    assert found.response_length == pytest.approx((1 + 2 + 3 + 1 + 1 + 4) / 6)
    assert found.truncated_share == pytest.approx(2 / 6)
    assert found.metrics()["eval/unscored_share"] == pytest.approx(1 / 6)


def test_an_evaluation_without_any_score_is_an_error_that_names_the_causes() -> None:
    with pytest.raises(RewardError, match=r"scored none of 1 problems \(2 x timeout:number\)"):
        summarise_groups(SETTINGS, 5, [group(0, ("7", None), ("8", None))])


def test_results_are_kept_with_their_samples_and_forgotten_with_their_versions() -> None:
    store = ObjectStore.open("memory://evaluation-results")
    result, table = summarise_groups(SETTINGS, 5, GROUPS), sample_table(SETTINGS, GROUPS)
    own, other = EvaluationStore(store), EvaluationStore(store, "gsm8k")
    own.write(result, table)
    other.write(result, table)

    assert EvaluationResult.model_validate(own.read(5)) == result
    assert own.read(4) is None
    rows = shown_rows(own.table(5))
    assert [row["extracted"] for row in rows] == ["7", "7", "8", None, "7", "6"]
    assert [row["right"] for row in rows] == [True, True, False, False, None, False]
    assert [row["tokens"] for row in rows] == [1, 2, 3, 1, 1, 4]

    own.forget_after(5)
    assert own.read(5) is not None
    own.forget_after(4)
    assert own.read(5) is None
    assert other.read(5) is None


@pytest.mark.parametrize(
    ("settings", "fix"),
    [
        ({"samples": 4}, "set a temperature such as 0.7"),
        ({"every": 2, "enabled": False}, "set enabled=true, or every=0"),
    ],
)
def test_settings_that_measure_nothing_are_refused(settings: dict[str, Any], fix: str) -> None:
    with pytest.raises(ConfigError, match=fix):
        config(**settings)
