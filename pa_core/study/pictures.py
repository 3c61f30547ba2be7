"""Pictures of a study: rewards of all runs, their timelines on one axis, a metric against a swept key."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pa_core.study.history import History
from pa_core.tracking.chrome import Window
from pa_core.tracking.picture import (
    INK,
    MUTED,
    RULE,
    draw_legend,
    draw_timeline,
    timeline_height,
    visible_spans,
)
from pa_core.tracking.timeline import Span

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PALETTE = ("#4C8BD6", "#F2A03D", "#2E6F40", "#D1495B", "#A78BCA", "#17A398", "#8D6E63", "#616E7C")
LINES = ("-", "--", "-.", ":")
"""Equal curves lie on each other: the one below shows through the gaps of the one above."""
FAINT = 0.35
WINDOW = 5
MOST_NAMED = 16
MOST_TICKS = 8
LOGARITHMIC_FROM = 20.0
"""Largest over smallest value of a key from which its axis is logarithmic."""


def reward_picture(histories: Mapping[str, History], title: str) -> Figure:
    """Mean reward of every run, against iterations on the left and against seconds of iterations on the right.

    Thin lines are the values, thick ones their average over up to five iterations.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.8), dpi=130, facecolor="white", layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for number, (name, history) in enumerate(histories.items()):
        colour = PALETTE[number % len(PALETTE)]
        elapsed = history.elapsed()
        steps = [step for step in sorted(history.reward) if step in elapsed]
        values = [history.reward[step] for step in steps]
        label = name if number < MOST_NAMED else None
        for axes, places in ((left, steps), (right, [elapsed[step] for step in steps])):
            axes.plot(places, values, color=colour, alpha=FAINT, linewidth=1, marker="o", markersize=2.5)
            line = LINES[number % len(LINES)]
            axes.plot(places, _average(values), color=colour, linewidth=2.2, linestyle=line, label=label)
    _plain(left, "iteration", "mean reward")
    _plain(right, "seconds of iterations", "")
    left.xaxis.get_major_locator().set_params(integer=True)
    if histories:
        left.legend(frameon=False, labelcolor=INK, loc="best", fontsize=9.5)
    figure.suptitle(title, x=0.012, ha="left", fontsize=12.5, color=INK, fontweight="bold")
    return figure


def timelines_picture(timelines: Mapping[str, tuple[Sequence[Span], Sequence[Window]]], title: str) -> Figure:
    """The timelines of several runs one above the other, all from 0 on one axis of seconds.

    Args:
        timelines: by run, spans and the iterations to show; the same iterations for each, or the lengths mean nothing.

    Raises:
        ValueError: without a timeline.
    """
    from matplotlib.figure import Figure

    if not timelines:
        raise ValueError("timelines_picture: no timeline to show")
    visible = {name: visible_spans(spans, shown) for name, (spans, shown) in timelines.items()}
    heights = [timeline_height(spans) - 1.0 for spans in visible.values()]
    seconds = max(shown[-1][2] - shown[0][1] for _, shown in timelines.values())
    figure = Figure(figsize=(14, sum(heights) + 1.2), dpi=130, facecolor="white", layout="constrained")
    rows = figure.subplots(len(timelines), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (name, (_, shown)) in zip(rows, timelines.items(), strict=True):
        length = shown[-1][2] - shown[0][1]
        heading = draw_timeline(axes, visible[name], shown, seconds=seconds, title=name)
        axes.set_title(f"{heading}; {length:.1f} s", loc="left", fontsize=11, color=INK, fontweight="bold", pad=22)
        if axes is not rows[-1]:
            axes.set_xlabel("")
    figure.suptitle(title, x=0.012, ha="left", fontsize=12.5, color=INK, fontweight="bold")
    draw_legend(figure, {span.name for spans in visible.values() for span in spans})
    return figure


def sweep_picture(
    points: Sequence[tuple[Mapping[str, str], float]], keys: Sequence[str], metric: str, best: int | None, title: str
) -> Figure:
    """The metric against each swept key, a panel per key; a point is a run, the filled one the best.

    Args:
        points: values of the keys, and the metric. best: index of the best point.
    """
    from matplotlib.figure import Figure

    columns = min(3, max(1, len(keys)))
    lines = math.ceil(max(1, len(keys)) / columns)
    figure = Figure(figsize=(4.6 * columns + 1, 4.2 * lines), dpi=130, facecolor="white", layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False, sharey=True).flatten()
    for panel, key in zip(panels, keys, strict=False):
        own = [(place, values[key], value) for place, (values, value) in enumerate(points) if key in values]
        _sweep_panel(panel, own, best)
        _plain(panel, key, metric if panel is panels[0] else "")
    if best is not None:
        panels[0].legend(frameon=False, labelcolor=INK, loc="best", fontsize=9.5)
    for panel in panels[len(keys) :]:
        panel.set_visible(False)
    figure.suptitle(title, x=0.012, ha="left", fontsize=12.5, color=INK, fontweight="bold")
    return figure


def _sweep_panel(axes: Axes, points: Sequence[tuple[int, str, float]], best: int | None) -> None:
    numbers = [_number(text) for _, text, _ in points]
    numeric = bool(numbers) and all(number is not None for number in numbers)
    names = list(dict.fromkeys(text for _, text, _ in points))
    places: list[float] = [number or 0.0 for number in numbers] if numeric else [names.index(t) for _, t, _ in points]
    for place, (index, _, value) in zip(places, points, strict=True):
        chosen = index == best
        axes.plot(
            [place], [value], marker="o", markersize=10 if chosen else 7, linestyle="none", zorder=3 + chosen,
            markerfacecolor=PALETTE[3] if chosen else "white", markeredgecolor=PALETTE[3] if chosen else PALETTE[0],
            markeredgewidth=1.8, label="best" if chosen else None,
        )  # fmt: skip
    if not numeric:
        axes.set_xticks(range(len(names)), names)
        axes.margins(x=0.15)
    elif min(places) > 0 and max(places) / min(places) >= LOGARITHMIC_FROM:
        axes.set_xscale("log")
    elif len(set(places)) <= MOST_TICKS:
        axes.set_xticks(sorted(set(places)))


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _average(values: Sequence[float]) -> list[float]:
    """Mean of each value with up to ``WINDOW - 1`` before it."""
    parts = [values[max(0, place - WINDOW + 1) : place + 1] for place in range(len(values))]
    return [sum(part) / len(part) for part in parts]


def _plain(axes: Axes, below: str, beside: str) -> None:
    axes.set_xlabel(below, color=MUTED)
    axes.set_ylabel(beside, color=MUTED)
    axes.grid(axis="y", color=RULE, linewidth=0.6)
    axes.tick_params(length=0, colors=MUTED)
    axes.margins(x=0.04, y=0.12)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(RULE)
