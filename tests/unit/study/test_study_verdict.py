"""What a comparison says of equal, rounded, different and incomparable runs."""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pa_core.config import TrainConfig
from pa_core.store.objects import ObjectStore
from pa_core.study.children import Outcome
from pa_core.study.history import History, read_timeline
from pa_core.study.pictures import reward_picture, sweep_picture, timelines_picture
from pa_core.study.plan import Child
from pa_core.study.tables import comparison_rows, markdown
from pa_core.study.verdict import Finished, choose_baseline, judge, unfinished
from pa_core.tracking.timeline import Span

REWARDS = (0.25, 0.5, 0.75, 0.5, 1.0)
SAMPLES = ([5, 6, 7], [8, 9])
LOGPROBS = ([-1.0, -2.0, -0.5], [-0.25, -3.0])
numbers = itertools.count()


def rollouts(store: ObjectStore, iteration: int, tokens: Sequence[list[int]], logprobs: Sequence[list[float]]) -> None:
    rows = {
        "group_id": ["g"] * len(tokens),
        "sample_index": list(range(len(tokens))),
        "token_ids": list(tokens),
        "logprobs": list(logprobs),
    }
    data = io.BytesIO()
    pq.write_table(pa.table(rows), data)
    store.publish(f"rollouts/v{iteration:06d}.parquet", data.getvalue())


def run(
    name: str,
    *,
    rewards: Sequence[float] = REWARDS,
    digest: str = "a" * 64,
    wall: float = 10.0,
    tokens: float = 1000.0,
    gradient: float = 0.5,
    data: str = "d1",
    last: tuple[Sequence[list[int]], Sequence[list[float]]] | None = None,
    at: int | None = None,
    **changes: Any,
) -> Finished:
    tree = {"data": {"name": "chain_sum"}, "schedule": {"stream": name != "sync"}, **changes}
    child = Child(name, (), TrainConfig.model_validate(tree), f"memory://{name}")
    summary = {
        "wall": wall, "tokens": tokens, "tokens_per_s": tokens / wall, "bound": 1.6, "iterations": len(rewards),
        "weights_sha256": digest, "idle_generate": 4.0, "idle_train": 1.0, "overlap": 0.5,
        "reward_first": rewards[0], "reward_last": rewards[-1], "eval_before": None, "eval_after": 0.5,
    }  # fmt: skip
    count = range(len(rewards))
    history = History(
        reward=dict(enumerate(rewards)),
        wall=dict.fromkeys(count, wall / len(rewards)),
        tokens=dict.fromkeys(count, tokens / len(rewards)),
        gradient=dict.fromkeys(count, gradient),
    )
    store = ObjectStore.open(f"memory://verdict-{next(numbers)}")
    if last is not None:
        rollouts(store, len(rewards) - 1 if at is None else at, *last)
    facts = {"fingerprints": {"data": data, "model": "m"}, "mlflow_run_id": name}
    return Finished(Outcome(child, "finished", "", summary, facts), history, store)


def words(verdict: Any) -> str:
    return " ".join([verdict.headline, *verdict.sentences])


def test_the_same_bytes_are_equal_bit_for_bit_and_the_speed_is_set_against_the_bound() -> None:
    verdict = judge(run("sync", wall=15.0), run("periodic"))
    assert verdict.equality == "bitwise"
    assert verdict.headline == "periodic against sync: equal, bit for bit"
    said = words(verdict)
    assert "`schedule.stream` (false and true); all others were the same" in said
    assert "the mean reward and the number of tokens are the same in each of the 5 iterations" in said
    assert (verdict.speed_up, verdict.bound) == (1.5, 1.6)
    assert "10.0 s of iterations, sync 15.0 s: 1.50 times as fast" in said
    assert "at most 1.60 by overlap (the bound): 94% of it" in said


def test_a_speed_up_beyond_the_bound_is_not_put_down_to_overlap() -> None:
    said = words(judge(run("sync", wall=20.0), run("periodic")))
    assert "more than the 1.60 that the times of sync allow by overlap alone: something else differed" in said


def test_weights_that_never_moved_prove_nothing() -> None:
    verdict = judge(run("sync", gradient=0.0), run("periodic", gradient=0.0))
    assert verdict.equality == "unproven"
    assert "no iteration moved any weight" in words(verdict)


def test_other_bytes_with_the_same_samples_are_rounding() -> None:
    near = ([-1.0, -2.0, -0.500003], [-0.25, -3.0])
    verdict = judge(run("sync", last=(SAMPLES, LOGPROBS)), run("periodic", digest="b" * 64, last=(SAMPLES, near)))
    assert verdict.equality == "rounding"
    said = words(verdict)
    assert "Equal up to rounding" in said and "0 of 2 samples have another token" in said
    assert "within 3.0e-06 nats (rounding explains 0.001)" in said


def test_a_token_flipped_by_rounding_makes_another_draw_of_the_same_experiment() -> None:
    flipped = ([5, 6, 9, 9], [8, 9]), ([-1.0, -2.0, -4.0, -1.0], [-0.25, -3.0])
    other = run("periodic", digest="b" * 64, rewards=(0.25, 0.5, 0.25, 0.0, 0.0), last=flipped, at=2)
    verdict = judge(run("sync", last=(SAMPLES, LOGPROBS), at=2), other)
    assert verdict.equality == "rounding"
    said = words(verdict)
    assert "The same until iteration 1; from 2 on reward or tokens differ, and rounding explains it" in said
    assert "1 of 2 samples have another token" in said


def test_what_optimizer_steps_may_have_made_of_rounding_is_neither_called_rounding_nor_different() -> None:
    apart = ([5, 6, 9], [8, 9]), ([-1.0, -2.047, -4.0], [-0.25, -3.0])
    other = run("periodic", digest="b" * 64, rewards=(0.25, 0.5, 0.25, 0.0, 0.0), last=apart, at=2)
    verdict = judge(run("sync", last=(SAMPLES, LOGPROBS), at=2), other)
    assert verdict.equality == "unproven"
    assert "no more than AdamW may have made of it" in words(verdict) and "within 4.7e-02 nats" in words(verdict)

    first = run("periodic", digest="b" * 64, rewards=(0.0, *REWARDS[1:]), last=apart, at=0)
    assert judge(run("sync", last=(SAMPLES, LOGPROBS), at=0), first).equality == "different", "no step was before it"


def test_another_policy_is_told_from_rounding_by_its_log_probabilities() -> None:
    apart = ([5, 6, 9], [8, 9]), ([-1.0, -2.2, -4.0], [-0.25, -3.0])
    other = run("periodic", digest="b" * 64, rewards=(0.25, 0.5, 0.25, 0.0, 0.0), last=apart, at=2)
    verdict = judge(run("sync", last=(SAMPLES, LOGPROBS), at=2), other)
    assert verdict.equality == "different"
    assert "differ by more than rounding explains" in words(verdict) and "within 2.0e-01 nats" in words(verdict)


def test_without_rollouts_nothing_is_claimed() -> None:
    verdict = judge(run("sync"), run("periodic", digest="b" * 64, rewards=(0.0, *REWARDS[1:])))
    assert verdict.equality == "unproven"
    assert "From the first iteration on reward or tokens differ, and no rollouts are left" in words(verdict)


def test_a_broken_promise_of_deterministic_is_not_called_rounding() -> None:
    verdict = judge(
        run("sync", last=(SAMPLES, LOGPROBS), deterministic=True),
        run("periodic", digest="b" * 64, last=(SAMPLES, LOGPROBS), deterministic=True),
    )
    assert verdict.equality == "different"
    assert "NOT equal" in words(verdict) and "`deterministic: true` promises the same bytes" in words(verdict)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"seed": 1}, "`seed` differed"),
        ({"optimizer": {"learning_rate": 1e-5}}, "`optimizer.learning_rate` differed"),
        ({"data": "d2"}, "the data itself differed (its fingerprint), although its settings were the same"),
    ],
)
def test_other_trainings_get_no_speed_up(changes: dict[str, Any], reason: str) -> None:
    verdict = judge(run("sync"), run("periodic", **changes))
    assert verdict.equality == "incomparable" and verdict.speed_up is None
    assert f"They are not the same training: {reason}" in words(verdict)
    assert "wall times are those of different work" in words(verdict)


def test_other_amounts_of_work_are_compared_per_token() -> None:
    said = words(judge(run("sync"), run("periodic", wall=5.0, tokens=800.0, digest="b" * 64)))
    assert "1,000 and 800 tokens. Per token it was 1.60 times as fast" in said


def test_held_out_accuracies_are_compared_with_their_chance() -> None:
    def measured(one: Finished, accuracy: float) -> Finished:
        history = History(**{**vars(one.history), "accuracy": {0: 0.1, 5: accuracy}, "accuracy_ci95": {5: 0.03}})
        return Finished(one.outcome, history, one.store)

    near = judge(measured(run("sync"), 0.9), measured(run("periodic"), 0.93))
    assert "the difference of 0.030 is within what 0.042 of chance explains at 95 %" in words(near)
    far = judge(measured(run("sync"), 0.9), measured(run("periodic"), 0.8))
    assert "the difference of 0.100 is more than what 0.042 of chance explains" in words(far)


def test_a_failed_run_is_named_with_its_reason_and_the_baseline_is_one_that_finished() -> None:
    failed = Outcome(run("sync").outcome.child, "failed", "no such model\nsecond line")
    periodic = run("periodic").outcome
    assert choose_baseline([failed, periodic]) is periodic
    assert choose_baseline([periodic, run("sync").outcome]).name == "sync"  # type: ignore[union-attr]
    assert choose_baseline([failed]) is None
    verdict = unfinished(failed, "periodic")
    assert verdict.headline == "sync against periodic: not comparable"
    assert verdict.sentences == ("sync failed, so that nothing can be said about it: no such model",)


def test_the_table_has_times_shares_and_what_failed() -> None:
    failed = Outcome(run("sync").outcome.child, "failed", "no | pipe")
    rows = comparison_rows([run("periodic").outcome, failed], {"periodic": 1.5})
    assert rows[0]["speed-up"] == 1.5 and rows[0]["replicas idle"] == "40%" and rows[0]["weights"] == "a" * 12
    lines = markdown(rows).splitlines()
    assert len(lines) == 4 and "held-out before" not in lines[0]
    assert lines[3].startswith("| sync | failed | sync |") and "no \\| pipe" in lines[3]


def test_a_timeline_is_cut_at_what_was_published(tmp_path: Path) -> None:
    store = ObjectStore.open(str(tmp_path))
    spans = [
        Span("generate", "r0", 100.0, 103.0, 0),
        Span("forward_backward", "train", 103.0, 104.0, 0),
        Span("publish", "train", 104.0, 105.0, 0, {"version": 1}),
    ]
    store.publish("timeline/v000000.json", json.dumps([span.to_dict() for span in spans]).encode())
    found, windows = read_timeline(store, History(wall={0: 4.5, 1: 2.0}), last=3)
    assert windows == [(0, 100.5, 105.0)] and [span.name for span in found] == [span.name for span in spans]


def test_timelines_share_one_axis_so_that_the_faster_one_ends_earlier() -> None:
    def timeline(length: float) -> tuple[list[Span], list[tuple[int, float, float]]]:
        spans = [Span("generate", "r0", 50.0, 50.0 + length, 0), Span("step", "train", 50.0, 50.0 + length, 0)]
        return spans, [(0, 50.0, 50.0 + length)]

    figure = timelines_picture({"sync": timeline(8.0), "periodic": timeline(5.0)}, "both")
    upper, lower = figure.axes
    assert upper.get_xlim() == lower.get_xlim() == (0.0, 8.0)
    assert upper.get_title(loc="left").startswith("sync · iteration 0") and "5.0 s" in lower.get_title(loc="left")
    with pytest.raises(ValueError, match="no timeline"):
        timelines_picture({}, "none")


def test_rewards_are_drawn_against_iterations_and_against_seconds() -> None:
    figure = reward_picture({"sync": History(reward={0: 0.1, 1: 0.2}, wall={0: 2.0, 1: 3.0})}, "rewards")
    left, right = figure.axes
    assert list(left.lines[0].get_xdata()) == [0, 1]
    assert list(right.lines[0].get_xdata()) == [2.0, 5.0]


def test_a_sweep_is_drawn_per_key_with_the_best_filled() -> None:
    points = [
        ({"optimizer.learning_rate": "1e-6", "objective.loss": "grpo"}, 0.2),
        ({"optimizer.learning_rate": "1e-4", "objective.loss": "gspo"}, 0.9),
    ]
    figure = sweep_picture(points, ["optimizer.learning_rate", "objective.loss"], "eval/accuracy", 1, "sweep")
    rate, loss = figure.axes[:2]
    assert rate.get_xscale() == "log"
    assert [tick.get_text() for tick in loss.get_xticklabels()] == ["grpo", "gspo"]
    filled = [line for line in rate.lines if line.get_label() == "best"]
    assert [list(line.get_ydata()) for line in filled] == [[0.9]]
