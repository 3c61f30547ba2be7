"""What a finished run leaves on its Prefect page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

BLOCKS = " ▁▂▃▄▅▆▇█"


def _number(value: Any, digits: int = 3) -> str:
    return "not measured" if value is None else f"{value:.{digits}f}"


def headline(summary: Mapping[str, Any]) -> str:
    """The outcome in one line."""
    parts = [f"reward {_number(summary.get('reward_first'))} → {_number(summary.get('reward_last'))}"]
    if summary.get("eval_after") is not None:
        parts.append(f"held-out accuracy {_number(summary.get('eval_before'))} → {_number(summary['eval_after'])}")
    return ", ".join(parts)


def summary_table(summary: Mapping[str, Any], mlflow_page: str | None) -> str:
    """The summary as a Markdown table."""
    wall = summary["wall"] or 1.0
    reward = f"{_number(summary['reward_first'])} → {_number(summary['reward_last'])}"
    accuracy = f"{_number(summary['eval_before'])} → {_number(summary['eval_after'])}"
    groups = f"{summary['groups']}, {summary['groups_duplicated']}, {summary['groups_lost']}"
    rows = [
        ("Mean reward, first → last iteration", reward),
        ("Held-out accuracy, before → after", accuracy),
        ("Iterations", str(summary["iterations"])),
        ("Schedule, engine", f"{summary['schedule']}, {summary['engine']}"),
        ("Tokens per second", _number(summary["tokens_per_s"], 1)),
        ("Wall time of the iterations", f"{summary['wall']:.1f} s"),
        (
            "Generate, train, sync",
            f"{summary['t_generate']:.1f} s, {summary['t_train']:.1f} s, {summary['t_sync']:.1f} s",
        ),
        (
            "Idle share of replicas, of trainer",
            f"{summary['idle_generate'] / wall:.0%}, {summary['idle_train'] / wall:.0%}",
        ),
        ("Overlap of the shorter side", f"{summary['overlap']:.0%}"),
        ("Largest speed-up over sync that these times allow", f"{summary['bound']:.2f}"),
        ("Groups trained, duplicated, lost", groups),
        ("Largest staleness trained", f"{summary['max_staleness_seen']} versions"),
        ("Run folder", f"`{summary['run_url']}`"),
        ("Digest of the final weights", f"`{summary['weights_sha256']}`"),
    ]
    lines = [f"# {summary['run_id']}", "", "| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]
    if mlflow_page:
        lines += ["", f"[Open the run in MLflow]({mlflow_page})"]
    return "\n".join(lines)


def reward_curve(history: Sequence[tuple[int, float]], mlflow_page: str | None) -> str:
    """The mean reward per iteration as a Markdown page with a drawing in text, which every Prefect page can show."""
    values = [value for _, value in history]
    lines = ["# Mean reward per iteration", "", "```text", chart(values), "```"]
    if mlflow_page:
        lines += ["", f"[The same curve in MLflow, beside all others]({mlflow_page}/model-metrics)"]
    return "\n".join(lines)


def chart(values: Sequence[float], height: int = 10, width: int = 72) -> str:
    """A column per value, or per equal stretch of values when there are more than ``width``."""
    if not values:
        return "(no iteration finished)"
    count = min(len(values), width)
    edges = [round(index * len(values) / count) for index in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    wide = max(1, min(3, width // count))
    low, high = min(0.0, *means), max(means)
    scale = height * 8 / ((high - low) or 1.0)
    levels = [round((mean - low) * scale) for mean in means]
    rows = []
    for row in reversed(range(height)):
        label = low + (row + 1) / height * (high - low)
        cells = "".join(BLOCKS[max(0, min(8, level - 8 * row))] * wide for level in levels)
        rows.append(f"{label:7.3f} ┤{cells}")
    rows.append(f"{low:7.3f} └" + "─" * (count * wide))
    rows.append(" " * 9 + f"iterations 0 to {len(values) - 1}")
    return "\n".join(rows)


def figures(title: str, numbers: Mapping[str, float]) -> str:
    """Named figures as a Markdown table."""
    rows = [f"| {name} | {value:.6g} |" for name, value in numbers.items()]
    return "\n".join([f"# {title}", "", "| | |", "|---|---:|", *rows])


def evaluation_headline(found: Mapping[str, Any]) -> str:
    """An evaluation in one line."""
    return (
        f"{found['metric']} {found['accuracy']:.3f} ± {found['ci95']:.3f} on {found['problems']} problems of "
        f"{found['name']}, version {found['version']}"
    )


def evaluation_page(found: Mapping[str, Any], mlflow_page: str | None) -> str:
    """An evaluation as Markdown: scores with their intervals, and what they were measured on."""
    scores = [
        f"| `{name}` | {score['value']:.3f} | {score['low']:.3f} to {score['high']:.3f} |"
        for name, score in found["scores"].items()
    ]
    causes = ", ".join(f"{count} x {cause}" for cause, count in found["unscored_by_cause"].items()) or "none"
    facts = [
        ("Policy", f"version {found['version']} of `{found['run_url']}` (`{found['model']}`)"),
        ("Problems", f"{found['problems']} of {found['name']} (`{found['data']}`)"),
        ("Samples per problem (k)", str(found["samples_per_problem"])),
        ("Temperature, longest response", f"{found['temperature']:g}, {found['max_tokens']} tokens"),
        ("Mean response, share cut off", f"{found['response_length']:.1f} tokens, {found['truncated_share']:.1%}"),
        ("Unscored samples, in no score", f"{found['unscored']} ({causes})"),
        ("Samples without a readable answer", str(found["unanswered"])),
        ("All samples", f"`{found['samples_url']}`"),
    ]
    lines = [f"# {evaluation_headline(found)}", "", "| score | value | 95 % interval |", "|---|---:|---:|", *scores]
    lines += ["", "| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in facts)]
    if mlflow_page:
        lines += ["", f"[Open the run in MLflow]({mlflow_page})"]
    return "\n".join(lines)
