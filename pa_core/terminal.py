"""What the command lines of ``pa`` share: results for people or as one JSON line, and common arguments."""

from __future__ import annotations

import json
import logging
import sys
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

log = logging.getLogger(__name__)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line of stdout.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]…", help="Overrides with dots, e.g. optimizer.learning_rate=1e-5."),
]


def emit(result: dict[str, Any], as_json: bool, text: str) -> None:
    """The result for people, or as the one JSON line."""
    if as_json:
        print(json.dumps(result), flush=True)
    else:
        Console().print(text, markup=False, highlight=False, soft_wrap=True)


class CountBar:
    """A bar on stderr of how many of how many are done; lines in the log when stderr is no terminal."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._told = 0.0
        terminal = sys.stderr.isatty()
        self._bar = Progress(
            SpinnerColumn(),
            BarColumn(bar_width=24),
            TextColumn("{task.completed}/{task.total} " + what),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            disable=not terminal,
        )
        self._task: TaskID | None = None
        self._quiet = terminal

    def __enter__(self) -> CountBar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(self, done: int, total: int) -> None:
        """Draw; a log gets a line whenever another tenth is done."""
        if self._task is None:
            self._task = self._bar.add_task(self._what, total=total)
        self._bar.update(self._task, completed=done)
        if not self._quiet and done / total >= self._told + 0.1:
            self._told = done / total
            log.info("%d of %d %s", done, total, self._what)
