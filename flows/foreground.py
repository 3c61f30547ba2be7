"""The train flow in this terminal: ``python -m flows.train CONFIG [KEY=VALUE …]`` (``make demo``)."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from prefect import State
from prefect.exceptions import TerminationSignal
from prefect.settings import PREFECT_API_URL, temporary_settings
from rich.console import Console

from flows import services, tracking, watch
from flows.train import FAILURES, train
from pa_core.config import TrainConfig
from pa_core.config_files import load_config
from pa_core.errors import UserError
from pa_core.loop.progress import ProgressBar
from pa_core.tracking.connection import absolute_uri

STOPPED = 3


def parse(arguments: list[str]) -> tuple[TrainConfig, str]:
    """The config with its overrides, and the file's stem. Raises :class:`ConfigError`."""
    parser = argparse.ArgumentParser(
        prog="python -m flows.train", description="Run the train flow in this terminal and report."
    )
    parser.add_argument("config", help="YAML file, e.g. configs/quickstart.yaml")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="e.g. seed=1 schedule.stream=false")
    given = parser.parse_args(arguments)
    return load_config(given.config, given.overrides), Path(given.config).stem


def hush_console() -> None:
    """Leave the terminal to the progress bar; Prefect still receives every log line."""
    for logger in (logging.getLogger(), *map(logging.getLogger, ("prefect", "prefect.flow_runs", "prefect.task_runs"))):
        for handler in logger.handlers:
            if type(handler).__name__ == "PrefectConsoleHandler":
                handler.setLevel(logging.ERROR)


@contextmanager
def prefect_server() -> Iterator[None]:
    """The Prefect server of the settings, else the one that ``make up`` started, else one for this run alone."""
    if PREFECT_API_URL.value() is not None:
        yield
        return
    running = services.running_prefect_api()
    server = nullcontext(running) if running is not None else services.temporary_prefect()
    with server as api, temporary_settings({PREFECT_API_URL: api}):
        yield


def run_flow(config: TrainConfig, name: str) -> State[Any]:
    """Run the flow in this process and draw its progress."""
    bar = ProgressBar()
    with prefect_server(), bar:
        if sys.stderr.isatty():
            hush_console()
        watch.observers.append(bar.update)
        try:
            return train.with_options(flow_run_name=name)(config, return_state=True)
        finally:
            watch.observers.remove(bar.update)


def opening_command(tracking_uri: str) -> str:
    """The command after which the links of the report work."""
    uri = absolute_uri(tracking_uri)
    ports = {"PREFECT_PORT": services.port("PREFECT_PORT", 4200), "MLFLOW_PORT": services.port("MLFLOW_PORT", 5000)}
    chosen = "".join(f" {name}={value}" for name, value in ports.items() if value not in (4200, 5000))
    if not uri.startswith("sqlite:") or uri == absolute_uri("sqlite:///mlflow.db"):
        return f"make up{chosen}"
    return f"make up{chosen}   (this run's MLflow pages: mlflow ui --backend-store-uri {uri})"


def closing_report(state: State[Any], summary: dict[str, Any], config: TrainConfig) -> str:
    """What happened and how to look at it."""

    def number(key: str, form: str = ".3f") -> str:
        return "not measured" if summary.get(key) is None else format(summary[key], form)

    lines = [
        f"run                 {summary['run_id']}   ({summary['run_url']})",
        f"reward              {number('reward_first')} → {number('reward_last')}   (mean, first → last iteration)",
        f"held-out accuracy   {number('eval_before')} → {number('eval_after')}",
        f"tokens per second   {number('tokens_per_s', '.1f')}",
        f"overlap             {number('overlap', '.0%')} of the shorter side's work "
        f"(generate {number('t_generate', '.0f')} s, train {number('t_train', '.0f')} s, "
        f"sync {number('t_sync', '.0f')} s, wall {number('wall', '.0f')} s)",
        f"bound               {number('bound', '.2f')} times sync at most, with these times",
        "",
        f"Look at it:         {opening_command(config.tracking.uri)}",
    ]
    if summary["mlflow_run_id"]:
        lines.append(f"  MLflow            {tracking.run_page(config.tracking.uri, summary['mlflow_run_id'])}")
    lines.append(f"  Prefect           {services.flow_run_page(str(state.state_details.flow_run_id))}")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Exit codes: 0 trained, 2 bad input, 3 stopped, 1 anything else."""
    console = Console(stderr=True)
    os.environ.setdefault("PA_MLFLOW_UI", services.mlflow_address())
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # Prefect hands the signal on when the flow is over
    try:
        config, name = parse(arguments)
        state = run_flow(config, name)
    except UserError as error:
        console.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return error.exit_code
    except (KeyboardInterrupt, TerminationSignal):
        console.print("stopped")
        return STOPPED
    if not state.is_completed():
        console.print(f"error: {state.message}", style="red", markup=False, highlight=False, soft_wrap=True)
        return next((code for code, failure in FAILURES.items() if failure == state.name), 1)
    Console().print("\n" + closing_report(state, state.result(), config), markup=False, highlight=False, soft_wrap=True)
    return 0
