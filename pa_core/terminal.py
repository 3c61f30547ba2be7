"""What the command lines of ``pa`` share: results for people or as one JSON line, and common arguments."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console

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
