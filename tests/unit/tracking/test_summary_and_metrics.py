"""The run summary, and the documentation of metrics."""

from __future__ import annotations

import json

import pytest

from pa_core.tracking.metrics import METRICS, check_documented, glossary, metric_key
from pa_core.tracking.summary import IterationRecord, RunSummary, summarise
from pa_core.tracking.timeline import Span, iteration_times

REQUIRED = {
    "run_id",
    "mlflow_run_id",
    "schedule",
    "engine",
    "iterations",
    "reward_first",
    "reward_last",
    "eval_before",
    "eval_after",
    "tokens_per_s",
    "t_generate",
    "t_train",
    "t_sync",
    "wall",
    "idle_generate",
    "idle_train",
    "bound",
    "groups",
    "groups_duplicated",
    "groups_lost",
    "max_staleness_seen",
    "weights_sha256",
}


def record(number: int, reward: float | None, generate: float, train: float) -> IterationRecord:
    """Generation from 0, training up to 10, in a window of 10 s."""
    spans = [
        Span("generate", "r0", 0, generate, number),
        Span("forward_backward", "train", 10 - train, 10, number),
    ]
    times = iteration_times(spans, 0, 10, ["r0"])
    return IterationRecord(iteration=number, reward=reward, times=times, tokens=100, groups=4, groups_duplicated=number)


def summary(*records: IterationRecord) -> RunSummary:
    return summarise(
        records,
        run_id="demo",
        run_url="runs/demo",
        mlflow_run_id="abc",
        schedule="periodic",
        engine="embedded",
        eval_before=0.25,
        eval_after=0.75,
        weights_sha256="f" * 64,
    )


def test_the_summary_has_every_promised_field_as_json() -> None:
    found = json.loads(summary(record(0, 0.1, 6, 8)).model_dump_json())

    assert set(found) >= REQUIRED
    assert found["eval_after"] == 0.75
    assert all(field.description for field in RunSummary.model_fields.values())


def test_times_are_sums_and_ratios_are_those_of_the_sums() -> None:
    found = summary(record(1, 0.5, 8, 6), record(0, 0.1, 6, 8))

    assert (found.t_generate, found.t_train, found.wall) == (14, 14, 20)
    assert (found.idle_generate, found.idle_train) == (6, 6)
    assert found.bound == pytest.approx(28 / 14)
    assert found.overlap == pytest.approx((4 + 4) / 14)
    assert found.tokens_per_s == 200 / 20
    assert (found.iterations, found.groups, found.groups_duplicated) == (2, 8, 1)


def test_first_and_last_reward_skip_iterations_without_a_score_and_do_not_depend_on_order() -> None:
    found = summary(record(2, None, 1, 1), record(1, 0.4, 1, 1), record(0, None, 1, 1))

    assert (found.reward_first, found.reward_last) == (0.4, 0.4)


def test_a_run_without_iterations_has_a_summary() -> None:
    found = summary()

    assert (found.iterations, found.tokens_per_s, found.reward_first, found.bound) == (0, 0.0, None, 1.0)


def test_a_record_survives_the_checkpoint() -> None:
    before = record(3, 0.2, 6, 8)

    assert IterationRecord.model_validate(json.loads(before.model_dump_json())) == before


def test_every_metric_of_the_timeline_is_documented_and_an_unknown_one_is_named() -> None:
    check_documented(record(0, 0.1, 6, 8).times.metrics())
    check_documented([*METRICS, "reward/exact", "system/cpu_utilization_percentage"])
    with pytest.raises(ValueError, match="train/losss"):
        check_documented(["train/losss", "train/loss"])


def test_the_glossary_mentions_every_metric_once() -> None:
    text = glossary()

    assert all(text.count(f"`{name}`") == 1 for name in METRICS)


def test_keys_that_mlflow_refuses_are_mended() -> None:
    assert metric_key("eval/pass@1 in %") == "eval/pass_1 in _"
