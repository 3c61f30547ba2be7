"""Real vLLM servers for tests, in vLLM's own environment."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pa_core.config import TrainConfig
from pa_core.config_files import parse_config
from pa_core.errors import ConfigError
from pa_core.loop.run import Run, prepare_run
from pa_core.rollout.process import ReplicaSet
from pa_core.rollout.vllm_command import vllm_python
from pa_core.store.registry import ReplicaRecord

ROOT = Path(__file__).parent.parent
START_LIMIT_S = 400


@pytest.fixture(scope="session")
def vllm_environment() -> Iterator[str]:
    """The interpreter of vLLM's environment, which child processes find by PA_VLLM_PYTHON."""
    os.environ.setdefault("PA_VLLM_PYTHON", str(ROOT / ".venv-vllm/bin/python"))
    try:
        yield str(vllm_python(parse_config({"data": {"name": "chain_sum"}}).engine.vllm))
    except ConfigError as error:
        pytest.skip(f"needs vLLM's environment: {error}")


def vllm_tree(store: str, **changes: Any) -> dict[str, Any]:
    """A config of SmolLM2-135M on one small vLLM server."""
    engine = {
        "kind": "vllm",
        "replicas": 1,
        "threads": 1,
        "startup_timeout_s": START_LIMIT_S,
        "vllm": {"max_model_len": 256, "max_num_seqs": 64},
    } | changes.pop("engine", {})
    return {"data": {"name": "chain_sum"}, "store": {"url": store}, "run_name": "run", "engine": engine} | changes


@contextlib.contextmanager
def started(config: TrainConfig) -> Iterator[tuple[Run, ReplicaSet, dict[str, ReplicaRecord]]]:
    """A run's vLLM replicas once all of them serve."""
    run = prepare_run(config)
    with ReplicaSet(run.url, config.engine, run.log_folder) as replicas:
        deadline = time.monotonic() + START_LIMIT_S
        while True:
            records = {name: replicas.registry.read(name) for name in replicas.ids}
            ready = {name: record for name, record in records.items() if record and record.state == "ready"}
            if len(ready) == len(records):
                break
            assert time.monotonic() < deadline, (run.log_folder / "r0.log").read_text()[-3000:]
            assert not replicas.processes.given_up, replicas.processes.given_up
            time.sleep(0.5)
        yield run, replicas, ready
