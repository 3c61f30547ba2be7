"""Tracked runs against a real MLflow server: what its HTTP interface shows, and what an outage does."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pa_core.config_files import parse_config
from pa_core.records import Group, Prompt, Sample
from pa_core.tracking.mlflow_run import TrackedRun


class Server:
    """``mlflow server`` on a free port, in a process group of its own."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.folder = folder
        self.url = f"http://127.0.0.1:{self.port}"
        self.database = f"sqlite:///{folder / 'mlflow.db'}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        (self.folder / "elsewhere").mkdir(exist_ok=True)
        quiet = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
        command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", self.database, "--workers", "1"]
        command += ["--artifacts-destination", str(self.folder / "proxied"), "--port", str(self.port)]
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                command, cwd=self.folder / "elsewhere", env=os.environ | quiet, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=2).read()
                return
            except OSError:
                time.sleep(0.3)
        raise AssertionError(f"mlflow server did not start:\n{(self.folder / 'server.log').read_text()[-3000:]}")

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(10)

    def get(self, route: str, /, **query: str) -> bytes:
        address = f"{self.url}/{route}?{urllib.parse.urlencode(query)}"
        data: bytes = urllib.request.urlopen(address, timeout=20).read()
        return data

    def run(self, run_id: str) -> Any:
        return json.loads(self.get("api/2.0/mlflow/runs/get", run_id=run_id))["run"]

    def artifact(self, run_id: str, path: str) -> bytes:
        return self.get("get-artifact", run_uuid=run_id, path=path)

    def runs(self, experiment_id: str) -> list[str]:
        body = json.dumps({"experiment_ids": [experiment_id]}).encode()
        request = urllib.request.Request(
            f"{self.url}/api/2.0/mlflow/runs/search", body, {"Content-Type": "application/json"}
        )
        found = json.loads(urllib.request.urlopen(request, timeout=20).read())
        return [run["info"]["run_id"] for run in found.get("runs", [])]


@pytest.fixture(scope="module")
def one_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("mlflow"))
    yield server
    server.stop()


@pytest.fixture
def server(one_server: Server) -> Server:
    """The server, running: a test before may have stopped it."""
    one_server.start()
    return one_server


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")


def begin(uri: str, experiment: str) -> TrackedRun:
    config = parse_config(
        {"data": {"name": "chain_sum"}, "tracking": {"uri": uri, "experiment": experiment}, "seed": 5}
    )
    return TrackedRun.start(config, run_url="/runs/demo-1", fingerprints={"data": "d" * 64}, versions={})


def values(entries: list[dict[str, Any]]) -> dict[str, Any]:
    return {entry["key"]: entry["value"] for entry in entries}


def save_small_model(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 32, "hidden_size": 8, "intermediate_size": 16}
    layers = {"num_hidden_layers": 1, "num_attention_heads": 2}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **layers)).save_pretrained(folder)


def test_a_run_written_from_another_thread_is_whole_on_the_server_and_the_only_one(
    server: Server, tmp_path: Path
) -> None:
    save_small_model(tmp_path / "model")
    tracked = begin(server.url, "threads")

    def work() -> None:
        for step in range(3):
            tracked.log_iteration(step, {"reward/mean": step / 2, "perf/wall": 1.5})
        tracked.log_table([{"prompt": "1+1", "response": "2"}], "rollouts", 0)
        tracked.add_model(3, {})
        tracked.log_model_dir(tmp_path / "model", version=3)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert server.run(tracked.run_id)["info"]["status"] == "RUNNING"
    assert tracked.finish("FINISHED") == 0

    run = server.run(tracked.run_id)
    assert run["info"]["status"] == "FINISHED"
    assert values(run["data"]["metrics"])["reward/mean"] == 1.0
    assert values(run["data"]["params"])["seed"] == "5"
    assert "How to read this run" in values(run["data"]["tags"])["mlflow.note.content"]
    table = json.loads(server.artifact(tracked.run_id, "tables/rollouts/step_000000.json"))
    assert table == {"columns": ["prompt", "response"], "data": [["1+1", "2"]]}
    assert server.runs(tracked.experiment_id) == [tracked.run_id]
    assert tracked.url == f"{server.url}/#/experiments/{tracked.experiment_id}/runs/{tracked.run_id}"

    from mlflow import MlflowClient
    from transformers import AutoModelForCausalLM

    folder = MlflowClient(server.url).download_artifacts(tracked.run_id, "model", str(tmp_path))
    assert AutoModelForCausalLM.from_pretrained(folder).config.hidden_size == 8


def test_a_run_in_a_local_database_shows_its_artifacts_on_a_server_started_elsewhere(server: Server) -> None:
    tracked = begin(server.database, "local")
    tracked.log_text("hello", "notes.txt")
    assert tracked.finish("KILLED") == 0

    assert server.run(tracked.run_id)["info"]["status"] == "KILLED"
    assert server.artifact(tracked.run_id, "notes.txt") == b"hello"


def group(number: int) -> Group:
    tokens = np.arange(2, dtype=np.int32)
    logprobs, mask = np.zeros(2, np.float32), np.ones(2, np.uint8)
    sample = Sample(tokens, logprobs, [(number, 2)], mask, "stop", f"answer {number}", 1.0, {"exact": 1.0})
    prompt = Prompt(f"p{number:08d}", number, f"question {number}", tokens, "1")
    return Group(prompt, [sample], number, "r0", (1000.0, 1001.0))


def test_an_outage_neither_blocks_training_nor_loses_what_was_logged_meanwhile(server: Server) -> None:
    """Points, tables, traces and models; the run ends while the server is still away."""
    from mlflow import MlflowClient

    tracked = begin(server.url, "outage")
    tracked.log_iteration(0, {"reward/mean": 0.0})
    server.stop()
    start = time.monotonic()
    for step in range(1, 20):
        tracked.log_iteration(step, {"reward/mean": float(step)})
        if step % 5 == 0:
            tracked.log_table([{"response": f"answer {step}"}], "rollouts", step)
            tracked.log_trace(group(step), [0.5], [])
            tracked.add_model(step, {"weights": f"/runs/demo-1/weights/{step}"})
    assert time.monotonic() - start < 10, "nothing waits for the server"
    restart = threading.Thread(target=server.start)
    restart.start()
    assert tracked.finish("FINISHED") == 0
    restart.join()

    client = MlflowClient(server.url)
    history = client.get_metric_history(tracked.run_id, "reward/mean")
    assert sorted(metric.step for metric in history) == list(range(20))
    assert client.get_run(tracked.run_id).info.status == "FINISHED"
    for step in (5, 10, 15):
        table = json.loads(server.artifact(tracked.run_id, f"tables/rollouts/step_{step:06d}.json"))
        assert table["data"] == [[f"answer {step}"]]
    traces = client.search_traces(locations=[tracked.experiment_id], run_id=tracked.run_id)
    assert {trace.info.response_preview for trace in traces} == {"answer 5", "answer 10", "answer 15"}
    assert all(len(trace.data.spans) == 5 for trace in traces)
    models = client.search_logged_models([tracked.experiment_id], f"source_run_id = '{tracked.run_id}'")
    assert {model.params["policy_version"]: model.metrics[0].value for model in models} == {"5": 5, "10": 10, "15": 15}


def test_finishing_without_a_server_is_quick_and_tells_how_much_was_lost(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    tracked = begin(server.url, "dead")
    time.sleep(1)
    server.stop()
    tracked.log_iteration(0, {"reward/mean": 0.0})
    start = time.monotonic()
    lost = tracked.finish("KILLED")

    assert time.monotonic() - start < 15
    assert lost >= 2, "the metrics and the final status"
    assert f"{lost} deliveries never reached MLflow" in caplog.text
