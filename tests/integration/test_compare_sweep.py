"""Comparison and sweep with real processes, a real Prefect server and MLflow on SQLite: trained, failed, gone on."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from mlflow import MlflowClient

pytest.importorskip("prefect", reason="the flows extra is not installed")

from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.compare import compare
from flows.sweep import sweep
from pa_core.config_files import load_config
from pa_core.loop.progress import read_progress
from pa_core.store.objects import ObjectStore
from pa_core.study.config import CompareConfig, SweepConfig

START_S = 240.0
RUN_S = 300.0
ITERATIONS = 2
LONG = 12


def wait_for(what: str, check: Callable[[], Any], timeout_s: float) -> Any:
    """The first truthy answer of ``check``."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if answer := check():
            return answer
        time.sleep(0.1)
    raise AssertionError(f"{what}: not within {timeout_s:.0f} s")


@pytest.fixture(scope="module")
def folder(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``tiny.yaml``, a reward that moves weights, and everything that is trained."""
    folder = tmp_path_factory.mktemp("study")
    tree = {
        "iterations": ITERATIONS,
        "prompts_per_iteration": 3,
        "group_size": 3,
        "deterministic": True,
        "model": {"path": str(tiny_model)},
        "data": {"name": "chain_sum", "options": {"size": 40, "max_digits": 1}},
        "rewards": [{"name": "vowels", "function": f"{folder / 'own.py'}:vowels"}],
        "sampling": {"max_tokens": 8},
        "optimizer": {"learning_rate": 1e-3},
        "trainer": {"threads": 1},
        "engine": {"threads": 1},
        "evaluation": {"enabled": False},
        "checkpoint": {"every": 1},
        "store": {"url": str(folder / "runs")},
        "tracking": {"uri": f"sqlite:///{folder / 'mlflow.db'}", "log_model": False},
        "metrics": {"port": None},
    }
    (folder / "tiny.yaml").write_text(yaml.safe_dump(tree))
    (folder / "own.py").write_text(
        "def vowels(response, answer, *, metadata):\n"
        "    return sum(c in 'aeiou' for c in response) / max(1, len(response))\n"
    )
    return folder


@pytest.fixture(scope="module")
def prefect(folder: Path) -> Iterator[httpx.Client]:
    """A Prefect server that the flows of this process talk to."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = f"http://127.0.0.1:{port}/api"
    env = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")} | {
        "PREFECT_HOME": str(folder / "home"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
    }
    with (folder / "server.log").open("wb") as log:
        command = [sys.executable, "-m", "prefect", "server", "start", "--port", str(port)]
        server = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
    try:
        with httpx.Client(base_url=address, timeout=30) as api:

            def answers() -> bool:
                assert server.poll() is None, (folder / "server.log").read_text()
                with contextlib.suppress(httpx.TransportError):
                    return api.get("/health").is_success
                return False

            wait_for("Prefect server", answers, START_S)
            with temporary_settings({PREFECT_API_URL: address}):
                yield api
    finally:
        server.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def mlflow(folder: Path) -> MlflowClient:
    return MlflowClient(tracking_uri=f"sqlite:///{folder}/mlflow.db")


def artifacts_of(api: httpx.Client, state: Any) -> dict[str, dict[str, Any]]:
    wanted = {"artifacts": {"flow_run_id": {"any_": [str(state.state_details.flow_run_id)]}}}
    return {one["key"]: one for one in api.post("/artifacts/filter", json=wanted).json()}


def children_of(mlflow: MlflowClient, parent: str) -> dict[str, Any]:
    """MLflow runs below a parent, by their name in the study."""
    experiment = mlflow.get_run(parent).info.experiment_id
    runs = mlflow.search_runs([experiment], f"tags.`mlflow.parentRunId` = '{parent}'")
    return {run.data.tags["study.run"]: run for run in runs}


@pytest.fixture(scope="module")
def swept(folder: Path, prefect: httpx.Client) -> Any:
    """The state of a sweep flow over two seeds and a run that cannot work."""
    asked = SweepConfig.model_validate(
        {
            "name": "seeds",
            "parameters": {"seed": [0, 1]},
            "runs": [{"name": "broken", "overrides": [f"model.path={folder}/absent"]}],
            "metric": "reward/mean",
            "concurrency": 2,
            "model_name": "tiny",
        }
    )
    return sweep(load_config(folder / "tiny.yaml"), asked, return_state=True)


def test_a_deterministic_comparison_of_sync_and_periodic_is_equal_bit_for_bit(
    folder: Path, prefect: httpx.Client, mlflow: MlflowClient
) -> None:
    state = compare(load_config(folder / "tiny.yaml"), CompareConfig(name="both"), return_state=True)
    assert state.is_completed(), state.message
    assert state.message.startswith("periodic against sync: equal, bit for bit")

    artifacts = artifacts_of(prefect, state)
    report = artifacts["comparison"]["data"]
    assert "`schedule.stream` (false and true); all others were the same" in report
    assert "the final weights are the same bytes" in report and "times as fast" in report
    rows = json.loads(artifacts["comparison-runs"]["data"])
    assert [(row["run"], row["schedule"], row["state"]) for row in rows] == [
        ("sync", "sync", "finished"),
        ("periodic", "periodic", "finished"),
    ]
    assert rows[0]["weights"] == rows[1]["weights"] and rows[0]["speed-up"] == 1.0
    assert artifacts["comparison-pictures"]["data"].count("](data:image/png;base64,") == 2

    parent = artifacts["mlflow-compare"]["data"].partition("](")[2].rstrip(")").rpartition("/")[2]
    run = mlflow.get_run(parent)
    assert run.info.status == "FINISHED" and run.data.tags["mlflow.note.content"] == report
    assert run.data.tags["prefect.flow_run_id"] == str(state.state_details.flow_run_id)
    names = {one.path for one in mlflow.list_artifacts(parent)}
    assert {"comparison.json", "report.md", "reward.png", "timelines.png", "config.yaml"} <= names
    assert run.data.metrics["speed_up/periodic"] > 0
    children = children_of(mlflow, parent)
    assert set(children) == {"sync", "periodic"}
    assert children["sync"].info.run_name == "both.sync"
    assert {child.info.status for child in children.values()} == {"FINISHED"}


def test_a_sweep_with_a_failing_run_finishes_names_it_and_registers_the_best(
    folder: Path, prefect: httpx.Client, mlflow: MlflowClient, swept: Any
) -> None:
    assert swept.is_completed(), swept.message
    assert "1 of 3 runs without a result: broken" in swept.message
    artifacts = artifacts_of(prefect, swept)
    rows = {row["run"]: row for row in json.loads(artifacts["sweep-runs"]["data"])}
    assert {name: row["state"] for name, row in rows.items()} == {
        "seed-0": "finished",
        "seed-1": "finished",
        "broken": "failed",
    }
    assert "absent" in rows["broken"]["error"] and not (folder / "runs/seeds/seeds.broken").exists()

    result = json.loads((folder / "runs/seeds/sweep.json").read_text())
    children = children_of(mlflow, result["mlflow_run_id"])
    assert set(children) == {"seed-0", "seed-1"}
    values = {name: child.data.metrics["reward/mean"] for name, child in children.items()}
    best = max(values, key=values.__getitem__)
    assert result["best"] == best and rows[best]["best"] == "best"

    version = mlflow.get_model_version_by_alias("tiny", "best")
    assert version.run_id == children[best].info.run_id
    weights = Path(version.tags["uri"])
    assert weights == folder / f"runs/seeds/seeds.{best}/weights/v{ITERATIONS:06d}"
    assert (weights / "manifest.json").exists()
    assert float(version.tags["value"]) == values[best]

    filters = {"flow_runs": {"id": {"any_": [str(swept.state_details.flow_run_id)]}}}
    tasks = {task["name"]: task["state_type"] for task in prefect.post("/task_runs/filter", json=filters).json()}
    assert tasks == {"seed-0": "COMPLETED", "seed-1": "COMPLETED", "broken": "FAILED"}
    assert "sweep.png" in {one.path for one in mlflow.list_artifacts(result["mlflow_run_id"])}


def pa_sweep(folder: Path) -> list[str]:
    """The same sweep with a longer run in place of the broken one, on the command line."""
    return [
        *(sys.executable, "-m", "pa_core.cli", "sweep", str(folder / "tiny.yaml"), "--name", "seeds", "--json"),
        *("--grid", "seed=0,1", "--run", f"long: iterations={LONG}", "--metric", "reward/mean", "--model-name", "tiny"),
    ]


def test_the_same_name_again_trains_only_what_is_missing_and_goes_on_with_what_was_stopped(
    folder: Path, mlflow: MlflowClient, swept: Any
) -> None:
    parent = json.loads((folder / "runs/seeds/sweep.json").read_text())["mlflow_run_id"]
    before = {name: run.info.run_id for name, run in children_of(mlflow, parent).items()}
    with (folder / "stopped.log").open("wb") as log:
        process = subprocess.Popen(pa_sweep(folder), stdout=subprocess.DEVNULL, stderr=log, start_new_session=True)
    try:
        store = ObjectStore.open(str(folder / "runs/seeds/seeds.long"))

        def in_training() -> bool:
            assert process.poll() is None, (folder / "stopped.log").read_text()
            state = read_progress(store)
            return state is not None and state.iteration >= 2

        wait_for("two iterations of the long run", in_training, RUN_S)
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 3, (folder / "stopped.log").read_text()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert "go on with the same command and --name seeds" in (folder / "stopped.log").read_text()
    assert mlflow.get_run(parent).info.status == "KILLED"
    assert not store.exists("summary.json") and store.list("checkpoints")

    done = subprocess.run(pa_sweep(folder), capture_output=True, text=True, timeout=RUN_S, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.strip().splitlines()[-1])
    assert {run["run"]: run["state"] for run in result["runs"]} == dict.fromkeys((*before, "long"), "finished")
    assert result["mlflow_run_id"] == parent and mlflow.get_run(parent).info.status == "FINISHED"

    after = children_of(mlflow, parent)
    assert {name: after[name].info.run_id for name in before} == before
    assert not any("resumed_at" in after[name].data.tags for name in before)
    assert "resumed_at" in after["long"].data.tags
    assert json.loads(store.read("summary.json"))["iterations"] == LONG
    assert mlflow.get_model_version_by_alias("tiny", "best").run_id == after[result["best"]].info.run_id
