"""``pa bench overlap``: one config and seed, sync and periodic, one after the other on the same deployment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pa_core.config_files import load_config
from pa_core.loop.launch import train_new


def run(config: Path, overrides: list[str]) -> dict[str, Any]:
    """Train twice and compare. The bound is that of the sync run's own times: what perfect overlap would give."""
    configs = [load_config(config, [*overrides, f"schedule.stream={stream}"]) for stream in ("false", "true")]
    sync, periodic = (train_new(each, config.stem) for each in configs)
    speed_up = sync.wall / periodic.wall
    return {
        "speed_up": speed_up,
        "bound": sync.bound,
        "share_of_bound": speed_up / sync.bound,
        "sync": sync.model_dump(mode="json"),
        "periodic": periodic.model_dump(mode="json"),
    }


def render(result: dict[str, Any]) -> str:
    """Both runs beside each other."""
    lines = [f"{'':<10}{'wall s':>9}{'tokens/s':>10}{'generate':>10}{'train':>8}{'sync':>7}{'overlap':>9}"]
    for name in ("sync", "periodic"):
        one = result[name]
        lines.append(
            f"{name:<10}{one['wall']:>9.1f}{one['tokens_per_s']:>10.1f}{one['t_generate']:>10.1f}{one['t_train']:>8.1f}"
            f"{one['t_sync']:>7.1f}{one['overlap']:>9.2f}"
        )
    lines.append(
        f"speed-up {result['speed_up']:.2f}x of a bound of {result['bound']:.2f}x: {result['share_of_bound']:.0%}"
    )
    return "\n".join(lines)
