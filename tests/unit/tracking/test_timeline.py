"""Times computed by hand from hand-made timelines."""

from __future__ import annotations

import threading
import time

import pytest

from pa_core.tracking.timeline import Span, Timeline, iteration_times, rows


def spans(*entries: tuple[str, str, float, float]) -> list[Span]:
    return [Span(name, lane, start, end, 7) for name, lane, start, end in entries]


def total(shares: object) -> float:
    return sum(getattr(shares, name) for name in ("work", "sync", "other", "idle"))


def test_a_synchronous_iteration_has_no_overlap_and_waits_as_long_as_the_other_side_works() -> None:
    times = iteration_times(
        spans(
            ("load", "r0", 0, 1),
            ("generate", "r0", 1, 5),
            ("wait", "train", 0, 5),
            ("forward_backward", "train", 5, 8),
            ("step", "train", 8, 9),
            ("publish", "train", 9, 10),
        ),
        0,
        10,
        ["r0"],
    )

    assert (times.wall, times.t_generate, times.t_train, times.t_sync) == (10, 4, 4, 2)
    assert times.overlap == 0
    assert times.bound == pytest.approx((4 + 4 + 2) / (4 + 2))
    assert (times.generate.work, times.generate.sync, times.generate.other, times.generate.idle) == (4, 1, 0, 5)
    assert (times.train.work, times.train.sync, times.train.other, times.train.idle) == (4, 1, 0, 5)


def test_work_that_is_wholly_hidden_is_an_overlap_of_one() -> None:
    times = iteration_times(
        spans(("generate", "r0", 0, 8), ("forward_backward", "train", 2, 7), ("step", "train", 7, 8)), 0, 8, ["r0"]
    )

    assert times.overlap == 1
    assert (times.t_generate, times.t_train, times.t_sync) == (8, 6, 0)
    assert times.bound == pytest.approx(14 / 8)
    assert times.train.idle == 2


def test_partial_overlap_is_measured_against_the_shorter_side() -> None:
    times = iteration_times(
        spans(("generate", "r0", 0, 6), ("forward_backward", "train", 4, 7), ("step", "train", 7, 8)), 0, 8, ["r0"]
    )

    assert times.both == 2
    assert times.overlap == pytest.approx(2 / 4)


def test_replicas_are_averaged_and_concurrent_groups_of_one_count_once() -> None:
    times = iteration_times(
        spans(
            ("load", "r0", 0, 1),
            ("load", "r1", 0, 3),
            ("generate", "r0", 1, 5),
            ("generate", "r0", 2, 6),
            ("generate", "r1", 3, 6),
            ("forward_backward", "train", 4, 8),
            ("publish", "train", 8, 9),
        ),
        0,
        10,
        ["r0", "r1"],
    )

    assert times.t_generate == (5 + 3) / 2
    assert times.both == (2 + 2) / 2
    assert times.overlap == pytest.approx(2 / 4)
    assert times.t_sync == 1 + 1, "published in 1 s, and the first replica was ready after 1 s"
    assert (times.generate.sync, times.generate.idle) == ((1 + 3) / 2, (4 + 4) / 2)


def test_a_replica_that_did_nothing_is_idle_all_the_time() -> None:
    times = iteration_times(spans(("generate", "r0", 0, 4)), 0, 4, ["r0", "r1"])

    assert (times.t_generate, times.generate.idle) == (2, 2)


def test_shares_of_both_sides_add_up_to_the_wall_time_when_spans_overlap_and_cross_the_window() -> None:
    times = iteration_times(
        spans(
            ("load", "r0", -2, 1.5),
            ("generate", "r0", 1, 5),
            ("generate", "r0", 4, 30),
            ("forward_backward", "train", -1, 3),
            ("publish", "train", 2, 5),
            ("checkpoint", "train", 4, 6),
            ("log", "train", 5.5, 7),
            ("wait", "train", 7, 40),
        ),
        0,
        10,
        ["r0"],
    )

    assert total(times.generate) == pytest.approx(times.wall)
    assert total(times.train) == pytest.approx(times.wall)
    assert (times.train.work, times.train.sync, times.train.other, times.train.idle) == (3, 2, 2, 3)


def test_idle_of_a_real_trainer_thread_is_its_recorded_waiting() -> None:
    timeline = Timeline()
    start = time.time()
    for _ in range(3):
        with timeline.span("wait", "train", 0):
            time.sleep(0.03)
        with timeline.span("forward_backward", "train", 0):
            time.sleep(0.02)
    with timeline.span("step", "train", 0):
        time.sleep(0.01)
    end = time.time()

    recorded = timeline.spans()
    times = iteration_times(recorded, start, end, ["r0"])
    waited = sum(span.duration for span in recorded if span.name == "wait")
    assert times.train.idle == pytest.approx(waited, abs=0.02)
    assert waited >= 0.09


def test_an_iteration_without_work_has_overlap_zero_and_bound_one() -> None:
    times = iteration_times([], 0, 5, ["r0"])

    assert (times.overlap, times.bound, times.train.idle) == (0.0, 1.0, 5)


def test_an_empty_window_or_no_replicas_is_refused() -> None:
    with pytest.raises(ValueError, match="window"):
        iteration_times([], 5, 5, ["r0"])
    with pytest.raises(ValueError, match="replicas"):
        iteration_times([], 0, 5, [])


def test_spans_from_many_threads_are_all_kept_in_order_of_start() -> None:
    timeline = Timeline()

    def work(number: int) -> None:
        for place in range(200):
            timeline.add("generate", f"r{number}", place, place + 1, iteration=0)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    starts = [span.start for span in timeline.spans()]
    assert len(starts) == 1600
    assert starts == sorted(starts)
    assert len(timeline.spans(10, 10)) == 8 * 2, "the windows's edges belong to both neighbours"
    timeline.forget(before=150)
    assert min(span.end for span in timeline.spans()) == 150


def test_a_block_that_raises_is_recorded_with_its_attributes() -> None:
    timeline = Timeline()
    with pytest.raises(RuntimeError), timeline.span("publish", "train", 3, version=4) as attrs:
        attrs["bytes"] = 10
        raise RuntimeError

    (span,) = timeline.spans()
    assert (span.name, span.iteration, span.attrs) == ("publish", 3, {"version": 4, "bytes": 10})


def test_a_misspelt_name_is_refused() -> None:
    with pytest.raises(ValueError, match="forward_backward"):
        Timeline().add("forward", "train", 0, 1, iteration=0)


def test_a_clock_that_was_set_back_gives_a_span_of_length_zero() -> None:
    span = Timeline().add("generate", "r0", 10, 9, iteration=0)

    assert (span.start, span.duration) == (10, 0)


def test_rows_hold_no_overlapping_spans_and_are_as_few_as_the_greatest_concurrency() -> None:
    packed = rows(spans(("generate", "r0", 0, 4), ("generate", "r0", 1, 2), ("generate", "r0", 2, 5)))

    assert [[(span.start, span.end) for span in row] for row in packed] == [[(0, 4)], [(1, 2), (2, 5)]]
