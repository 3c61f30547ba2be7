"""The train flow on a real Prefect server, with real processes: run, cancel, kill, refuse."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml
from mlflow import MlflowClient
from waiting import wait_for

from pa_core.loop.progress import read_progress
from pa_core.loop.run import Run, open_run
from pa_core.rollout.address import free_port
from pa_core.store.objects import ObjectStore
from pa_core.store.weights import WeightStore

START_S = 240.0
RUN_S = 300.0
ENDLESS = ("iterations=100000", "prompts_per_iteration=8", "group_size=4", "sampling.max_tokens=64")
TERMINAL = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}


@dataclass
class Prefect:
    """A Prefect server with the host of two deployments, and what the tests ask of it."""

    api: httpx.Client
    folder: Path
    host: subprocess.Popen[bytes]

    @property
    def mlflow(self) -> MlflowClient:
        return MlflowClient(tracking_uri=f"sqlite:///{self.folder}/mlflow.db")

    def submit(self, deployment: str, config: dict[str, Any] | None = None) -> httpx.Response:
        return self.start("train", deployment, {} if config is None else {"config": config})

    def start(self, flow: str, deployment: str, parameters: dict[str, Any]) -> httpx.Response:
        found = self.api.get(f"/deployments/name/{flow}/{deployment}").json()

        def answer() -> httpx.Response | None:
            reply = self.api.post(f"/deployments/{found['id']}/create_flow_run", json={"parameters": parameters})
            # SQLite is locked for a moment now and then; Prefect's own client tries again on 5xx as well.
            return None if reply.status_code >= 500 else reply

        accepted: httpx.Response = wait_for(f"an answer for deployment {deployment}", answer, 60)
        return accepted

    def state(self, flow_run_id: str) -> dict[str, Any]:
        return dict(self.api.get(f"/flow_runs/{flow_run_id}").json()["state"])

    def ended(self, flow_run_id: str, timeout_s: float = RUN_S) -> dict[str, Any]:
        def check() -> dict[str, Any] | None:
            state = self.state(flow_run_id)
            return state if state["type"] in TERMINAL else None

        return dict(wait_for(f"end of flow run {flow_run_id}", check, timeout_s))

    def artifacts(self, flow_run_id: str) -> dict[str, dict[str, Any]]:
        wanted = {"artifacts": {"flow_run_id": {"any_": [flow_run_id]}}}
        return {one["key"]: one for one in self.api.post("/artifacts/filter", json=wanted).json()}

    def logs(self, flow_run_id: str) -> list[str]:
        wanted = {"logs": {"flow_run_id": {"any_": [flow_run_id]}}}
        return [one["message"] for one in self.api.post("/logs/filter", json=wanted).json()]

    def in_training(self, flow_run_id: str) -> Run:
        """The run, once it has finished two iterations."""

        def check() -> Run | None:
            assert self.state(flow_run_id)["type"] not in TERMINAL, self.state(flow_run_id)
            for file in self.folder.glob("runs/*/progress.json"):
                run = open_run(str(file.parent))
                linked = self.artifacts(flow_run_id).get("mlflow-run")
                progress = read_progress(run.store)
                if linked and progress and str(progress.mlflow_run_id) in linked["data"] and progress.iteration >= 2:
                    return run
            return None

        return wait_for("training", check, RUN_S)


def processes_of(url: str) -> list[psutil.Process]:
    """Living processes whose command line names the run."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.status() != psutil.STATUS_ZOMBIE and any(url in part for part in process.cmdline()):
                found.append(process)
    return found


def latest_version(store: ObjectStore) -> int:
    manifests = [key for key in store.list("weights") if key.endswith("manifest.json")]
    return max(int(key.split("/")[-2].removeprefix("v")) for key in manifests)


def tiny_config(model: Path, folder: Path) -> dict[str, Any]:
    return {
        "iterations": 2,
        "prompts_per_iteration": 2,
        "group_size": 2,
        "model": {"path": str(model)},
        "data": {"name": "chain_sum", "options": {"min_terms": 2, "max_terms": 2, "size": 20}, "held_out": 0.2},
        "sampling": {"max_tokens": 4},
        "trainer": {"threads": 1},
        "engine": {"threads": 1},
        "evaluation": {"limit": 2},
        "store": {"url": str(folder / "runs")},
        "tracking": {"uri": f"sqlite:///{folder}/mlflow.db", "log_model": False},
    }


def write_deployments(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "tiny.yaml").write_text(yaml.safe_dump(config))

    def deployment(name: str, *overrides: str) -> dict[str, Any]:
        step = {"id": "read", "path": str(folder / "tiny.yaml"), "overrides": list(overrides)}
        return {
            "name": name,
            "entrypoint": "flows.train.train",
            "build": [{"flows.deployments.read_config": step}],
            "parameters": {"config": "{{ read.config }}"},
            "concurrency_limit": {"limit": 1, "collision_strategy": "ENQUEUE"},
        }

    file = folder / "prefect.yaml"
    evaluate = {"name": "evaluate", "entrypoint": "flows.evaluate.evaluate", "work_pool": {"name": "evaluations"}}
    specs = [deployment("tiny"), deployment("endless", *ENDLESS), evaluate]
    file.write_text(yaml.safe_dump({"deployments": specs}))
    return file


@pytest.fixture(scope="module")
def prefect(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prefect]:
    folder = tmp_path_factory.mktemp("prefect")
    number = free_port()
    address = f"http://127.0.0.1:{number}/api"
    env = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")} | {
        "PREFECT_HOME": str(folder / "home"),
        "PREFECT_API_URL": address,
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        "OMP_NUM_THREADS": "1",
    }
    started: list[subprocess.Popen[bytes]] = []

    def start(name: str, *command: str) -> subprocess.Popen[bytes]:
        with (folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", *command], env=env, cwd=folder, stdout=log, stderr=log, start_new_session=True
            )
        started.append(process)
        return process

    with httpx.Client(base_url=address, timeout=30) as api:

        def answers(path: str) -> Callable[[], bool]:
            def check() -> bool:
                assert all(process.poll() is None for process in started), (folder / "host.log").read_text()
                with contextlib.suppress(httpx.TransportError):
                    return api.get(path).is_success
                return False

            return check

        try:
            start("server", "prefect", "server", "start", "--port", str(number))
            wait_for("Prefect server", answers("/health"), START_S)
            file = write_deployments(folder, tiny_config(tiny_model, folder))
            host = start("host", "flows.deployments", str(file))
            wait_for("deployments", answers("/deployments/name/train/endless"), START_S)
            yield Prefect(api, folder, host)
        finally:
            for process in reversed(started):
                process.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(40)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


def test_a_served_run_completes_with_summary_curve_and_a_link_to_its_mlflow_run(prefect: Prefect) -> None:
    run = prefect.submit("tiny").json()
    state = prefect.ended(run["id"])
    assert state["type"] == "COMPLETED", (state, prefect.logs(run["id"]))
    assert "reward" in state["message"]

    artifacts = prefect.artifacts(run["id"])
    assert artifacts["progress"]["data"] == 100.0
    assert "| Iterations | 2 |" in artifacts["summary"]["data"]
    assert "iterations 0 to 1" in artifacts["reward-curve"]["data"]
    (replica,) = json.loads(artifacts["replicas"]["data"])
    assert (replica["replica"], replica["engine"], replica["state"]) == ("r0", "embedded", "ready")

    mlflow_run_id = artifacts["mlflow-run"]["data"].partition("](")[2].rstrip(")").rpartition("/")[2]
    mlflow_run = prefect.mlflow.get_run(mlflow_run_id)
    assert mlflow_run.info.status == "FINISHED"
    assert mlflow_run.data.tags["prefect.flow_run_id"] == run["id"]
    assert mlflow_run.data.metrics["policy/version"] == 2

    tasks = prefect.api.post("/task_runs/filter", json={"flow_runs": {"id": {"any_": [run["id"]]}}}).json()
    assert {(task["name"], task["state_type"]) for task in tasks} == {
        ("replica r0", "COMPLETED"),
        ("trainer", "COMPLETED"),
    }
    assert any("iteration 2/2" in line for line in prefect.logs(run["id"]))


def test_an_evaluation_shows_scores_with_intervals_and_samples_and_leads_to_the_runs_own_mlflow_run(
    prefect: Prefect,
) -> None:
    trained = prefect.submit("tiny", yaml.safe_load((prefect.folder / "tiny.yaml").read_text()) | {"run_name": "seen"})
    assert prefect.ended(trained.json()["id"])["type"] == "COMPLETED"
    url = str(prefect.folder / "runs/seen")
    run = prefect.start("evaluate", "evaluate", {"request": {"target": url}}).json()
    state = prefect.ended(run["id"])
    assert state["type"] == "COMPLETED", (state, prefect.logs(run["id"]))

    artifacts = prefect.artifacts(run["id"])
    assert artifacts["evaluation-progress"]["data"] == 100.0
    assert "| `pass_at_1` |" in artifacts["evaluation"]["data"]
    assert "version 2" in artifacts["evaluation"]["description"]
    assert len(json.loads(artifacts["evaluation-samples"]["data"])) == 2
    assert open_run(url).facts()["mlflow_run_id"] in artifacts["evaluation-mlflow"]["data"]

    refused = prefect.start("evaluate", "evaluate", {"request": {"target": url, "version": 9}}).json()
    state = prefect.ended(refused["id"])
    assert (state["type"], state["name"]) == ("FAILED", "Bad input")
    assert "version 9 is not published, or not kept any more (latest: 2)" in state["message"]


def test_cancelling_ends_every_process_and_keeps_the_last_version(prefect: Prefect) -> None:
    flow_run = prefect.submit("endless").json()["id"]
    run = prefect.in_training(flow_run)
    assert len(processes_of(run.url)) >= 2

    cancelling = {"state": {"type": "CANCELLING", "name": "Cancelling"}}
    prefect.api.post(f"/flow_runs/{flow_run}/set_state", json=cancelling)
    began = time.monotonic()
    wait_for("end of the run's processes", lambda: not processes_of(run.url), 25)
    assert time.monotonic() - began < 25

    assert prefect.ended(flow_run, 60)["type"] == "CANCELLED"
    version = latest_version(run.store)
    assert version >= 2
    assert WeightStore(run.store).load(version)
    mlflow_run_id = run.facts()["mlflow_run_id"]
    wait_for("MLflow run KILLED", lambda: prefect.mlflow.get_run(mlflow_run_id).info.status == "KILLED", 30)


def test_killing_the_flow_process_leaves_no_orphan_and_no_running_mlflow_run(prefect: Prefect) -> None:
    flow_run = prefect.submit("endless").json()["id"]
    run = prefect.in_training(flow_run)
    children = processes_of(run.url)
    flow_process = next(parent for child in children if (parent := child.parent()) and parent not in children)
    assert flow_process.pid not in (os.getpid(), prefect.host.pid)

    flow_process.kill()
    wait_for("end of the orphans", lambda: not processes_of(run.url), 25)
    assert prefect.ended(flow_run, 60)["type"] == "CRASHED"
    mlflow_run_id = run.facts()["mlflow_run_id"]
    wait_for("MLflow run FAILED", lambda: prefect.mlflow.get_run(mlflow_run_id).info.status == "FAILED", 60)


def test_a_killed_trainer_fails_the_run_and_its_mlflow_run(prefect: Prefect) -> None:
    flow_run = prefect.submit("endless").json()["id"]
    run = prefect.in_training(flow_run)
    trainer = next(one for one in processes_of(run.url) if "pa_core.cli" in one.cmdline())

    trainer.kill()
    state = prefect.ended(flow_run, 60)
    assert state["type"] == "FAILED"
    assert "SIGKILL" in state["message"]
    assert not processes_of(run.url)
    mlflow_run_id = run.facts()["mlflow_run_id"]
    assert prefect.mlflow.get_run(mlflow_run_id).info.status == "FAILED"


def test_a_wrong_value_is_refused_before_anything_starts(prefect: Prefect) -> None:
    config = yaml.safe_load((prefect.folder / "tiny.yaml").read_text())

    def answer(**changes: Any) -> httpx.Response:
        return prefect.submit("tiny", config | changes)

    refused = [answer(iterations="many"), answer(group_sise=4), answer(model={"attention": "none"})]
    assert [response.status_code for response in refused] == [409, 409, 409]
    assert "iterations" in refused[0].text
    assert "group_sise" in refused[1].text


def test_a_rule_across_fields_fails_the_run_with_its_reason(prefect: Prefect) -> None:
    config = yaml.safe_load((prefect.folder / "tiny.yaml").read_text())
    run = prefect.submit("tiny", config | {"group_size": 1}).json()
    state = prefect.ended(run["id"])
    assert state["type"] == "FAILED"
    assert "raise group_size" in state["message"]


def test_bad_input_found_by_the_trainer_is_the_message_of_the_flow_run(prefect: Prefect) -> None:
    config = yaml.safe_load((prefect.folder / "tiny.yaml").read_text())
    missing = str(prefect.folder / "absent.jsonl")
    run = prefect.submit("tiny", config | {"data": {"path": missing}}).json()
    state = prefect.ended(run["id"])
    assert state["type"] == "FAILED"
    assert "absent.jsonl" in state["message"]
    assert "Traceback" not in state["message"]
