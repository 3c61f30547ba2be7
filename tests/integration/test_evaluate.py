"""Evaluation with real replica processes: during training, of a finished run afterwards, and of a model by itself."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import pytest
import yaml
from mlflow import MlflowClient

from pa_core.errors import DataError
from pa_core.evaluation.request import EvaluationRequest
from pa_core.loop.evaluation_run import evaluate

PA = [sys.executable, "-m", "pa_core.cli"]
GSM8K = Path(__file__).parents[3] / "shared/data/gsm8k/test.jsonl"
ITERATIONS = 3


def pa(*arguments: str | Path) -> dict[str, Any]:
    """The JSON result of a ``pa`` command."""
    result = subprocess.run(
        [*PA, *map(str, arguments), "--json"], capture_output=True, text=True, timeout=600, check=False
    )
    assert result.returncode == 0, result.stderr[-4000:]
    found: dict[str, Any] = json.loads(result.stdout.strip().splitlines()[-1])
    return found


def client(folder: Path) -> MlflowClient:
    return MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}")


@pytest.fixture(scope="module")
def runs(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, Any]]]:
    """The same bitwise deterministic run with and without evaluation of every version; keeps one version only."""
    folder = tmp_path_factory.mktemp("evaluated")
    tree = {
        "iterations": ITERATIONS,
        "prompts_per_iteration": 3,
        "group_size": 2,
        "deterministic": True,
        "model": {"path": str(tiny_model)},
        "data": {"name": "chain_sum", "options": {"size": 40, "max_digits": 1}, "held_out": 0.3},
        "rewards": [{"name": "closeness"}, {"name": "number"}],
        "sampling": {"max_tokens": 6},
        "optimizer": {"learning_rate": 1e-3},
        "engine": {"threads": 1},
        "trainer": {"threads": 1},
        "evaluation": {"limit": 3},
        "store": {"url": str(folder / "runs"), "keep_versions": 1},
        "checkpoint": {"every": 2},
        "tracking": {"uri": f"sqlite:///{folder / 'mlflow.db'}", "log_model": False},
        "metrics": {"port": None, "targets": None},
    }
    (folder / "tiny.yaml").write_text(yaml.safe_dump(tree))
    changes = {"plain": "evaluation.every=0", "watched": "evaluation.every=1"}
    return folder, {
        name: pa("train", folder / "tiny.yaml", f"run_name={name}", change) for name, change in changes.items()
    }


def test_evaluating_every_version_leaves_training_bit_for_bit_as_it_was(
    runs: tuple[Path, dict[str, dict[str, Any]]],
) -> None:
    folder, summaries = runs
    plain, watched = summaries["plain"], summaries["watched"]
    assert watched["weights_sha256"] == plain["weights_sha256"]
    for fact in ("groups", "groups_lost", "groups_duplicated", "max_staleness_seen", "reward_last", "eval_after"):
        assert watched[fact] == plain[fact], fact

    points = {
        name: client(folder).get_metric_history(summaries[name]["mlflow_run_id"], "eval/accuracy") for name in summaries
    }
    assert [point.step for point in points["plain"]] == [0, ITERATIONS]
    assert sorted(point.step for point in points["watched"]) == list(range(ITERATIONS + 1))
    for step in range(ITERATIONS + 1):
        result = json.loads((folder / f"runs/watched/evaluations/v{step:06d}.json").read_text())
        (value,) = [point.value for point in points["watched"] if point.step == step]
        assert value == pytest.approx(result["accuracy"])
    assert "evaluation_failure" not in client(folder).get_run(watched["mlflow_run_id"]).data.tags
    held = {path.name for path in (folder / "runs/watched/weights").glob("v*")}
    assert held == {f"v{ITERATIONS:06d}", "v000002"}, "the last version and that of the checkpoint, nothing held on to"


def test_a_checkpoint_is_evaluated_into_the_runs_own_store_and_mlflow_run(
    runs: tuple[Path, dict[str, dict[str, Any]]],
) -> None:
    folder, summaries = runs
    settings = ["evaluation.samples=4", "evaluation.temperature=1.0", "evaluation.limit=3"]
    checkpoint = str(folder / "runs/watched/checkpoints/v000002")
    found = evaluate(EvaluationRequest(target=checkpoint, overrides=settings)).found
    assert (found["version"], found["samples"], found["samples_per_problem"]) == (2, 12, 4)
    rows = parquet.read_table(found["samples_url"]).to_pylist()
    assert len(rows) == 12
    assert {row["version"] for row in rows} == {2}
    values = [sum(row["value"] for row in rows[i : i + 4]) / 4 for i in (0, 4, 8)]
    assert found["accuracy"] == pytest.approx(sum(values) / 3)
    score = found["scores"]["avg_at_k"]
    assert score["low"] <= score["value"] <= score["high"]

    assert found["mlflow_run_id"] == summaries["watched"]["mlflow_run_id"]
    run = client(folder).get_run(found["mlflow_run_id"])
    assert run.info.status == "FINISHED"
    (point,) = client(folder).get_metric_history(run.info.run_id, "eval/held_out-k4-t1/maj_at_k")
    assert (point.step, point.value) == (2, pytest.approx(found["scores"]["maj_at_k"]["value"]))
    assert "tables/evaluation/held_out-k4-t1/step_000002.json" in run.data.tags["mlflow.loggedArtifacts"]
    (model,) = client(folder).search_logged_models([run.info.experiment_id], f"name = '{run.info.run_name}-v000002'")
    assert point.value in [metric.value for metric in model.metrics or () if metric.key == point.key]


def test_a_resumed_run_goes_on_with_the_evaluations_that_are_due(
    runs: tuple[Path, dict[str, dict[str, Any]]], tmp_path: Path
) -> None:
    folder, _ = runs
    command = [*PA, "train", str(folder / "tiny.yaml"), "run_name=stopped", "evaluation.every=5", "iterations=900"]
    place = folder / "runs/stopped"
    with (tmp_path / "log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        deadline = time.monotonic() + 300
        while not (place / "evaluations/v000005.json").exists():
            assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()[-3000:]
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
    assert process.returncode == 3, (tmp_path / "log").read_text()[-3000:]

    facts = json.loads((place / "run.json").read_text())
    stopped_at = max(int(path.name[1:]) for path in (place / "weights").glob("v*"))
    facts["config"]["iterations"] = last = stopped_at + 6
    (place / "run.json").write_text(json.dumps(facts))
    summary = pa("train", "--resume", place)
    steps = [point.step for point in client(folder).get_metric_history(summary["mlflow_run_id"], "eval/accuracy")]
    assert sorted(steps) == [0, *range(5, last, 5), last], "each version that was due, once"
    assert "evaluation_failure" not in client(folder).get_run(summary["mlflow_run_id"]).data.tags


@pytest.mark.skipif(not GSM8K.exists(), reason=f"{GSM8K} is not here")
def test_a_model_on_gsm8k_gets_an_mlflow_run_of_its_own_and_keeps_no_weights(
    runs: tuple[Path, dict[str, dict[str, Any]]], tiny_model: Path, tmp_path: Path
) -> None:
    folder, _ = runs
    settings = ["data.limit=4", "data.prompt_template='{prompt}'", "sampling.max_tokens=4", "engine.threads=1"]
    places = [f"store.url={tmp_path}", f"tracking.uri=sqlite:///{folder / 'mlflow.db'}"]
    request = EvaluationRequest(
        target=str(tiny_model), problems="gsm8k", path=str(GSM8K), overrides=[*settings, *places]
    )
    found = evaluate(request).found
    assert (found["version"], found["name"], found["metric"], found["problems"]) == (0, "gsm8k", "math", 4)
    rows = parquet.read_table(found["samples_url"]).to_pylist()
    assert rows[0]["prompt"].startswith("Janet\u2019s ducks lay 16 eggs")
    assert rows[0]["answer"] == "18"
    assert not list(Path(found["run_url"]).glob("weights/*"))

    run = client(folder).get_run(found["mlflow_run_id"])
    assert client(folder).get_experiment(run.info.experiment_id).name == "evaluation"
    assert run.data.metrics["eval/gsm8k/accuracy"] == found["accuracy"]


def test_an_evaluation_that_cannot_begin_leaves_nothing_behind(tiny_model: Path, tmp_path: Path) -> None:
    request = EvaluationRequest(
        target=str(tiny_model), problems="own", path="absent.jsonl", overrides=[f"store.url={tmp_path}"]
    )
    with pytest.raises(DataError, match=r"absent.jsonl"):
        evaluate(request)
    assert not list(tmp_path.iterdir())
