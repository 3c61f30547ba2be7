"""The command line of ``pa bench`` as forms: one model per benchmark, made from the command's own signature.

A field is an argument or option with its help, default and lower bound; ``benchmark`` tells the models apart, so that
the Prefect UI offers them side by side.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import Field, create_model
from typer.models import ArgumentInfo, OptionInfo

from pa_core.bench.commands import bench
from pa_core.config_section import Section

UNSEEN = ("as_json",)
"""Options that are for the command line alone."""


def _parameters(command: Callable[..., Any]) -> Iterator[tuple[str, Any, ArgumentInfo | OptionInfo, Any]]:
    """Name, plain type, what typer knows and default of each parameter that a form shows."""
    for name, parameter in inspect.signature(command, eval_str=True).parameters.items():
        if name not in UNSEEN:
            plain, known = get_args(parameter.annotation)
            yield name, _as_text(plain), known, parameter.default


def _as_text(plain: Any) -> Any:
    """The type with paths as text, which forms have a field for."""
    if plain is Path:
        return str
    if get_origin(plain) is not None and Path in get_args(plain):
        return Union[tuple(str if part is Path else part for part in get_args(plain))]  # noqa: UP007
    return plain


def _field(known: ArgumentInfo | OptionInfo, plain: Any, default: Any) -> Any:
    """The pydantic field of an argument or option."""
    if get_origin(plain) is not None and list[str] in get_args(plain):
        return Annotated[list[str], Field(default_factory=list, description=known.help)]
    value = str(default) if isinstance(default, Path) else default
    return Annotated[plain, Field(value, description=known.help, ge=known.min)]


def form(name: str, command: Callable[..., Any]) -> type[Section]:
    """The model of one benchmark's arguments and options; its docstring is what ``--help`` begins with."""
    chosen = Annotated[Literal[name], Field(name, description="Which benchmark; choose another one by its tab.")]  # type: ignore[valid-type]
    fields = {field: _field(known, plain, default) for field, plain, known, default in _parameters(command)}
    title = "".join(part.capitalize() for part in name.split("-"))
    purpose = inspect.getdoc(command) or ""
    return create_model(title, __base__=Section, __doc__=purpose.split("\n\n")[0], benchmark=chosen, **fields)


COMMANDS = {str(one.name): one.callback for one in bench.registered_commands if one.callback is not None}
FORMS = {name: form(name, command) for name, command in COMMANDS.items()}

Benchmark: Any = Annotated[Union[tuple(FORMS.values())], Field(discriminator="benchmark")]  # noqa: UP007
"""Any of the forms; the annotation of a flow's parameter."""


def command_line(chosen: Section) -> list[str]:
    """A filled-in form as the arguments of ``pa``, which shall answer in JSON."""
    name = str(chosen.benchmark)  # type: ignore[attr-defined]
    options: list[str] = []
    arguments: list[str] = []
    for field, _, known, default in _parameters(COMMANDS[name]):
        value = getattr(chosen, field)
        if isinstance(known, ArgumentInfo):
            arguments += value if isinstance(value, list) else [str(value)]
        elif value is not None and value != default:
            options += [f"--{field.replace('_', '-')}", str(value)]
    return ["bench", name, "--json", *options, "--", *arguments]
