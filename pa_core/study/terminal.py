"""Comparisons and sweeps on the command line: how runs are typed, and bars of those in training."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import yaml
from pydantic import ValidationError
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from pa_core.errors import ConfigError
from pa_core.loop.progress import ProgressState
from pa_core.loop.run import Run
from pa_core.rollout.process import ChildProcess
from pa_core.study.children import Observer, Outcome
from pa_core.study.config import CompareConfig, Parameter, SweepConfig, Variant
from pa_core.study.plan import Child


def read_variant(text: str) -> Variant:
    """``[NAME:] KEY=VALUE KEY=VALUE …``. Raises :class:`ConfigError`."""
    name, separator, rest = text.partition(":")
    if not separator or "=" in name:
        name, rest = "", text
    try:
        overrides = shlex.split(rest)
    except ValueError as error:
        raise ConfigError(f"--run {text!r}: {error}") from None
    return Variant(name=name.strip() or None, overrides=overrides)


def read_parameter(text: str) -> Parameter:
    """``KEY=V1,V2,…`` or ``KEY=[V1, V2, …]``. Raises :class:`ConfigError`."""
    key, separator, values = text.partition("=")
    if not separator or not key or not values:
        raise ConfigError(f"--grid {text!r}: expected KEY=V1,V2, for example optimizer.learning_rate=1e-6,2e-6")
    try:
        listed = yaml.safe_load(values) if values.startswith("[") else values.split(",")
        return Parameter(key=key, values=listed)
    except (yaml.YAMLError, ValidationError) as error:
        raise ConfigError(f"--grid {text!r}: not a list of values: {error}") from None


def comparison(name: str | None, runs: Sequence[str]) -> CompareConfig:
    """What the options of ``pa compare`` ask for. Raises :class:`ConfigError`."""
    if len(runs) == 1:
        raise ConfigError("--run: a comparison needs two runs; without any it compares sync and periodic")
    return CompareConfig(name=name, **({"variants": [read_variant(text) for text in runs]} if runs else {}))


def grid(grid: Sequence[str], runs: Sequence[str], **options: Any) -> SweepConfig:
    """What the options of ``pa sweep`` ask for. Raises :class:`ConfigError`."""
    parameters, listed = [read_parameter(text) for text in grid], [read_variant(text) for text in runs]
    try:
        return SweepConfig(parameters=parameters, runs=listed, **options)
    except ValidationError as error:
        raise ConfigError("; ".join(map(_problem, error.errors()))) from None


def _problem(problem: Any) -> str:
    """What pydantic found, with the key and the value where they are not in its message."""
    message = problem["msg"].removeprefix("Value error, ")
    key = ".".join(str(part) for part in problem["loc"])
    return f"{key}={problem['input']}: {message}" if key else message


class Bars(Observer):
    """A bar on stderr per run in training; silent when stderr is no terminal."""

    def __init__(self) -> None:
        self._progress = Progress(
            TextColumn("{task.fields[run]}"),
            BarColumn(bar_width=24),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            disable=not sys.stderr.isatty(),
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Bars:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def started(self, child: Child, run: Run, process: ChildProcess) -> None:
        """See :class:`Observer`."""
        self._tasks[child.name] = self._progress.add_task("starting", total=1.0, run=child.name)

    def progress(self, states: Mapping[str, ProgressState]) -> None:
        """See :class:`Observer`."""
        for name, state in states.items():
            self._progress.update(self._tasks[name], completed=state.fraction, description=state.line())

    def ended(self, outcome: Outcome) -> None:
        """See :class:`Observer`."""
        if outcome.name in self._tasks:
            self._progress.update(self._tasks[outcome.name], description=outcome.state)
            self._progress.stop_task(self._tasks[outcome.name])
