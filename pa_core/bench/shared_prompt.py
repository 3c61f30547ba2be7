"""``pa bench shared-prompt``: the training step with shared-prompt attention against the best step without sharing.

Over a grid of group size, prompt and response length. One step is forward, GRPO loss and backward over a group of K
responses to one prompt. Both sides run the output head on response positions only, in chunks. The per-sample side
gets the micro-batch size that is fastest for it: candidates are timed on a part of the group first. Each side of a
point is a process of its own, so that its peak memory is its own; they are timed alternately, so that a slow phase of
the machine hits both.
"""

from __future__ import annotations

import logging
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from pa_core.bench.flops import ModelShape, flop_ratio, per_sample_work, shared_work, token_ratio
from pa_core.bench.grid import Budget, Point, Rows, ordered
from pa_core.bench.models import model_config
from pa_core.bench.side import Side

log = logging.getLogger(__name__)

_OWN_SIDE = "pa_core.bench.own_side"
# Steps of each side besides the timed ones: the search for a size and the memory of two micro-batches.
_EXTRA_STEPS = 1.0


@dataclass(frozen=True)
class Settings:
    """What all points of a grid share.

    Attributes:
        model: a source as ``model.path``, or a shape's name.
        dtype: float32 or bfloat16. device: cpu or cuda. threads: CPU threads.
        repeats: timed steps per side and point; the median counts.
    """

    model: str
    dtype: str
    device: str
    threads: int
    repeats: int


def run(
    settings: Settings,
    group_sizes: list[int],
    prompts: list[int],
    responses: list[int],
    *,
    minutes: float | None = None,
    out: Path | None = None,
    finished: Callable[[dict[str, Any]], None] = lambda row: None,
) -> dict[str, Any]:
    """Measure the grid.

    Args:
        minutes: stop before a point that would exceed this; what is left out is named in ``skipped``.
        out: file of finished points; those in it are not measured again.
        finished: told every row as soon as it is there.

    Returns:
        ``rows``, ``skipped``, and the least ``share_of_flop_ratio`` and ``speedup`` over the rows.
    """
    shape = ModelShape.of(model_config(settings.model))

    def cost(point: Point) -> float:
        one_of_each = per_sample_work(*point.sizes).total(shape) + shared_work(*point.sizes).total(shape)
        return one_of_each * (settings.repeats + _EXTRA_STEPS)

    points = ordered(group_sizes, prompts, responses, cost)
    rows, budget, skipped = Rows(out, vars(settings)), Budget(minutes), []
    for number, point in enumerate(points, start=1):
        if point not in rows.done:
            if not budget.fits(cost(point)):
                skipped.append(str(point))
                continue
            log.info("point %d of %d: %s", number, len(points), point)
            started = time.monotonic()
            rows.add(point, measure(settings, point, shape))
            budget.spent(cost(point), time.monotonic() - started)
        finished(rows.done[point])
        log.info("%s", _line(rows.done[point]))
    found = [rows.done[point] for point in points if point in rows.done]
    least = {
        f"least_{name}": min((row[name] for row in found), default=None) for name in ("share_of_flop_ratio", "speedup")
    }
    return {**vars(settings), "rows": found, "skipped": skipped, **least}


def measure(settings: Settings, point: Point, shape: ModelShape) -> dict[str, Any]:
    """Both sides of one point."""
    common: dict[str, Any] = {
        "model": settings.model,
        "dtype": settings.dtype,
        "device": settings.device,
        "threads": settings.threads,
        **vars(point),
    }
    whole = point.group_size
    with (
        Side(_OWN_SIDE, threads=settings.threads) as shared,
        Side(_OWN_SIDE, threads=settings.threads) as per_sample,
        tempfile.TemporaryDirectory(prefix="pa-bench-") as folder,
    ):
        shared.ask("load", attention="shared_prompt", **common)
        per_sample.ask("load", attention="per_sample", **common)
        search = per_sample.ask("best_size")
        size = search["size"]
        peaks = _peaks(shared, per_sample, whole, size)
        times: dict[str, list[float]] = {"shared": [], "per_sample": []}
        for _ in range(settings.repeats):
            times["shared"].append(shared.ask("step", size=whole))
            times["per_sample"].append(per_sample.ask("step", size=size))
        for name, side in (("shared", shared), ("per_sample", per_sample)):
            side.ask("gradients", path=f"{folder}/{name}")
        distance = gradient_distance(Path(folder) / "shared", Path(folder) / "per_sample")
    seconds = {name: statistics.median(values) for name, values in times.items()}
    speedup = seconds["per_sample"] / seconds["shared"]
    flops = flop_ratio(shape, *point.sizes)
    rho = token_ratio(*point.sizes)
    return {
        "seconds": seconds,
        "all_seconds": times,
        "per_sample_micro_batch": size,
        "per_sample_seconds_per_sample": search["seconds_per_sample"],
        "speedup": speedup,
        "rho": rho,
        "share_of_rho": speedup / rho,
        "flop_ratio": flops,
        "share_of_flop_ratio": speedup / flops,
        "peak_bytes": peaks,
        "memory_ratio": peaks["per_sample"] / peaks["shared"],
        "memory_ratio_whole_group": peaks["per_sample_whole_group"] / peaks["shared"],
        "flops_per_s": {
            "shared": shared_work(*point.sizes).total(shape) / seconds["shared"],
            "per_sample": per_sample_work(*point.sizes).total(shape) / seconds["per_sample"],
        },
        "gradient_distance": distance,
    }


def _peaks(shared: Side, per_sample: Side, whole: int, size: int) -> dict[str, int]:
    """Peak bytes of both sides above the loaded model.

    ``per_sample`` is in its fastest micro-batch, which may be a single sample; ``per_sample_whole_group`` is what it
    would take to have the whole group in one pass, as the shared side has: extrapolated from two sizes, since memory
    grows linearly with samples and the whole group rarely fits.
    """
    larger = min(max(2, size), whole)
    measured = {tried: per_sample.ask("peak", size=tried) for tried in sorted({1, size, larger})}
    slope = (measured[larger] - measured[1]) / max(1, larger - 1)
    return {
        "shared": shared.ask("peak", size=whole),
        "per_sample": measured[size],
        "per_sample_whole_group": round(measured[1] + slope * (whole - 1)),
    }


def gradient_distance(ours: Path, theirs: Path) -> float:
    """|ours - theirs| / |theirs| over all parameters, of two files of gradients; accumulated in float64."""
    left, right = load_file(ours), load_file(theirs)
    if left.keys() != right.keys():
        raise ValueError(f"gradients of different parameters: {sorted(left.keys() ^ right.keys())}")
    difference = sum(float((left[name].double() - right[name].double()).square().sum()) for name in left)
    size = sum(float(right[name].double().square().sum()) for name in right)
    return float(torch.tensor(difference / size).sqrt())


_HEADER = (
    f"{'K':>3} {'Lp':>5} {'Lr':>4} | {'shared s':>9} {'per-sample s':>12} {'(size)':>6} | {'speed-up':>8} {'rho':>6} "
    f"{'FLOPs':>6} {'share':>6} | {'shared GB':>9} {'per-s. GB':>9} {'ratio':>6} {'whole':>6} | {'grad. dist.':>11}"
)


def _line(row: dict[str, Any]) -> str:
    seconds, peak = row["seconds"], row["peak_bytes"]
    return (
        f"{row['group_size']:>3} {row['prompt_len']:>5} {row['response_len']:>4} | {seconds['shared']:>9.3f} "
        f"{seconds['per_sample']:>12.3f} {row['per_sample_micro_batch']:>6} | {row['speedup']:>7.2f}x "
        f"{row['rho']:>6.2f} {row['flop_ratio']:>6.2f} {row['share_of_flop_ratio']:>6.1%} | "
        f"{peak['shared'] / 1e9:>9.3f} {peak['per_sample'] / 1e9:>9.3f} {row['memory_ratio']:>5.2f}x "
        f"{row['memory_ratio_whole_group']:>5.2f}x | "
        f"{row['gradient_distance']:>11.1e}"
    )


def render(result: dict[str, Any]) -> str:
    """The table, and what is missing from it."""
    lines = [
        f"{result['model']}, {result['dtype']}, {result['device']}, {result['threads']} threads, median of "
        f"{result['repeats']}; per sample in its fastest micro-batch (size).",
        "FLOPs: ratio by formula. share: speed-up / that. GB: peak above the loaded model, gradients included.",
        "whole: memory ratio with the whole group in one pass on both sides, extrapolated.",
        _HEADER,
        *map(_line, result["rows"]),
    ]
    if result["rows"]:
        lines.append(
            f"least share of the FLOP ratio {result['least_share_of_flop_ratio']:.1%} (target 97 %); least speed-up "
            f"{result['least_speedup']:.2f}x (target: never below 1)"
        )
    if result["skipped"]:
        lines.append(f"left out for lack of time: {'; '.join(result['skipped'])}")
    return "\n".join(lines)
