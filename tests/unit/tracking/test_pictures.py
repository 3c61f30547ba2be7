"""Chrome traces and pictures."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from itertools import pairwise

import pytest

from pa_core.tracking.chrome import chrome_trace
from pa_core.tracking.picture import reward_curve, timeline_picture
from pa_core.tracking.timeline import Span, Timeline

WINDOWS = [(0, 100.0, 110.0), (1, 110.0, 118.0)]


@pytest.fixture
def timeline() -> Timeline:
    timeline = Timeline()
    for number, start, end in WINDOWS:
        for replica in ("r0", "r1"):
            timeline.add("load", replica, start, start + 1, number)
            timeline.add("generate", replica, start + 1, start + 4, number, group="a")
            timeline.add("generate", replica, start + 2, start + 5, number, group="b")
        timeline.add("score", "score", start + 4, start + 4.1, number)
        timeline.add("wait", "train", start, start + 4, number)
        timeline.add("forward_backward", "train", start + 4, end - 2, number)
        timeline.add("step", "train", end - 2, end - 1, number)
        timeline.add("publish", "train", end - 1, end, number, version=number + 1)
    return timeline


def test_the_chrome_trace_holds_every_span_in_microseconds_and_names_its_tracks(timeline: Timeline) -> None:
    trace = json.loads(json.dumps(chrome_trace(timeline.spans(), WINDOWS)))

    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(slices) == len(timeline.spans()) + len(WINDOWS)
    step = next(event for event in slices if event["name"] == "step")
    assert (step["ts"], step["dur"], step["args"]["iteration"]) == (8e6, 1e6, 0)
    names = {event["pid"]: event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    assert list(names.values()) == ["iterations", "replica r0", "replica r1", "rewards", "trainer"]
    assert names[step["pid"]] == "trainer"


def test_slices_of_one_track_never_overlap(timeline: Timeline) -> None:
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in chrome_trace(timeline.spans(), WINDOWS)["traceEvents"]:
        if event["ph"] == "X":
            tracks.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))

    for slices in tracks.values():
        assert all(left[1] <= right[0] for left, right in pairwise(sorted(slices)))


def test_the_picture_names_lanes_iterations_versions_and_every_kind_of_span(timeline: Timeline) -> None:
    figure = timeline_picture(timeline.spans(), WINDOWS, title="demo")

    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["replica r0", "replica r1", "rewards", "trainer"]
    texts = [text.get_text() for text in axes.texts]
    assert [text for text in texts if text.startswith("iteration")] == [
        "iteration 0  (policy v0, 10.0 s)",
        "iteration 1  (policy v1, 8.0 s)",
    ]
    assert {"→ v0", "→ v1", "→ v2"} <= set(texts)
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == [
        "generate", "load version", "score", "wait", "forward + backward", "optimizer step", "publish version",
    ]  # fmt: skip
    file = io.BytesIO()
    figure.savefig(file, format="png")
    assert file.getvalue().startswith(b"\x89PNG")


def test_only_the_last_iterations_are_shown(timeline: Timeline) -> None:
    figure = timeline_picture(timeline.spans(), WINDOWS, last=1)

    assert figure.axes[0].get_xlim() == (0, 8)
    with pytest.raises(ValueError, match="no iteration"):
        timeline_picture(timeline.spans(), [])


def test_a_replica_with_very_many_concurrent_groups_stays_readable() -> None:
    many = [Span("generate", "r0", 0, 1 + number / 100, 0) for number in range(64)]

    figure = timeline_picture(many, [(0, 0.0, 2.0)])
    assert len(figure.axes[0].collections) < 10


def test_the_reward_curve_shows_reward_and_accuracy() -> None:
    figure = reward_curve([(0, 0.1), (1, 0.3), (2, 0.5)], [(0, 0.2), (3, 0.6)], metric="exact")

    lines = {line.get_label(): list(line.get_ydata()) for line in figure.axes[0].lines}
    assert lines["reward, each iteration"] == [0.1, 0.3, 0.5]
    assert lines["reward, moving average"] == pytest.approx([0.1, 0.2, 0.3])
    assert lines["held-out accuracy (exact)"] == [0.2, 0.6]
    reward_curve([]).savefig(io.BytesIO(), format="png")


def test_importing_the_tracking_modules_loads_neither_mlflow_nor_matplotlib() -> None:
    code = (
        "import sys\n"
        "from pa_core.tracking import chrome, description, metrics, mlflow_run, outbox, picture, summary, timeline\n"
        "print([name for name in ('mlflow', 'matplotlib', 'torch', 'prefect') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
