"""``pa train`` with real replica processes on a random two-layer model: the whole path, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest
import yaml

from pa_core.store.ledger import Ledger
from pa_core.store.objects import ObjectStore
from pa_core.store.weights import WeightStore

PA = [sys.executable, "-m", "pa_core.cli"]


def tiny_tree(model: Path, folder: Path, **changes: Any) -> dict[str, Any]:
    """A run of a few seconds: 3 iterations of 4 groups of 3 samples, two replicas."""
    return {
        "run_name": "run",
        "iterations": 3,
        "prompts_per_iteration": 4,
        "group_size": 3,
        "model": {"path": str(model)},
        "data": {"name": "chain_sum", "options": {"size": 60, "max_digits": 1}, "held_out": 0.2},
        "rewards": [{"name": "number", "weight": 0.5}, {"name": "vowels", "function": f"{folder / 'own.py'}:vowels"}],
        "sampling": {"max_tokens": 8},
        "optimizer": {"learning_rate": 1e-3},
        "objective": {"beta": 0.01},
        "engine": {"replicas": 2, "batch_groups": 2, "threads": 1},
        "evaluation": {"limit": 6},
        "store": {"url": str(folder / "runs"), "keep_versions": 2},
        "checkpoint": {"every": 2},
        "tracking": {"uri": f"sqlite:///{folder / 'mlflow.db'}", "rollout_table_every": 2},
    } | changes


def write_config(folder: Path, tree: dict[str, Any]) -> Path:
    (folder / "own.py").write_text(
        "def vowels(response, answer, *, metadata):\n"
        "    return sum(c in 'aeiou' for c in response) / max(1, len(response))\n"
    )
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def pa(*arguments: str | Path, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*PA, *map(str, arguments)], capture_output=True, text=True, timeout=timeout, check=False)


def last_json(output: str) -> dict[str, Any]:
    tree: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    return tree


def mlflow_run(folder: Path, run_id: str) -> Any:
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}").get_run(run_id)


def artifact(run: Any, *parts: str) -> Path:
    return Path(run.info.artifact_uri.removeprefix("file://")).joinpath(*parts)


@pytest.fixture(scope="module")
def finished(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Folder and summary of a finished periodic run."""
    folder = tmp_path_factory.mktemp("finished")
    result = pa("train", write_config(folder, tiny_tree(tiny_model, folder)), "--json")
    assert result.returncode == 0, result.stderr[-4000:]
    return folder, last_json(result.stdout)


def test_the_summary_says_what_the_run_did(finished: tuple[Path, dict[str, Any]]) -> None:
    folder, summary = finished
    assert summary["schedule"] == "periodic"
    assert summary["engine"] == "embedded"
    assert summary["iterations"] == 3
    assert summary["groups"] == 12
    assert summary["groups_lost"] == summary["groups_duplicated"] == summary["max_staleness_seen"] == 0
    assert 0 <= summary["reward_first"] <= 1
    assert 0 <= summary["eval_before"] <= 1
    assert 0 <= summary["eval_after"] <= 1
    assert summary["tokens_per_s"] == pytest.approx(summary["tokens"] / summary["wall"])
    assert json.loads((folder / "runs/run/summary.json").read_text()) == summary


def test_every_trained_token_was_sampled_by_its_iterations_version(finished: tuple[Path, dict[str, Any]]) -> None:
    """Invariant 1: one policy."""
    folder, _ = finished
    for version in range(3):
        rows = pq.read_table(folder / f"runs/run/rollouts/v{version:06d}.parquet").to_pylist()
        assert len(rows) == 12
        for row in rows:
            assert [span["version"] for span in row["versions"]] == [version]
            assert sum(span["tokens"] for span in row["versions"]) == len(row["token_ids"])


def test_the_ledger_has_every_group_of_every_iteration_once(finished: tuple[Path, dict[str, Any]]) -> None:
    """Invariant 3: exactly once."""
    folder, _ = finished
    ledger = Ledger(ObjectStore.open(str(folder / "runs/run")))
    consumed = []
    for version in range(3):
        entry = ledger.read(version)
        assert entry is not None
        assert len(entry.group_ids) == 4
        consumed += entry.group_ids
    assert sorted(consumed) == [f"p{index:08d}" for index in range(12)]


def test_only_the_last_versions_and_the_checkpoints_are_kept(finished: tuple[Path, dict[str, Any]]) -> None:
    folder, summary = finished
    weights = WeightStore(ObjectStore.open(str(folder / "runs/run")))
    kept = [version for version in range(4) if weights.manifest(version) is not None]
    assert kept == [2, 3]
    manifest = weights.require(3)
    assert manifest.weights_sha256 == summary["weights_sha256"]


def test_mlflow_has_one_finished_run_that_explains_itself(finished: tuple[Path, dict[str, Any]]) -> None:
    from mlflow import MlflowClient

    from pa_core.tracking.metrics import check_documented

    folder, summary = finished
    client = MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}")
    runs = [run for each in client.search_experiments() for run in client.search_runs([each.experiment_id])]
    assert [run.info.run_id for run in runs] == [summary["mlflow_run_id"]]
    (run,) = runs
    assert run.info.status == "FINISHED"
    assert run.data.params["sampling.max_tokens"] == "8"
    assert {"schedule", "engine", "mlflow.note.content"} <= run.data.tags.keys()
    check_documented(run.data.metrics)
    for name in ("reward/mean", "reward/number", "reward/vowels", "train/kl", "train/logprob_mismatch_max"):
        assert len(client.get_metric_history(run.info.run_id, name)) == 3, name
    assert {item.dataset.digest for item in run.inputs.dataset_inputs}
    for path in ("config.yaml", "summary.json", "timeline/timeline.png", "timeline/trace.json", "reward_curve.png"):
        assert artifact(run, path).stat().st_size > 0, path
    table = json.loads(artifact(run, "tables/rollouts/step_000000.json").read_text())
    assert {"prompt", "response", "reward"} <= set(table["columns"])


def test_mlflow_shows_a_group_on_its_way_and_the_stored_versions_as_models(
    finished: tuple[Path, dict[str, Any]],
) -> None:
    from mlflow import MlflowClient

    folder, summary = finished
    client = MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}")
    run = client.get_run(summary["mlflow_run_id"])
    where = [run.info.experiment_id]
    traces = client.search_traces(locations=where, run_id=run.info.run_id)
    assert sorted(trace.info.tags["policy_version"] for trace in traces) == ["0", "2"]
    for trace in traces:
        spans = {span.name: span for span in trace.data.spans}
        assert all(spans[part].end_time_ns > spans[part].start_time_ns for part in ("generate", "score", "train"))
        assert spans["score"].end_time_ns <= spans["train"].start_time_ns
        assert len([name for name in spans if name.startswith("sample ")]) == 3
    models = {model.params["policy_version"]: model for model in client.search_logged_models(where)}
    found = {version: {metric.key: metric.step for metric in model.metrics} for version, model in models.items()}
    assert found["2"] == {"reward/mean": 2}
    assert found["3"]["eval/accuracy"] == 3
    for version, model in models.items():
        assert (Path(model.params["weights"]) / "manifest.json").exists(), version
        assert model.tags["stored"] == "true"
    assert models["3"].params["weights_sha256"] == summary["weights_sha256"]


def test_the_engines_and_the_trainers_logprobs_agree(finished: tuple[Path, dict[str, Any]]) -> None:
    folder, summary = finished
    run = mlflow_run(folder, summary["mlflow_run_id"])
    assert run.data.metrics["train/logprob_mismatch_max"] < 1e-4
    assert run.data.metrics["train/ratio"] == 1.0
    assert run.data.metrics["train/clip_fraction"] == 0.0


def test_the_final_model_is_the_published_one_and_loads_with_transformers(
    finished: tuple[Path, dict[str, Any]],
) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, summary = finished
    saved = artifact(mlflow_run(folder, summary["mlflow_run_id"]), "model")
    model = AutoModelForCausalLM.from_pretrained(saved)
    AutoTokenizer.from_pretrained(saved)
    published = WeightStore(ObjectStore.open(str(folder / "runs/run"))).load(3)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, published[name]), name


def test_eval_measures_a_published_version_again(finished: tuple[Path, dict[str, Any]]) -> None:
    folder, summary = finished
    result = pa("eval", folder / "runs/run", "--json")
    assert result.returncode == 0, result.stderr[-2000:]
    found = last_json(result.stdout)
    assert found["version"] == 3
    assert found["accuracy"] == pytest.approx(summary["eval_after"])


def test_a_finished_run_is_not_resumed(finished: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = finished
    result = pa("train", "--resume", folder / "runs/run")
    assert result.returncode == 2
    assert "is finished" in result.stderr


def test_eval_of_a_version_that_is_gone_says_so(finished: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = finished
    result = pa("eval", folder / "runs/run", "--version", "1")
    assert result.returncode == 2
    assert "version 1 is not published, or not kept any more (latest: 3)" in result.stderr


def test_sync_and_periodic_sample_the_same_tokens_first(finished: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """Same seed, other schedule: iteration 0 has the same responses, and sync trains only after all of them."""
    folder, _ = finished
    tree = yaml.safe_load((folder / "config.yaml").read_text())
    tree |= {"schedule": {"stream": False}, "iterations": 1, "run_name": "sync", "checkpoint": {"every": 0}}
    result = pa("train", write_config(folder, tree), "--json")
    assert result.returncode == 0, result.stderr[-2000:]
    assert last_json(result.stdout)["overlap"] == 0.0

    def responses(run: str) -> dict[str, list[list[int]]]:
        found: dict[str, list[list[int]]] = {}
        for row in pq.read_table(folder / f"runs/{run}/rollouts/v000000.parquet").to_pylist():
            found.setdefault(row["group_id"], []).append(row["token_ids"])
        return found

    assert responses("sync") == responses("run")


def descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def wait_until(condition: Any, what: str, timeout: float = 120) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout:g} s for {what}"
        time.sleep(0.1)


@pytest.fixture
def endless(tiny_model: Path, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A run of very many iterations, in its second one at least, and its folder."""
    engine = {"replicas": 2, "batch_groups": 2, "threads": 1, "max_restarts": 0}
    tree = tiny_tree(tiny_model, tmp_path, iterations=100_000, evaluation={"enabled": False}, engine=engine)
    process = subprocess.Popen(
        [*PA, "train", str(write_config(tmp_path, tree)), "--json"],
        stdout=subprocess.PIPE,
        stderr=(tmp_path / "err").open("w"),
        text=True,
    )
    try:
        wait_until(
            lambda: (tmp_path / "runs/run/ledger/v000002.json").exists() or process.poll() is not None, "iteration 2"
        )
        assert process.poll() is None, (tmp_path / "err").read_text()[-3000:]
        yield process, tmp_path
    finally:
        process.kill()
        process.wait(10)


def run_status(folder: Path) -> str:
    run_id = json.loads((folder / "runs/run/run.json").read_text())["mlflow_run_id"]
    status: str = mlflow_run(folder, run_id).info.status
    return status


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_run_is_resumable_and_goes_on_without_repeating_a_group(
    endless: tuple[subprocess.Popen[str], Path], number: signal.Signals
) -> None:
    process, folder = endless
    children = descendants(process.pid)
    process.send_signal(number)
    output, _ = process.communicate(timeout=25)
    assert process.returncode == 3, (folder / "err").read_text()[-3000:]
    assert number.name in last_json(output)["error"]
    assert f"pa train --resume {folder / 'runs/run'}" in last_json(output)["error"]
    assert not psutil.wait_procs(children, timeout=5)[1]
    assert run_status(folder) == "KILLED"
    if number is signal.SIGINT:
        return
    ledger = Ledger(ObjectStore.open(str(folder / "runs/run")))
    stopped_at = next(version for version in range(1000) if ledger.read(version) is None)
    stored = {path.stem: path.read_bytes() for path in (folder / f"runs/run/rollouts/v{stopped_at:06d}").glob("*")}

    facts = json.loads((folder / "runs/run/run.json").read_text())
    facts["config"]["iterations"] = stopped_at + 2
    (folder / "runs/run/run.json").write_text(json.dumps(facts))
    result = pa("train", "--resume", folder / "runs/run", "--json")
    assert result.returncode == 0, result.stderr[-3000:]
    summary = last_json(result.stdout)
    assert summary["mlflow_run_id"] == facts["mlflow_run_id"]
    assert run_status(folder) == "FINISHED"
    consumed = [group for version in range(stopped_at + 2) for group in ledger.read(version).group_ids]  # type: ignore[union-attr]
    assert consumed == [f"p{index:08d}" for index in range(4 * (stopped_at + 2))]
    if stored:
        rows = pq.read_table(folder / f"runs/run/rollouts/v{stopped_at:06d}.parquet").to_pylist()
        assert set(stored) <= {row["group_id"] for row in rows}


def test_a_run_that_is_being_trained_is_not_trained_twice(endless: tuple[subprocess.Popen[str], Path]) -> None:
    process, folder = endless
    result = pa("train", "--resume", folder / "runs/run")
    assert result.returncode == 2
    assert f"is being trained by process {process.pid}" in result.stderr
    assert process.poll() is None


def test_a_killed_trainer_leaves_no_process_behind(endless: tuple[subprocess.Popen[str], Path]) -> None:
    process, folder = endless
    children = descendants(process.pid)
    assert len(children) >= 2
    process.kill()
    assert not psutil.wait_procs(children, timeout=10)[1]
    latest = WeightStore(ObjectStore.open(str(folder / "runs/run"))).latest()
    assert latest is not None
    WeightStore(ObjectStore.open(str(folder / "runs/run"))).load(latest)


def test_replicas_that_die_are_named_within_seconds(endless: tuple[subprocess.Popen[str], Path]) -> None:
    process, folder = endless
    replicas = [child for child in descendants(process.pid) if "--replica-id" in child.cmdline()]
    assert len(replicas) == 2
    for replica in replicas:
        os.kill(replica.pid, signal.SIGKILL)
    started = time.monotonic()
    output, _ = process.communicate(timeout=20)
    assert time.monotonic() - started < 15
    assert process.returncode == 1
    assert "replica r0" in last_json(output)["error"]
    assert "SIGKILL" in last_json(output)["error"]
    assert run_status(folder) == "FAILED"


def test_one_replica_that_dies_costs_the_run_nothing(endless: tuple[subprocess.Popen[str], Path]) -> None:
    process, folder = endless
    victim = next(child for child in descendants(process.pid) if "r1" in child.cmdline())
    os.kill(victim.pid, signal.SIGKILL)
    ledger = folder / "runs/run/ledger"
    now = len(list(ledger.iterdir()))
    wait_until(lambda: len(list(ledger.iterdir())) >= now + 3, "three more iterations", 60)
    assert process.poll() is None
