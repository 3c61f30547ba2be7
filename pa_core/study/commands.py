"""``pa compare`` and ``pa sweep``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pa_core.config_files import load_config
from pa_core.terminal import Json, Overrides, emit

Name = Annotated[
    str | None, typer.Option(help="Name; the same one again trains only what is missing. Default: made up.")
]
Runs = Annotated[
    list[str] | None,
    typer.Option("--run", metavar="'[NAME:] KEY=VALUE …'", help="A run with overrides of its own; may be repeated."),
]
ConfigFile = Annotated[Path, typer.Argument(help="YAML file that all runs begin with.")]


def compare(
    config: ConfigFile, overrides: Overrides = None, run: Runs = None, name: Name = None, as_json: Json = False
) -> None:
    """Train a config synchronously and periodically, or in any variants, and say what was equal and how fast.

    [dim]pa compare configs/quickstart.yaml deterministic=true[/dim]
    """
    from pa_core.loop.signals import StopSignals
    from pa_core.study.compare import compare as train_and_compare
    from pa_core.study.compare import plan_comparison
    from pa_core.study.terminal import Bars, comparison

    study = plan_comparison(load_config(config, overrides), comparison(name, run or []), config.stem)
    with StopSignals(), Bars() as bars:
        compared = train_and_compare(study, [bars])
    emit(compared.result(), as_json, compared.report)
    if compared.failed:
        raise typer.Exit(1)


def sweep(
    config: ConfigFile,
    overrides: Overrides = None,
    grid: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=V1,V2", help="An axis of the grid; may be repeated: every combination is a run."),
    ] = None,
    run: Runs = None,
    metric: Annotated[str, typer.Option(help="Metric that the best is chosen by: its last value.")] = "eval/accuracy",
    mode: Annotated[str, typer.Option(metavar="max|min", help="Which value is the best.")] = "max",
    concurrency: Annotated[int, typer.Option(help="Runs at a time.")] = 1,
    devices: Annotated[
        list[str] | None,
        typer.Option("--device", metavar="0,1", help="Devices that one of the runs at a time may see; repeated."),
    ] = None,
    model_name: Annotated[str | None, typer.Option(help="Registered model; default: the sweep's name.")] = None,
    name: Name = None,
    as_json: Json = False,
) -> None:
    """Train a grid over any keys of a config, and register the best run in MLflow.

    [dim]pa sweep configs/quickstart.yaml --grid optimizer.learning_rate=1e-5,2e-5 --grid seed=0,1[/dim]
    """
    from pa_core.loop.signals import StopSignals
    from pa_core.study.sweep import plan_sweep
    from pa_core.study.sweep import sweep as train_and_choose
    from pa_core.study.terminal import Bars
    from pa_core.study.terminal import grid as read_grid

    asked = read_grid(
        grid or [],
        run or [],
        name=name,
        metric=metric,
        mode=mode,
        concurrency=concurrency,
        devices=devices or [],
        model_name=model_name,
    )
    study = plan_sweep(load_config(config, overrides), asked, config.stem)
    with StopSignals(), Bars() as bars:
        found = train_and_choose(study, asked, [bars])
    emit(found.result(), as_json, found.report)
    if found.failed:
        raise typer.Exit(1)
