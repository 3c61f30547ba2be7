"""Which points are measured, in which order, and that an interrupted grid goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from pa_core.bench.grid import ANCHOR, Budget, Point, Rows, ordered, parse_sizes
from pa_core.bench.search import fastest_size
from pa_core.errors import ConfigError


def _cost(point: Point) -> float:
    return float(point.group_size * (point.prompt_len + point.response_len))


def test_the_usual_point_comes_first_then_its_axes_then_the_rest_cheapest_first() -> None:
    points = ordered([32, 16], [2048, 1024], [64, 256], _cost)
    assert points[0] == ANCHOR
    axes, rest = points[1:4], points[4:]
    assert set(axes) == {Point(32, 1024, 64), Point(16, 2048, 64), Point(16, 1024, 256)}
    assert [_cost(point) for point in axes] == sorted(map(_cost, axes))
    assert [_cost(point) for point in rest] == sorted(map(_cost, rest)) and len(set(points)) == 8


def test_time_is_foreseen_from_the_points_before() -> None:
    now = [0.0]
    budget = Budget(minutes=1.0, clock=lambda: now[0])
    assert budget.fits(10.0)  # nothing is known yet
    now[0] = 20.0
    budget.spent(10.0, 20.0)
    assert budget.fits(20.0) and not budget.fits(21.0)  # 40 s are left, at 2 s per unit
    now[0] = 61.0
    assert not budget.fits(0.0)
    assert Budget(None).fits(1e9)


def test_finished_points_are_kept_and_found_again_for_the_same_settings(tmp_path: Path) -> None:
    file = tmp_path / "new" / "points.jsonl"
    Rows(file, {"threads": 2}).add(ANCHOR, {"speedup": 7.0})
    assert Rows(file, {"threads": 2}).done[ANCHOR]["speedup"] == 7.0
    assert not Rows(file, {"threads": 1}).done
    file.write_text("{}\n")
    with pytest.raises(ConfigError, match=r"--out .*points.jsonl: line 1"):
        Rows(file, {"threads": 2})


def test_sizes_that_are_none_are_named() -> None:
    assert parse_sizes("--prompt", "128, 512") == [128, 512]
    for text in ("", "8,", "0", "-1", "1.5"):
        with pytest.raises(ConfigError, match="--prompt"):
            parse_sizes("--prompt", text)


def test_the_fastest_size_is_searched_by_doubling() -> None:
    seconds = {1: 1.0, 2: 1.5, 4: 2.5, 8: 8.0, 16: 16.0}
    assert fastest_size(16, seconds.__getitem__) == {
        "size": 4,
        "seconds_per_sample": {1: 1.0, 2: 0.75, 4: 0.625, 8: 1.0},
    }
    assert fastest_size(16, seconds.__getitem__, fits=lambda size: size < 2)["size"] == 2
    assert fastest_size(3, lambda size: 1.0)["size"] == 3  # 2 does not divide the group
