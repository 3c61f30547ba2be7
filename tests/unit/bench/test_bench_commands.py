"""``pa bench`` as people use it, on a tiny model: what it prints, what reaches MLflow, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from typer.testing import CliRunner

from pa_core.bench import peers
from pa_core.bench.grid import Point
from pa_core.bench.kinds import KINDS
from pa_core.bench.shared_prompt import Settings
from pa_core.cli import app
from pa_core.errors import ConfigError


def invoke(*arguments: object) -> dict[str, Any]:
    """The JSON that ``pa bench`` ends with; what it raises is raised here."""
    done = CliRunner().invoke(app, ["bench", *map(str, arguments), "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_a_grid_measures_equal_work_and_logs_both_sides(tiny_model: Path, tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    grid = ("--model", tiny_model, "--group-size", "4", "--prompt", "20", "--response", "5", "--threads", 1)
    command = ("shared-prompt", *grid, "--repeats", 1, "--out", tmp_path / "points.jsonl", "--tracking-uri", uri)
    result = invoke(*command)
    (row,) = result["rows"]
    assert row["gradient_distance"] < 1e-5
    assert row["speedup"] == row["seconds"]["per_sample"] / row["seconds"]["shared"]
    assert row["share_of_flop_ratio"] == result["least_share_of_flop_ratio"] == row["speedup"] / row["flop_ratio"]
    assert row["per_sample_micro_batch"] in (1, 2, 4) and min(row["peak_bytes"].values()) > 0

    client = MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("benchmarks").experiment_id])
    assert run.info.status == "FINISHED" and run.data.tags["benchmark"] == "shared-prompt"
    assert run.data.params["model"] == str(tiny_model) and run.data.params["group_sizes"] == "[4]"
    logged = run.data.metrics
    for side in ("shared", "per_sample"):
        assert logged[f"K4_Lp20_Lr5/seconds/{side}"] == pytest.approx(row["seconds"][side])
    assert logged["K4_Lp20_Lr5/speedup"] == logged["least_speedup"] == pytest.approx(row["speedup"])
    assert {file.path for file in client.list_artifacts(run.info.run_id)} == {"table.txt", "table.json", "result.json"}

    # Nothing is measured again: the same times come back.
    assert invoke(*command)["rows"] == result["rows"]


def test_time_by_kind_adds_up_to_the_step(tiny_model: Path) -> None:
    result = invoke(
        *("mfu", "--model", tiny_model, "--group-size", 4, "--prompt", 30, "--response", 6),
        *("--repeats", 1, "--threads", 1, "--tracking-uri", "off"),
    )
    entry = result["dtypes"]["float32"]
    kinds = entry["seconds_by_kind"]
    assert set(kinds) == set(KINDS) and all(kinds[kind] > 0 for kind in KINDS)
    assert sum(kinds.values()) == pytest.approx(entry["profiled_seconds"])
    assert entry["mfu"] == pytest.approx(entry["flops_per_s"] / entry["peak_flops_per_s"]["square"])
    assert 0 < entry["mfu_with_optimizer"] < entry["mfu"] < 1


def test_peers_take_the_same_step(tiny_model: Path) -> None:
    try:
        peers.peer_versions()
    except ConfigError as missing:
        pytest.skip(str(missing))
    result = peers.run(Settings(str(tiny_model), "float32", "cpu", 1, 1), Point(4, 20, 6))
    assert set(result["ratio"]) == {"trl", "prefix_grouper"}
    assert max(result["gradient_distance"].values()) < 1e-5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("shared-prompt", "--group-size", "8,x"), "--group-size 8,x"),
        (("shared-prompt", "--dtype", "float64"), "--dtype float64: expected one of float32, bfloat16"),
        (("shared-prompt", "--shape", "gpt"), "--shape gpt: expected one of qwen3-0.6b"),
        (("mfu", "--device", "tpu"), "--device tpu: expected cpu or cuda"),
        (("peers", "--only", "verl"), "--only verl: expected one of trl"),
        (("iteration", "--engine", "sglang"), "--engine sglang"),
        (("shared-prompt", "--group-size", "²"), "--group-size ²: expected whole numbers"),
        (("peers",), "make peers"),
        (("iteration",), "make peers"),
        (("mfu", "--tracking-uri", "http://127.0.0.1:9"), "--tracking-uri http://127.0.0.1:9"),
    ],
)
def test_bad_input_is_named_before_anything_runs(
    arguments: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(peers.PYTHON_VARIABLE, str(tmp_path / "none"))
    with pytest.raises(ConfigError) as error:
        invoke(*arguments)
    assert message in str(error.value) and error.value.exit_code == 2
