"""A whole periodic run of SmolLM2-135M on vLLM replicas, with everything it hands over in a real S3 server.

One replica is killed in mid-iteration and not started again; another is added while the run goes on.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest
import yaml
from s3 import S3Server
from vllm_servers import START_LIMIT_S, vllm_tree

from pa_core.store.ledger import Ledger
from pa_core.store.objects import ObjectStore
from pa_core.store.registry import ReplicaRegistry
from pa_core.store.versions import version_name

PA = [sys.executable, "-m", "pa_core.cli"]
ITERATIONS, GROUPS, SAMPLES = 9, 6, 4
KEY = secrets.token_urlsafe(16)


@dataclass
class Finished:
    """What a run left behind."""

    summary: dict[str, Any]
    store: ObjectStore
    logs: Path
    killed_in: int
    joined: str
    descendants: list[psutil.Process]
    output: str


def config(folder: Path, store_url: str) -> Path:
    data = {
        "name": "basic_arithmetic",
        "options": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1, "size": 400},
        "system_prompt": "",
    }
    tree = vllm_tree(
        store_url,
        iterations=ITERATIONS,
        prompts_per_iteration=GROUPS,
        group_size=SAMPLES,
        data=data,
        rewards=[{"name": "number"}],
        sampling={"max_tokens": 24},
        optimizer={"learning_rate": 1e-5},
        evaluation={"enabled": False},
        checkpoint={"every": 5},
        tracking={"uri": f"sqlite:///{folder / 'mlflow.db'}", "log_model": False},
        engine={"replicas": 2, "max_restarts": 0, "concurrency": 2},
    )
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def until(condition: Callable[[], Any], what: str, limit_s: float, process: subprocess.Popen[str], log: Path) -> Any:
    deadline = time.monotonic() + limit_s
    while not (value := condition()):
        assert process.poll() is None, f"the run ended before: {what}\n{log.read_text()[-4000:]}"
        assert time.monotonic() < deadline, f"not within {limit_s} s: {what}\n{log.read_text()[-4000:]}"
        time.sleep(0.1)
    return value


@pytest.fixture(scope="module")
def finished(
    vllm_environment: str, seaweedfs: S3Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Finished]:
    folder = tmp_path_factory.mktemp("vllm-run")
    env = {**os.environ, **seaweedfs.env, "PA_API_KEY": KEY, "PA_VLLM_PYTHON": vllm_environment, "TMPDIR": str(folder)}
    url = seaweedfs.url("vllm-run")
    err = folder / "err"
    run = subprocess.Popen(
        [*PA, "train", str(config(folder, url)), "--json"],
        env=env,
        stdout=subprocess.PIPE,
        stderr=err.open("w"),
        text=True,
    )
    helper: subprocess.Popen[bytes] | None = None
    try:
        with seaweedfs.activated():
            store = ObjectStore.open(f"{url}/run")
            registry = ReplicaRegistry(store)
            until(lambda: store.exists("ledger/v000000.json"), "iteration 0", START_LIMIT_S, run, err)
            descendants = psutil.Process(run.pid).children(recursive=True)
            helper = subprocess.Popen(
                [*PA, "serve", "--run-url", f"{url}/run", "--replica-id", "r9"],
                env=env,
                stdout=(folder / "r9.log").open("wb"),
                stderr=subprocess.STDOUT,
            )
            record = registry.read("r1")
            assert record is not None
            port = record.url.rsplit(":", 1)[1]
            now = len(store.list("ledger"))
            # A stored group of an iteration that is not booked yet: others of it are being generated right now.
            until(lambda: store.list(f"rollouts/{version_name(now)}"), "a group of the iteration", 60, run, err)
            for process in descendants:
                if "vllm.entrypoints" in " ".join(process.cmdline()) and port in process.cmdline():
                    os.kill(process.pid, signal.SIGKILL)
            output, _ = run.communicate(timeout=1500)
            assert run.returncode == 0, err.read_text()[-6000:]
            helper.send_signal(signal.SIGTERM)
            helper.wait(30)
            yield Finished(
                summary=json.loads(output.strip().splitlines()[-1]),
                store=store,
                logs=folder,
                killed_in=now,
                joined="r9",
                descendants=descendants,
                output=output + err.read_text(),
            )
    finally:
        for process in (run, helper):
            if process is not None and process.poll() is None:
                process.kill()
                process.wait(30)


def rollouts(run: Finished, version: int) -> list[dict[str, Any]]:
    """The iteration's samples as stored."""
    key = f"rollouts/{version_name(version)}.parquet"
    target = run.logs / f"{version}.parquet"
    run.store.download(key, target)
    rows: list[dict[str, Any]] = pq.read_table(target).to_pylist()
    return rows


def test_every_token_was_sampled_by_its_iterations_version_as_vllm_itself_says(finished: Finished) -> None:
    """Invariant 1: one policy."""
    for version in range(ITERATIONS):
        for row in rollouts(finished, version):
            assert row["version"] == version
            assert [span["version"] for span in row["versions"]] == [version]
            assert sum(span["tokens"] for span in row["versions"]) == len(row["token_ids"]) == len(row["logprobs"])


def test_no_group_was_lost_or_counted_twice_although_a_replica_was_killed(finished: Finished) -> None:
    """Invariant 3: exactly once."""
    ledger = Ledger(finished.store)
    consumed = []
    for version in range(ITERATIONS):
        entry = ledger.read(version)
        assert entry is not None
        consumed += entry.group_ids
        assert len(rollouts(finished, version)) == GROUPS * SAMPLES
    assert sorted(consumed) == [f"p{index:08d}" for index in range(ITERATIONS * GROUPS)]
    summary = finished.summary
    assert summary["engine"] == "vllm"
    assert summary["groups"] == ITERATIONS * GROUPS
    assert summary["groups_lost"] == summary["groups_duplicated"] == summary["max_staleness_seen"] == 0


def test_the_killed_replica_got_no_more_work_and_the_added_one_did(finished: Finished) -> None:
    by_version = [{row["replica"] for row in rollouts(finished, version)} for version in range(ITERATIONS)]
    assert "r1" in by_version[0]
    assert all("r1" not in replicas for replicas in by_version[finished.killed_in + 1 :])
    joined = [version for version, replicas in enumerate(by_version) if finished.joined in replicas]
    assert joined
    assert joined[0] > 0
    assert "replica r1 is dead" in finished.output
    assert "replica r9 (vllm) serves" in finished.output


def test_the_trainers_log_probabilities_agree_with_vllms_throughout(finished: Finished) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{finished.logs / 'mlflow.db'}")
    history = client.get_metric_history(finished.summary["mlflow_run_id"], "train/logprob_mismatch_max")
    assert history
    assert max(point.value for point in history) < 1e-3


def test_no_process_outlives_the_run(finished: Finished) -> None:
    psutil.wait_procs(finished.descendants, timeout=15)
    assert [process for process in finished.descendants if process.is_running()] == []


def test_no_secret_is_anywhere_but_in_environments(finished: Finished, seaweedfs: S3Server) -> None:
    secrets_ = (KEY, seaweedfs.secret, seaweedfs.key)
    texts = [finished.output]
    texts += [path.read_text(errors="replace") for path in finished.logs.rglob("*.log")]
    texts += [finished.store.read(key).decode() for key in finished.store.list() if key.endswith(".json")]
    texts += [(finished.logs / "mlflow.db").read_bytes().decode(errors="replace")]
    for path in finished.logs.rglob("*"):
        if path.is_file() and path.suffix in (".yaml", ".json", ".md", ".txt", ".html"):
            texts.append(path.read_text(errors="replace"))
    for secret in secrets_:
        assert not any(secret in text for text in texts)
