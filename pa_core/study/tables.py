"""The table of a study's runs, as rows for MLflow and Prefect, and as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pa_core.study.children import Outcome

Row = dict[str, Any]


def comparison_rows(outcomes: Sequence[Outcome], speed_ups: Mapping[str, float | None]) -> list[Row]:
    """One row per run: times, speed-up, bound, idle shares, rewards, accuracy, digest.

    Args:
        speed_ups: over the baseline, by run; the baseline's own is 1.
    """
    return [_comparison_row(outcome, speed_ups.get(outcome.name)) for outcome in outcomes]


def _comparison_row(outcome: Outcome, speed_up: float | None) -> Row:
    summary = outcome.summary
    wall = summary.get("wall") or None
    return {
        "run": outcome.name,
        "state": outcome.state,
        "schedule": outcome.child.config.schedule.name,
        "iterations": summary.get("iterations"),
        "wall, s": _rounded(wall, 2),
        "tokens/s": _rounded(summary.get("tokens_per_s"), 1),
        "speed-up": _rounded(speed_up, 2),
        "bound": _rounded(summary.get("bound"), 2),
        "replicas idle": _share(summary.get("idle_generate"), wall),
        "trainer idle": _share(summary.get("idle_train"), wall),
        "overlap": _share(summary.get("overlap"), 1.0),
        "reward, first": _rounded(summary.get("reward_first"), 4),
        "reward, last": _rounded(summary.get("reward_last"), 4),
        "held-out before": _rounded(summary.get("eval_before"), 4),
        "held-out after": _rounded(summary.get("eval_after"), 4),
        "weights": (summary.get("weights_sha256") or "")[:12] or None,
        "error": _first_line(outcome.error),
    }


def sweep_rows(outcomes: Sequence[Outcome], metric: str, values: Mapping[str, float], best: str | None) -> list[Row]:
    """One row per run: what it changed, its metric, and how it went."""
    return [
        {
            "run": outcome.name,
            "best": "best" if outcome.name == best else "",
            "state": outcome.state,
            metric: _rounded(values.get(outcome.name), 4),
            **swept(outcome),
            "reward, last": _rounded(outcome.summary.get("reward_last"), 4),
            "held-out after": _rounded(outcome.summary.get("eval_after"), 4),
            "wall, s": _rounded(outcome.summary.get("wall"), 1),
            "error": _first_line(outcome.error),
        }
        for outcome in outcomes
    ]


def swept(outcome: Outcome) -> dict[str, str]:
    """What a run changed, by key."""
    pairs = (override.partition("=") for override in outcome.child.overrides)
    return {key: value.strip() for key, _, value in pairs}


def markdown(rows: Sequence[Row]) -> str:
    """Rows as a Markdown table; columns that are empty everywhere are left out."""
    columns = [
        name
        for name in dict.fromkeys(name for row in rows for name in row)
        if any(row.get(name) not in (None, "") for row in rows)
    ]
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    lines += [f"| {' | '.join(_cell(row.get(name)) for name in columns)} |" for row in rows]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    return "" if value is None else str(value).replace("|", "\\|").replace("\n", " ")


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(float(value), digits)


def _share(part: float | None, whole: float | None) -> str | None:
    return None if part is None or not whole else f"{part / whole:.0%}"


def _first_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[0][:300] if lines else ""
