"""Trains the runs of a study, each by a ``pa train`` process of its own, so many at a time.

A run that fails, whatever it does to its process, is an outcome like any other: the rest goes on. Runs that an earlier
start finished are not trained again; stopped ones are resumed from their checkpoint.
"""

from __future__ import annotations

import json
import logging
import signal
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from pa_core.errors import StoreError, UserError
from pa_core.loop.progress import ProgressState, read_progress
from pa_core.loop.run import SUMMARY_KEY, Run, open_run, prepare_run
from pa_core.rollout.process import ChildProcess, spawn
from pa_core.study.plan import Child, Study

log = logging.getLogger(__name__)

State = Literal["finished", "failed", "stopped"]
POLL_S = 0.3
PROGRESS_EVERY_S = 2.0
GRACE_S = 18.0
"""Seconds that stopped runs have for their checkpoints: less than the grace of a cancelled flow."""
DEVICE_VARIABLES = ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")
STOPPED = 3
_QUIET = {"PYTHONUNBUFFERED": "1", "COLUMNS": "200", "TQDM_DISABLE": "1"}


@dataclass(frozen=True)
class Outcome:
    """How a run of a study ended.

    Attributes:
        state: finished; failed; or stopped, and resumable.
        error: why it is not finished; empty when it is.
        summary: its ``summary.json``; empty unless finished.
        facts: its ``run.json``; empty when it never began.
        before: it was finished by an earlier start of the study.
    """

    child: Child
    state: State
    error: str = ""
    summary: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    before: bool = False

    @property
    def name(self) -> str:
        """The child's name."""
        return self.child.name

    @property
    def mlflow_run_id(self) -> str | None:
        """Its MLflow run, if it came to one."""
        found = self.facts.get("mlflow_run_id")
        return None if found is None else str(found)


class Observer:
    """Told what becomes of the runs, in the thread that trains them. This one is silent."""

    def started(self, child: Child, run: Run, process: ChildProcess) -> None:
        """A run's process was started."""

    def tracked(self, child: Child, mlflow_run_id: str) -> None:
        """A run has its MLflow run; told once per start, also of runs that were finished before."""

    def progress(self, states: Mapping[str, ProgressState]) -> None:
        """The latest snapshots of the runs in training, by name; told every few seconds."""

    def ended(self, outcome: Outcome) -> None:
        """A run ended, or was finished before."""


@dataclass
class _Training:
    """A run whose process is alive."""

    child: Child
    run: Run
    process: ChildProcess
    slot: int
    tracked: bool = False


class Crew:
    """The processes of a study; leaving the block ends those that are left, which keep a checkpoint.

    Args:
        study: the runs.
        observers: told of everything.
        concurrency: runs at a time.
        devices: what each run at a time may see; empty: everything.
    """

    def __init__(
        self, study: Study, observers: Sequence[Observer], concurrency: int = 1, devices: Sequence[str] = ()
    ) -> None:
        self._study = study
        self._observers = observers
        self._devices = devices
        self._slots = deque(range(concurrency))
        self._waiting = deque(study.children)
        self._training: list[_Training] = []
        self._outcomes: dict[str, Outcome] = {}
        self._due = 0.0

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Signalled once: a run takes a second signal for impatience, and leaves its checkpoint unwritten.
        for one in self._training:
            one.process.signal(signal.SIGTERM)
        deadline = time.monotonic() + GRACE_S
        while time.monotonic() < deadline and any(one.process.poll() is None for one in self._training):
            time.sleep(POLL_S)
        for one in list(self._training):
            self._end(one)

    @property
    def outcomes(self) -> list[Outcome]:
        """Of the runs that ended, in the study's order."""
        return [self._outcomes[child.name] for child in self._study.children if child.name in self._outcomes]

    def train(self) -> list[Outcome]:
        """Train what is missing, to the end of the last run."""
        while self._waiting or self._training:
            while self._waiting and self._slots:
                self._begin(self._waiting.popleft())
            for one in list(self._training):
                if one.process.poll() is not None:
                    self._end(one)
            self._look()
            if self._training:
                time.sleep(POLL_S)
        return self.outcomes

    def _begin(self, child: Child) -> None:
        if child.finished:
            run = open_run(child.url)
            self._tell(Outcome(child, "finished", "", _summary(run), run.facts(), before=True))
            return
        slot = self._slots[0]
        try:
            run = prepare_run(child.config) if child.going_on is None else open_run(child.url)
            process = spawn(_command(run, child), _log_path(run), {**_QUIET, **self._visible(slot)})
        except UserError as error:
            self._tell(Outcome(child, "failed", str(error)))
            return
        self._slots.popleft()
        self._training.append(_Training(child, run, process, slot))
        log.info("%s: %s in %s", child.name, "begun" if child.going_on is None else "resumed", run.url)
        for observer in self._observers:
            observer.started(child, run, process)

    def _visible(self, slot: int) -> dict[str, str]:
        return dict.fromkeys(DEVICE_VARIABLES, self._devices[slot]) if self._devices else {}

    def _end(self, one: _Training) -> None:
        self._training.remove(one)
        self._slots.append(one.slot)
        self._tell(_outcome(one), known=one.tracked)

    def _tell(self, outcome: Outcome, known: bool = False) -> None:
        self._outcomes[outcome.name] = outcome
        level = logging.INFO if outcome.state == "finished" else logging.WARNING
        how = "finished before" if outcome.before else outcome.state
        log.log(level, "%s: %s%s", outcome.name, how, f": {outcome.error}" if outcome.error else "")
        for observer in self._observers:
            if outcome.mlflow_run_id is not None and not known:
                observer.tracked(outcome.child, outcome.mlflow_run_id)
            observer.ended(outcome)

    def _look(self) -> None:
        """Pass the runs' progress on; one that cannot be read now is read the next time."""
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + PROGRESS_EVERY_S
        states = {}
        for one in self._training:
            try:
                state = read_progress(one.run.store)
            except (StoreError, ValueError):
                continue
            if state is None:
                continue
            states[one.child.name] = state
            if state.mlflow_run_id is not None and not one.tracked:
                one.tracked = True
                for observer in self._observers:
                    observer.tracked(one.child, state.mlflow_run_id)
        for observer in self._observers:
            observer.progress(states)


def _command(run: Run, child: Child) -> list[str]:
    """The program that trains a prepared run, or goes on with it."""
    return [sys.executable, "-m", "pa_core.cli", "train", "--resume", run.url, *(child.going_on or ()), "--json"]


def _log_path(run: Run) -> Path:
    """A log for this start of the run alone."""
    return run.log_folder / f"train-{datetime.now(UTC):%Y%m%d-%H%M%S-%f}.log"


def _summary(run: Run) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run.store.read(SUMMARY_KEY))
    return found


def _outcome(one: _Training) -> Outcome:
    """How the process ended. A run that was refused before it began leaves no folder behind."""
    code = one.process.stop(0.0)
    try:
        facts = one.run.facts()
        if code == 0:
            return Outcome(one.child, "finished", "", _summary(one.run), facts)
        closing = _closing(one.process)
        error = str(closing.get("error") or f"ended with {code}; its last lines:\n{one.process.tail()}")
        if code == 2 and "mlflow_run_id" not in facts and one.child.going_on is None:
            one.run.store.delete("")
            facts = {}
    except (StoreError, ValueError) as failure:
        return Outcome(one.child, "failed", f"ended with {code}, and its folder cannot be read: {failure}")
    stopped = STOPPED in (code, closing.get("exit_code"))
    return Outcome(one.child, "stopped" if stopped else "failed", error, {}, facts)


def _closing(process: ChildProcess) -> dict[str, Any]:
    """The JSON object that ``pa`` closes with; empty when it was killed before."""
    for line in reversed(process.tail(50).splitlines()):
        if line.startswith("{"):
            try:
                found: dict[str, Any] = json.loads(line)
            except ValueError:
                continue
            return found
    return {}
