"""``pa doctor``: what is here, what is missing, and how to get it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import psutil
from rich.console import Console
from rich.table import Table

from pa_core.config import TrainConfig
from pa_core.errors import ConfigError, UserError
from pa_core.rollout.config import VllmConfig

REQUIRED = ("torch", "transformers", "mlflow", "fsspec", "pyarrow", "pydantic", "reasoning-gym", "math-verify")
OPTIONAL = {
    "prefect": "flows and the Prefect UI: pip install 'periodic-asynchrony[flows]'",
    "s3fs": "stores on s3://: pip install s3fs",
    "torch-npu": "Ascend NPUs: pip install torch-npu on a machine that has them",
}


@dataclass(frozen=True)
class Check:
    """One line of the diagnosis; ``fix`` says how to get what is missing."""

    name: str
    status: Literal["ok", "absent", "missing"]
    detail: str
    fix: str = ""


def diagnose(config: TrainConfig | None) -> list[Check]:
    """Check versions, devices and engines, and with a config its model, data, store and tracking too."""
    checks = [Check("python", "ok", platform.python_version())]
    checks += [_package(name, None) for name in REQUIRED]
    checks += [_package(name, fix) for name, fix in OPTIONAL.items()]
    checks += _devices()
    checks.append(Check("engine: embedded", "ok", "transformers, in processes of its own"))
    checks.append(_vllm(config))
    if config is not None:
        checks += [
            _try("store", config.store.url, lambda: _probe_store(config.store.url)),
            _try("tracking", config.tracking.uri, lambda: _probe_tracking(config.tracking.uri)),
            _try("model and data", config.model.path, lambda: _probe_data(config)),
        ]
    return checks


def _package(name: str, optional_for: str | None) -> Check:
    try:
        return Check(name, "ok", importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        if optional_for is not None:
            return Check(name, "absent", "not installed", optional_for)
        return Check(name, "missing", "not installed", f"pip install {name}")


def _vllm(config: TrainConfig | None) -> Check:
    """vLLM's own environment: needed where the config says so, optional otherwise."""
    from pa_core.rollout.vllm_command import check_environment

    wanted = config is not None and config.engine.kind == "vllm"
    try:
        found = check_environment(config.engine.vllm if config is not None else VllmConfig())
    except ConfigError as error:
        return Check("engine: vllm", "missing" if wanted else "absent", str(error), "make vllm")
    return Check("engine: vllm", "ok", found)


def _devices() -> list[Check]:
    import torch

    memory = psutil.virtual_memory()
    checks = [
        Check("cpu", "ok", f"{os.cpu_count()} cores, {memory.available / 2**30:.1f} GiB of memory free"),
        Check("disk", "ok", f"{shutil.disk_usage('.').free / 2**30:.1f} GiB free here"),
    ]
    if torch.cuda.is_available():
        names = ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
        checks.append(Check("cuda", "ok", names))
    else:
        checks.append(Check("cuda", "absent", "no CUDA device", "training runs on the CPU"))
    return checks


def _try(name: str, target: str, probe: Callable[[], str]) -> Check:
    """Run a probe; its error is the diagnosis."""
    try:
        return Check(name, "ok", probe())
    except UserError as error:
        return Check(name, "missing", target, str(error))
    except Exception as error:
        return Check(name, "missing", target, f"{type(error).__name__}: {error}")


def _probe_store(url: str) -> str:
    from pa_core.loop.run import join_url
    from pa_core.store.objects import ObjectStore

    store = ObjectStore.open(join_url(url, f".doctor-{uuid.uuid4().hex}"))
    store.publish("probe", b"probe")
    store.read("probe")
    store.delete("")
    return f"{url} can be written and read"


def _probe_tracking(uri: str) -> str:
    from pa_core.tracking.connection import prepare_environment

    prepare_environment()
    import mlflow

    experiments = mlflow.MlflowClient(tracking_uri=uri).search_experiments(max_results=5)
    return f"{uri} answers, {len(experiments)} experiments or more"


def _probe_data(config: TrainConfig) -> str:
    from pa_core.loop.services import load_problems, usable_context
    from pa_core.model.loading import load_policy

    model = load_policy(config.model)
    problems = load_problems(config, model.tokenizer, usable_context(config, model))
    return (
        f"{config.model.path}: {len(problems.train)} training and {len(problems.held_out)} held-out problems, "
        f"the distinct ones of {problems.rows} rows"
    )


def render(checks: list[Check]) -> str:
    """A table for the terminal."""
    table = Table(box=None, header_style="bold")
    for column in ("", "check", "found", "what to do"):
        table.add_column(column)
    marks = {"ok": "[green]✓[/green]", "absent": "[yellow]-[/yellow]", "missing": "[red]✗[/red]"}
    for check in checks:
        table.add_row(marks[check.status], check.name, check.detail, check.fix)
    console = Console()
    with console.capture() as capture:
        console.print(table)
    return capture.get()
