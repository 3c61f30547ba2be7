"""What a run did iteration by iteration: figures from its MLflow run, spans from its store."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pa_core.store.objects import ObjectStore
from pa_core.store.versions import version_name
from pa_core.tracking.chrome import Window
from pa_core.tracking.timeline import Span

if TYPE_CHECKING:
    from mlflow import MlflowClient

Series = dict[int, float]
"""Values by iteration (policy version)."""

KEYS = {
    "reward": "reward/mean",
    "wall": "perf/wall",
    "tokens": "perf/tokens",
    "gradient": "train/grad_norm",
    "accuracy": "eval/accuracy",
    "accuracy_ci95": "eval/ci95",
}


@dataclass(frozen=True)
class History:
    """Figures by iteration.

    Attributes:
        reward: mean reward. wall: seconds. tokens: trained on. gradient: its norm.
        accuracy: of held-out problems, by policy version; ``accuracy_ci95``: half its 95 % interval.
    """

    reward: Series = field(default_factory=dict)
    wall: Series = field(default_factory=dict)
    tokens: Series = field(default_factory=dict)
    gradient: Series = field(default_factory=dict)
    accuracy: Series = field(default_factory=dict)
    accuracy_ci95: Series = field(default_factory=dict)

    def elapsed(self) -> Series:
        """Seconds of iterations until each one's end; start-up, evaluation and pauses between starts are left out."""
        total, found = 0.0, {}
        for iteration, seconds in sorted(self.wall.items()):
            total += seconds
            found[iteration] = total
        return found


def read_history(client: MlflowClient, run_id: str) -> History:
    """The run's figures; of an iteration that was trained again after a resume, the later ones."""

    def series(key: str) -> Series:
        points = sorted(client.get_metric_history(run_id, key), key=lambda point: point.timestamp)
        return {step: value for step, value in sorted({point.step: point.value for point in points}.items())}

    return History(**{name: series(key) for name, key in KEYS.items()})


def read_timeline(store: ObjectStore, history: History, last: int) -> tuple[list[Span], list[Window]]:
    """Spans and windows of the last iterations of which both are known.

    An iteration's window ends when its version is published and is as long as its recorded wall time.
    """
    spans: list[Span] = []
    windows: list[Window] = []
    for iteration in sorted(history.wall)[-last:]:
        found = store.find(f"timeline/{version_name(iteration)}.json")
        own = [] if found is None else [Span(**one) for one in json.loads(found)]
        ends = [span.end for span in own if span.name == "publish" and span.attrs.get("version") == iteration + 1]
        if ends:
            spans += [span for span in own if span not in spans]
            windows.append((iteration, ends[-1] - history.wall[iteration], ends[-1]))
    return spans, windows
