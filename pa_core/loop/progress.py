"""What a run is doing right now: one small state, drawn as a bar here and read from the store elsewhere."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass, field
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from pa_core.store.objects import ObjectStore

PROGRESS_KEY = "progress.json"


@dataclass
class ProgressState:
    """A snapshot of a run.

    Attributes:
        phase: starting, training, evaluating, finishing, done, stopped or failed.
        detail: more about the phase, for people.
        iteration: iterations finished; ``iterations`` is the target.
        groups_consumed: groups of the current iteration that the trainer has consumed, of ``groups``.
        groups_replaced: groups of it that were uninformative (dynamic sampling).
        groups_in_flight: groups on replicas or being scored.
        reward: mean reward of the last finished iteration.
        accuracy: held-out accuracy when it was last measured.
        eta_s: seconds to go, from the mean duration of the finished iterations.
        mlflow_run_id: the tracking run, once it exists.
    """

    phase: str = "starting"
    detail: str = ""
    iteration: int = 0
    iterations: int = 0
    groups_consumed: int = 0
    groups: int = 0
    groups_replaced: int = 0
    groups_in_flight: int = 0
    reward: float | None = None
    accuracy: float | None = None
    eta_s: float | None = None
    mlflow_run_id: str | None = None
    updated_at: float = field(default_factory=time.time)

    @property
    def fraction(self) -> float:
        """Share of the run that is done, 0 to 1, with the current iteration's groups counted."""
        if not self.iterations:
            return 0.0
        within = self.groups_consumed / self.groups if self.groups else 0.0
        return min(1.0, (self.iteration + min(within, 1.0)) / self.iterations)

    @property
    def eta(self) -> str:
        """Time to go as minutes and seconds; ``?`` before the first iteration."""
        if self.eta_s is None:
            return "?"
        minutes, seconds = divmod(round(self.eta_s), 60)
        return f"{minutes}:{seconds:02d}"

    def line(self) -> str:
        """One line for people."""
        parts = [f"{self.phase} {self.detail}".strip(), f"iteration {self.iteration}/{self.iterations}"]
        if self.reward is not None:
            parts.append(f"reward {self.reward:.3f}")
        if self.accuracy is not None:
            parts.append(f"held-out {self.accuracy:.3f}")
        replaced = f", {self.groups_replaced} uninformative" if self.groups_replaced else ""
        parts.append(f"groups {self.groups_consumed}/{self.groups}{replaced}, {self.groups_in_flight} in flight")
        parts.append(f"ETA {self.eta}")
        return " · ".join(parts)


def read_progress(store: ObjectStore) -> ProgressState | None:
    """The latest snapshot of the run in ``store``, or None before the first."""
    if not store.exists(PROGRESS_KEY):
        return None
    return ProgressState(**json.loads(store.read(PROGRESS_KEY)))


def write_progress(store: ObjectStore, state: ProgressState) -> None:
    """Replace the snapshot; it is advisory and not needed for correctness."""
    state.updated_at = time.time()
    store.publish(PROGRESS_KEY, json.dumps(asdict(state)).encode(), exclusive=False, durable=False)


class ProgressBar:
    """A bar on stderr with iteration, reward, groups in flight and ETA; silent when stderr is no terminal."""

    def __init__(self, enabled: bool | None = None) -> None:
        console = Console(stderr=True)
        self._progress = Progress(
            SpinnerColumn(),
            BarColumn(bar_width=24),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            console=console,
            disable=not (sys.stderr.isatty() if enabled is None else enabled),
        )
        self._task = self._progress.add_task("starting", total=1.0)

    def __enter__(self) -> ProgressBar:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def update(self, state: ProgressState) -> None:
        """Draw ``state``."""
        self._progress.update(self._task, completed=state.fraction, description=state.line())
