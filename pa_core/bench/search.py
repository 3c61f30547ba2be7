"""The micro-batch size that is fastest per sample, found by trial."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def fastest_size(
    samples: int, seconds: Callable[[int], float], fits: Callable[[int], bool] = lambda size: True
) -> dict[str, Any]:
    """Double the size while that makes a sample cheaper; only sizes that divide ``samples`` evenly are tried.

    Args:
        seconds: seconds of one micro-batch of a size.
        fits: asked after a size was tried: whether twice as many samples would still fit the memory.

    Returns:
        ``size``, and ``seconds_per_sample`` by size.
    """
    tried: dict[int, float] = {}
    size = 1
    while True:
        tried[size] = seconds(size) / size
        best = min(tried, key=tried.__getitem__)
        larger = [other for other in range(2 * size, samples + 1) if samples % other == 0]
        if best != size or not larger or not fits(size):
            return {"size": best, "seconds_per_sample": tried}
        size = larger[0]
