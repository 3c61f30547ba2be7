"""Pictures of a run: the timeline of its last iterations, and its reward curve. matplotlib is imported on first use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pa_core.tracking.chrome import Window, lanes_of, title_of
from pa_core.tracking.timeline import SCORE, TRAIN, Span, iteration_times, merge, rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {
    "generate": "#4C8BD6",
    "load": "#17A398",
    "score": "#A78BCA",
    "wait": "#E8EAEE",
    "forward_backward": "#F2A03D",
    "step": "#D1495B",
    "publish": "#2E6F40",
    "checkpoint": "#8D6E63",
    "log": "#9AA5B1",
}
LABELS = {
    "generate": "generate",
    "load": "load version",
    "score": "score",
    "wait": "wait",
    "forward_backward": "forward + backward",
    "step": "optimizer step",
    "publish": "publish version",
    "checkpoint": "checkpoint",
    "log": "log",
}
INK, MUTED, RULE = "#1F2933", "#616E7C", "#CBD2D9"
MAX_SLOTS = 8


def timeline_picture(spans: Sequence[Span], iterations: Sequence[Window], *, last: int = 3, title: str = "") -> Figure:
    """Lanes of replicas, rewards and trainer over the last few iterations.

    A replica's lane has a row per group it works on at once. Dashed lines are iteration borders; ``→ v3`` marks the
    moment a version is published or loaded.

    Args:
        spans: at least those of the shown iterations.
        iterations: ``(iteration, start, end)`` in seconds since the epoch, in order.
        last: how many of them to show.
        title: put before what the picture says by itself.

    Raises:
        ValueError: without iterations.
    """
    from matplotlib.figure import Figure

    shown = list(iterations)[-last:]
    if not shown:
        raise ValueError("timeline_picture: no iteration to show")
    visible = visible_spans(spans, shown)
    figure = Figure(figsize=(14, timeline_height(visible)), dpi=130, facecolor="white", layout="constrained")
    heading = draw_timeline(figure.add_subplot(), visible, shown, title=title)
    figure.suptitle(heading, x=0.012, ha="left", fontsize=12.5, color=INK, fontweight="bold")
    draw_legend(figure, {span.name for span in visible})
    return figure


def visible_spans(spans: Sequence[Span], shown: Sequence[Window]) -> list[Span]:
    """The spans that touch the shown iterations."""
    begin, end = shown[0][1], shown[-1][2]
    return [span for span in spans if span.end > begin and span.start < end]


def timeline_height(visible: Sequence[Span]) -> float:
    """Inches that the lanes of these spans take, with heading and legend."""
    return 2.1 + 0.85 * max(2, len(lanes_of(visible)))


def draw_timeline(
    axes: Axes, visible: Sequence[Span], shown: Sequence[Window], *, seconds: float | None = None, title: str = ""
) -> str:
    """Draw the shown iterations from 0 to ``seconds`` (default: their length); returns the heading."""
    begin, end = shown[0][1], shown[-1][2]
    lanes = lanes_of(visible)
    for place, lane in enumerate(lanes):
        _draw_lane(axes, [span for span in visible if span.lane == lane], lane, place, begin, end)
    _draw_borders(axes, shown, begin)
    _style(axes, lanes, seconds or end - begin)
    return " · ".join(part for part in (title, _headline(visible, shown, lanes)) if part)


def _headline(spans: Sequence[Span], shown: Sequence[Window], lanes: Sequence[str]) -> str:
    """Mean overlap and idle shares of what is shown."""
    replicas = [lane for lane in lanes if lane not in (TRAIN, SCORE)]
    which = f"iterations {shown[0][0]} to {shown[-1][0]}" if len(shown) > 1 else f"iteration {shown[0][0]}"
    if not replicas:
        return which
    times = iteration_times(spans, shown[0][1], shown[-1][2], replicas)
    return (
        f"{which}: overlap {times.overlap:.0%}, replicas idle {times.generate.idle / times.wall:.0%}, "
        f"trainer idle {times.train.idle / times.wall:.0%}"
    )


def _draw_lane(axes: Axes, spans: Sequence[Span], lane: str, place: int, begin: float, end: float) -> None:
    """One lane of height 0.8: a row per slot; what has no slots of its own spans the lane's height."""
    axes.broken_barh([(0, end - begin)], (place - 0.4, 0.8), facecolors="#F7F8FA", zorder=0)
    stacked = [span for span in spans if span.name in ("generate", "score")]
    slots = rows(stacked)
    if len(slots) > MAX_SLOTS:
        slots = [
            [Span("score" if lane == SCORE else "generate", lane, start, stop, -1) for start, stop in merged]
            for merged in [merge((span.start, span.end) for span in stacked)]
        ]
    height = 0.8 / max(1, len(slots))
    for number, slot in enumerate(slots):
        _bars(axes, slot, place - 0.4 + number * height, height, begin, end)
    for name in ("wait", "log", "checkpoint", "load", "forward_backward", "publish", "step"):
        _bars(axes, [span for span in spans if span.name == name], place - 0.4, 0.8, begin, end)
    for span in spans:
        if span.name in ("load", "publish") and begin <= span.end <= end:
            _version_mark(axes, span, place, span.end - begin)


def _bars(axes: Axes, spans: Sequence[Span], bottom: float, height: float, begin: float, end: float) -> None:
    """Bars of one row, clipped to the window, each with a white edge so that neighbours stay apart."""
    for span in spans:
        left, right = max(span.start, begin) - begin, min(span.end, end) - begin
        waiting = span.name == "wait"
        axes.broken_barh(
            [(left, right - left)],
            (bottom, height),
            facecolors=COLOURS[span.name],
            edgecolors="#C3CAD3" if waiting else "white",
            linewidth=0 if waiting else 0.5,
            hatch="////" if waiting else None,
            zorder=1 if waiting else 2,
        )


def _version_mark(axes: Axes, span: Span, place: int, at: float) -> None:
    """``v3`` where a version becomes available: for a load its iteration, for a publication the attribute."""
    version = span.attrs.get("version", span.iteration + (1 if span.name == "publish" else 0))
    before = span.name == "publish"
    axes.annotate(
        f"→ v{version}",
        (at, place - 0.4),
        xytext=(-2 if before else 2, 2),
        textcoords="offset points",
        ha="right" if before else "left",
        va="bottom",
        fontsize=8,
        color=COLOURS[span.name],
        fontweight="bold",
        annotation_clip=False,
        zorder=5,
    )


def _draw_borders(axes: Axes, shown: Sequence[Window], begin: float) -> None:
    """Dashed borders, and above each iteration its number, the policy version it uses, and its length."""
    for number, start, stop in shown:
        axes.axvline(start - begin, color=INK, linewidth=0.9, linestyle=(0, (4, 3)), zorder=4)
        axes.annotate(
            f"iteration {number}  (policy v{number}, {stop - start:.1f} s)",
            ((start + stop) / 2 - begin, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(0, 5),
            textcoords="offset points",
            ha="center",
            va="bottom",
            fontsize=9.5,
            color=INK,
        )
    axes.axvline(shown[-1][2] - begin, color=INK, linewidth=0.9, linestyle=(0, (4, 3)), zorder=4)


def _style(axes: Axes, lanes: Sequence[str], width: float) -> None:
    axes.set_xlim(0, width)
    axes.set_ylim(len(lanes) - 0.5, -0.72)
    axes.set_yticks(range(len(lanes)), [title_of(lane) for lane in lanes], fontsize=10, color=INK)
    axes.set_xlabel("seconds", fontsize=9.5, color=MUTED, loc="right")
    axes.tick_params(axis="both", length=0, colors=MUTED, labelsize=9)
    axes.tick_params(axis="y", labelcolor=INK, labelsize=10)
    axes.grid(axis="x", color=RULE, linewidth=0.6, zorder=0)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)


def draw_legend(figure: Figure, names: set[str]) -> None:
    """What the colours of the named spans mean, below the figure."""
    from matplotlib.patches import Patch

    handles = [
        Patch(
            facecolor=COLOURS[name],
            label=LABELS[name],
            hatch="////" if name == "wait" else None,
            edgecolor="#C3CAD3" if name == "wait" else "white",
        )
        for name in COLOURS
        if name in names
    ]
    figure.legend(
        handles=handles,
        loc="outside lower left",
        ncols=len(handles),
        frameon=False,
        fontsize=9,
        handlelength=1.3,
        columnspacing=1.6,
        labelcolor=INK,
    )


def reward_curve(
    rewards: Sequence[tuple[int, float]],
    accuracy: Sequence[tuple[int, float]] = (),
    *,
    metric: str = "",
    title: str = "",
) -> Figure:
    """Mean reward per iteration with its moving average, and held-out accuracy where it was measured.

    Args:
        rewards: ``(policy version that sampled, mean reward)``.
        accuracy: ``(policy version, held-out accuracy)``.
        metric: name of the accuracy's metric, for the legend.
        title: heading.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(9, 4.6), dpi=130, facecolor="white", layout="constrained")
    axes = figure.add_subplot()
    if rewards:
        steps, values = zip(*rewards, strict=True)
        axes.plot(steps, values, color="#9DC1EC", linewidth=1, marker="o", markersize=3, label="reward, each iteration")
        axes.plot(steps, _moving_average(values), color="#1F5FAF", linewidth=2.2, label="reward, moving average")
    if accuracy:
        steps, values = zip(*accuracy, strict=True)
        label = f"held-out accuracy ({metric})" if metric else "held-out accuracy"
        # Two points make no curve: a line between them would claim a straight rise.
        line = ":" if len(accuracy) > 2 else "none"
        axes.plot(steps, values, color=COLOURS["step"], linestyle=line, marker="D", markersize=8, label=label)
        for step, value in accuracy:
            axes.annotate(
                f"{value:.2f}", (step, value), xytext=(0, 9), textcoords="offset points", ha="center",
                color=COLOURS["step"], fontsize=10, fontweight="bold",
            )  # fmt: skip
    axes.set_xlabel("policy version", color=MUTED)
    axes.margins(x=0.04, y=0.14)
    axes.grid(axis="y", color=RULE, linewidth=0.6)
    axes.tick_params(length=0, colors=MUTED)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(RULE)
    if rewards or accuracy:
        axes.legend(frameon=False, labelcolor=INK, loc="best", fontsize=9.5)
    if title:
        figure.suptitle(title, x=0.012, ha="left", fontsize=12.5, color=INK, fontweight="bold")
    return figure


def _moving_average(values: Sequence[float], window: int = 5) -> list[float]:
    """Mean of each value with up to ``window - 1`` before it."""
    return [
        sum(values[max(0, place - window + 1) : place + 1]) / min(window, place + 1) for place in range(len(values))
    ]
