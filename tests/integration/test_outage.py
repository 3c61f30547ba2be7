"""A run whose Prefect and MLflow servers are both killed while it trains, stay away for several iterations, and return.

One flow run tells of all of it: training goes on meanwhile, the flow ends Completed, and nothing is missing in MLflow.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from mlflow import MlflowClient
from waiting import wait_for

from pa_core.rollout.address import free_port
from pa_core.tracking.timeline import TRAIN

ITERATIONS = 48
EVERY = 8
ITERATIONS_AWAY = 8  # so that a table, a trace and a checkpoint are among what happens meanwhile
PATIENCE_S = 300.0
REWARD = """\
import time
from pathlib import Path

def gate(response, answer, *, metadata):
    while Path({hold!r}).exists():
        time.sleep(0.02)
    return float(len(response) % 2)
"""


@dataclass
class Servers:
    """Prefect, MLflow and the host of one deployment, as processes of their own groups."""

    folder: Path
    prefect_port: int = field(default_factory=free_port)
    mlflow_port: int = field(default_factory=free_port)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def mlflow_url(self) -> str:
        return f"http://127.0.0.1:{self.mlflow_port}"

    @property
    def prefect_url(self) -> str:
        return f"http://127.0.0.1:{self.prefect_port}/api"

    def start_both(self) -> None:
        """Start Prefect and MLflow, on the data that is there, and wait until they answer."""
        self.start("prefect", "prefect", "server", "start", "--port", str(self.prefect_port))
        store = ["--backend-store-uri", f"sqlite:///{self.folder / 'mlflow.db'}"]
        store += ["--artifacts-destination", str(self.folder / "artifacts"), "--workers", "1"]
        self.start("mlflow", "mlflow", "server", *store, "--port", str(self.mlflow_port))
        wait_for("Prefect", lambda: self.answers("prefect", f"{self.prefect_url}/health"), PATIENCE_S)
        wait_for("MLflow", lambda: self.answers("mlflow", f"{self.mlflow_url}/health"), PATIENCE_S)

    def start(self, name: str, *command: str) -> None:
        env = {key: value for key, value in os.environ.items() if not key.startswith("PREFECT_")} | {
            "PREFECT_HOME": str(self.folder / "home"),
            "PREFECT_API_URL": self.prefect_url,
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            # In memory, the default, a restart would forget the slot that the run holds, and end the run with it.
            "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "DO_NOT_TRACK": "1",
            "OMP_NUM_THREADS": "1",
        }
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", *command], env=env, cwd=self.folder, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip

    def answers(self, name: str, url: str) -> bool:
        log = (self.folder / f"{name}.log").read_text()
        assert self.processes[name].poll() is None, log[-3000:]
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(url, timeout=5).is_success
        return False

    def kill(self, name: str) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.processes[name].pid, signal.SIGKILL)
        self.processes[name].wait(10)


@pytest.fixture
def servers(tiny_model: Path, tmp_path: Path) -> Iterator[Servers]:
    running = Servers(tmp_path)
    try:
        running.start_both()
        write_deployment(tmp_path, tiny_model, running.mlflow_url)
        running.start("host", "flows.deployments", str(tmp_path / "prefect.yaml"))
        deployment = f"{running.prefect_url}/deployments/name/train/tiny"
        wait_for("the deployment", lambda: running.answers("host", deployment), PATIENCE_S)
        yield running
    finally:
        if "host" in running.processes:
            running.processes["host"].send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                running.processes["host"].wait(40)
        for name in running.processes:
            running.kill(name)


def write_deployment(folder: Path, model: Path, mlflow_url: str) -> None:
    """A run of fractions of a second per iteration, which pauses while the file ``hold`` is there."""
    (folder / "own.py").write_text(REWARD.format(hold=str(folder / "hold")))
    config = {
        "run_name": "run",
        "iterations": ITERATIONS,
        "prompts_per_iteration": 2,
        "group_size": 2,
        "model": {"path": str(model)},
        "data": {"name": "chain_sum", "options": {"min_terms": 2, "max_terms": 2, "size": 20}, "held_out": 0.2},
        "rewards": [{"name": "gate", "function": f"{folder / 'own.py'}:gate"}],
        "scoring": {"timeout_s": PATIENCE_S},
        "sampling": {"max_tokens": 4},
        "trainer": {"threads": 1},
        "engine": {"threads": 1},
        "evaluation": {"limit": 2},
        "checkpoint": {"every": EVERY},
        "store": {"url": str(folder / "runs")},
        "tracking": {"uri": mlflow_url, "rollout_table_every": EVERY, "log_model": False},
    }
    (folder / "tiny.yaml").write_text(yaml.safe_dump(config))
    read = {"flows.deployments.read_config": {"id": "read", "path": str(folder / "tiny.yaml")}}
    deployment = {
        "name": "tiny",
        "entrypoint": "flows.train.train",
        "build": [read],
        "parameters": {"config": "{{ read.config }}"},
        "concurrency_limit": {"limit": 1, "collision_strategy": "ENQUEUE"},
    }
    (folder / "prefect.yaml").write_text(yaml.safe_dump({"deployments": [deployment]}))


def submit(servers: Servers) -> str:
    found = httpx.get(f"{servers.prefect_url}/deployments/name/train/tiny", timeout=30).json()

    def accepted() -> Any:
        reply = httpx.post(f"{servers.prefect_url}/deployments/{found['id']}/create_flow_run", json={}, timeout=30)
        return reply.json() if reply.is_success else None  # SQLite is locked for a moment now and then

    return str(wait_for("the flow run", accepted, PATIENCE_S)["id"])


def state(servers: Servers, flow_run: str) -> dict[str, Any]:
    return dict(httpx.get(f"{servers.prefect_url}/flow_runs/{flow_run}", timeout=30).json()["state"])


def iteration(servers: Servers) -> int:
    """Iterations that the trainer has finished."""
    file = servers.folder / "runs/run/progress.json"
    return int(json.loads(file.read_text())["iteration"]) if file.exists() else 0


def trained_since(folder: Path, start: float) -> set[int]:
    """Iterations with a gradient computed after ``start``, by the run's own timeline."""
    spans = [span for file in sorted(folder.glob("runs/run/timeline/*.json")) for span in json.loads(file.read_text())]
    return {
        span["iteration"]
        for span in spans
        if span["lane"] == TRAIN and span["name"] == "forward_backward" and start < span["start"]
    }


def test_training_goes_on_without_prefect_and_mlflow_and_nothing_is_missing_afterwards(servers: Servers) -> None:
    flow_run = submit(servers)
    wait_for("training", lambda: iteration(servers) >= 2, PATIENCE_S)
    servers.kill("prefect")
    servers.kill("mlflow")
    away = time.time()
    wait_for(
        "iterations without servers", lambda: len(trained_since(servers.folder, away)) >= ITERATIONS_AWAY, PATIENCE_S
    )
    (servers.folder / "hold").touch()
    servers.start_both()
    assert iteration(servers) < ITERATIONS, "the run must not end before the servers are back"
    (servers.folder / "hold").unlink()

    def ended() -> dict[str, Any] | None:
        now = state(servers, flow_run)
        return now if now["type"] in ("COMPLETED", "FAILED", "CRASHED", "CANCELLED") else None

    final = wait_for("the end of the flow run", ended, PATIENCE_S)
    assert final["type"] == "COMPLETED", (final, (servers.folder / "host.log").read_text()[-3000:])
    check_mlflow(servers, flow_run)


def check_mlflow(servers: Servers, flow_run: str) -> None:
    """Every point, table, trace and model of the whole run is there once."""
    client = MlflowClient(servers.mlflow_url)
    experiment = client.get_experiment_by_name("periodic-asynchrony")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.tags["prefect.flow_run_id"] == flow_run
    for name in ("reward/mean", "train/loss", "perf/overlap", "policy/version"):
        steps = [point.step for point in client.get_metric_history(run.info.run_id, name)]
        assert sorted(steps) == list(range(ITERATIONS)), name
    evaluated = [point.step for point in client.get_metric_history(run.info.run_id, "eval/accuracy")]
    assert sorted(evaluated) == [0, ITERATIONS]
    shown = {*range(0, ITERATIONS, EVERY), ITERATIONS - 1}
    tables = [Path(file.path).stem for file in client.list_artifacts(run.info.run_id, "tables/rollouts")]
    assert tables == [f"step_{step:06d}" for step in sorted(shown)]
    traces = client.search_traces(locations=[experiment.experiment_id], run_id=run.info.run_id)
    assert sorted(int(trace.info.tags["policy_version"]) for trace in traces) == sorted(shown)
    assert all("train" in [span.name for span in trace.data.spans] for trace in traces)
    models = client.search_logged_models([experiment.experiment_id])
    versions = sorted(int(model.params["policy_version"]) for model in models)
    assert versions == list(range(EVERY, ITERATIONS + 1, EVERY))
    assert all(model.metrics for model in models)
