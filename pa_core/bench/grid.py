"""A grid of measurements: which point comes first, which still fits the time, and which is already done."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from pa_core.errors import ConfigError


@dataclass(frozen=True)
class Point:
    """One group: K responses of Lr tokens to a prompt of Lp tokens."""

    group_size: int
    prompt_len: int
    response_len: int

    def __str__(self) -> str:
        return f"K={self.group_size} Lp={self.prompt_len} Lr={self.response_len}"

    @property
    def sizes(self) -> tuple[int, int, int]:
        """(K, Lp, Lr)."""
        return self.group_size, self.prompt_len, self.response_len


#: The point that comparisons are usually stated at.
ANCHOR = Point(16, 1024, 64)


def parse_sizes(option: str, text: str, least: int = 1) -> list[int]:
    """``8,16,32`` as numbers.

    Raises:
        ConfigError: names the option, the value and the form.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) >= least for part in parts):
        raise ConfigError(f"{option} {text}: expected whole numbers from {least}, separated by commas, such as 8,16,32")
    return [int(part) for part in parts]


def ordered(
    group_sizes: Sequence[int], prompts: Sequence[int], responses: Sequence[int], cost: Callable[[Point], float]
) -> list[Point]:
    """All points, those that tell most first.

    First :data:`ANCHOR` (or the middle of the grid), then what differs from it in one size only, then the rest; by
    ascending cost within each, so that as many points as possible fit a limited time.
    """
    points = [
        Point(*sizes) for sizes in product(sorted(set(group_sizes)), sorted(set(prompts)), sorted(set(responses)))
    ]
    centre = ANCHOR if ANCHOR in points else points[len(points) // 2]

    def rank(point: Point) -> tuple[int, float]:
        differing = sum(mine != theirs for mine, theirs in zip(point.sizes, centre.sizes, strict=True))
        return min(differing, 2), cost(point)

    return sorted(points, key=rank)


class Budget:
    """Time that measuring may take; what a point will take is foreseen from the points before it.

    Args:
        minutes: the limit; None: none.
    """

    def __init__(self, minutes: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = None if minutes is None else clock() + 60 * minutes
        self._seconds = self._cost = 0.0

    def fits(self, cost: float) -> bool:
        """Whether a point of this cost (any unit) still fits. The first point does, unless time is up already."""
        if self._end is None:
            return True
        left = self._end - self._clock()
        foreseen = cost * self._seconds / self._cost if self._cost else 0.0
        return left > 0 and foreseen <= left

    def spent(self, cost: float, seconds: float) -> None:
        """Note what a point took."""
        self._cost += cost
        self._seconds += seconds


class Rows:
    """Finished points, in a file when one is named, so that an interrupted grid goes on where it was.

    Args:
        path: JSON lines; made if missing. None keeps the rows in memory only.
        settings: what must be equal for a row to count as done.
    """

    def __init__(self, path: Path | None, settings: dict[str, Any]) -> None:
        self._path = path
        self._settings = settings
        self.done: dict[Point, dict[str, Any]] = {}
        if path is not None and path.is_file():
            for number, line in enumerate(path.read_text().splitlines(), start=1):
                self._take(path, number, line)

    def _take(self, path: Path, number: int, line: str) -> None:
        try:
            row = json.loads(line)
            point = Point(row["group_size"], row["prompt_len"], row["response_len"])
            settings = row["settings"]
        except (ValueError, KeyError, TypeError):
            raise ConfigError(f"--out {path}: line {number} is no row of this benchmark; name another file") from None
        if settings == self._settings:
            self.done[point] = row

    def add(self, point: Point, row: dict[str, Any]) -> None:
        """Keep a finished point."""
        row = {"group_size": point.group_size, "prompt_len": point.prompt_len, "response_len": point.response_len} | row
        self.done[point] = row | {"settings": self._settings}
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                file.write(json.dumps(self.done[point]) + "\n")
