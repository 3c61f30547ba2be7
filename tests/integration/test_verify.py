"""Sync and periodic are the same algorithm: ``pa train`` with ``deterministic: true``, and ``pa verify``."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from typer.testing import CliRunner

from pa_core.cli import app
from pa_core.errors import ConfigError
from pa_core.loop.learner import Learner
from pa_core.records import Group
from pa_core.verify import verify

# Twice the same training, as far as deterministic=true promises; what differs may only change who finishes first.
RUNS: dict[str, list[str]] = {
    "periodic": ["engine.replicas=2", "engine.batch_groups=3"],
    "sync": ["schedule.stream=false", "engine.replicas=1", "engine.batch_groups=2"],
}


@pytest.fixture(scope="module")
def folder(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``config.yaml``: two iterations of 6 groups, two optimizer steps each."""
    folder = tmp_path_factory.mktemp("verify")
    tree = {
        "iterations": 2,
        "prompts_per_iteration": 6,
        "group_size": 3,
        "deterministic": True,
        "model": {"path": str(tiny_model)},
        "data": {"name": "chain_sum", "options": {"size": 40, "max_digits": 1}},
        "rewards": [{"name": "vowels", "function": f"{folder / 'own.py'}:vowels"}],
        "sampling": {"max_tokens": 12},
        "optimizer": {"learning_rate": 1e-3, "steps_per_iteration": 2},
        "objective": {"beta": 0.01},
        "trainer": {"threads": 1},
        "engine": {"threads": 1},
        "evaluation": {"enabled": False},
        "store": {"url": str(folder / "runs")},
        "tracking": {"uri": f"sqlite:///{folder / 'mlflow.db'}", "log_model": False},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    (folder / "own.py").write_text(
        "def vowels(response, answer, *, metadata):\n"
        "    return sum(c in 'aeiou' for c in response) / max(1, len(response))\n"
    )
    return folder


def _pa(*arguments: str) -> tuple[int, dict[str, Any]]:
    """Exit code of ``pa`` and the JSON that it prints last; in this process, with replicas of its own."""
    result = CliRunner().invoke(app, [*arguments, "--json"])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, json.loads(result.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def summaries(folder: Path) -> dict[str, dict[str, Any]]:
    """Summaries of the same config trained on both schedules."""
    trained = {}
    for name, overrides in RUNS.items():
        database = f"tracking.uri=sqlite:///{folder / name}.db"
        code, trained[name] = _pa("train", str(folder / "config.yaml"), f"run_name={name}", database, *overrides)
        assert code == 0
    return trained


@pytest.fixture(scope="module")
def run_url(folder: Path, summaries: dict[str, dict[str, Any]]) -> str:
    """A finished run with two iterations of rollouts."""
    return str(folder / "runs/periodic")


def test_a_sync_and_a_periodic_run_sample_the_same_tokens_and_end_in_the_same_bytes(
    folder: Path, summaries: dict[str, dict[str, Any]]
) -> None:
    def sampled(name: str, version: int) -> pa.Table:
        table = pq.read_table(folder / f"runs/{name}/rollouts/v{version:06d}.parquet")
        return table.sort_by([("group_id", "ascending"), ("sample_index", "ascending")]).select(
            ["group_id", "token_ids", "logprobs", "reward"]
        )

    for version in range(2):
        assert sampled("sync", version).equals(sampled("periodic", version))
    assert summaries["sync"]["schedule"] == "sync" and summaries["periodic"]["schedule"] == "periodic"
    assert summaries["sync"]["weights_sha256"] == summaries["periodic"]["weights_sha256"]


def test_a_deterministic_run_is_verified_bitwise(run_url: str) -> None:
    code, result = _pa("verify", run_url, "--iterations", "2")
    assert code == 0 and result["passed"] and result["bitwise_equal"]
    assert result["run_url"] == run_url
    assert [row["version"] for row in result["iterations"]] == [1, 2]
    for row in result["iterations"]:
        assert row["largest_difference"] == 0.0 < row["largest_movement"]


def test_an_ordinary_run_is_verified_up_to_rounding(run_url: str) -> None:
    code, result = _pa("verify", run_url, "deterministic=false", "--iterations", "2")
    assert code == 0 and result["passed"]
    assert 0 < result["relative_difference"] < 0.1 * result["tolerance"]


def test_float_sums_are_found_out_under_deterministic(run_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pa_core.loop.learner._fixed_sum", lambda config, parameters: None)
    code, result = _pa("verify", run_url, "--iterations", "1")
    assert code == 1 and not result["passed"]
    assert any("embed_tokens" in name or "layers" in name for name in result["first_differing"])


def test_weights_that_never_moved_prove_nothing(run_url: str) -> None:
    code, result = _pa("verify", run_url, "optimizer.learning_rate=1e-60", "--iterations", "1")
    assert code == 1 and result["bitwise_equal"] and not result["passed"]


def test_a_schedule_that_loses_a_group_is_found_out(run_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Learner.accumulate

    def lossy(learner: Learner, groups: Sequence[Group]) -> None:
        whole(learner, [group for group in groups if len(groups) == 3 or group.id != "p00000001"])

    monkeypatch.setattr(Learner, "accumulate", lossy)
    code, result = _pa("verify", run_url, "deterministic=false", "--iterations", "1")
    assert code == 1 and not result["passed"]
    assert result["relative_difference"] > 10 * result["tolerance"]


def test_a_config_is_trained_for_rollouts_and_leaves_nothing_behind(folder: Path, tmp_path: Path) -> None:
    config = shutil.copy(folder / "config.yaml", tmp_path)
    code, result = _pa("verify", str(config), "--iterations", "1", "engine.replicas=1", "lora={rank: 2}")
    assert code == 0 and result["passed"] and result["bitwise_equal"] and result["run_url"] is None
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]
    assert not list((folder / "runs").glob("verify-*"))


@pytest.mark.parametrize(
    ("target", "overrides", "options", "message"),
    [
        ("missing.yaml", [], {}, "config file missing.yaml does not exist"),
        ("no/such/run", [], {}, "there is no run at"),
        ("RUN", ["optimzer.eps=1"], {}, "optimzer: unknown key; did you mean 'optimizer'"),
        ("RUN", [], {"iterations": 3}, "--iterations=3: .* has kept no complete iteration 3; ask for at most 2"),
        ("RUN", ["iterations=2"], {}, "pa verify compares as many as --iterations=1 says"),
        ("RUN", [], {"store": "elsewhere"}, "--store=elsewhere is for the rollouts of a config"),
        ("RUN", ["deterministic=false", "parallel.fsdp=2"], {}, "pa verify trains in one process; add parallel.fsdp=1"),
        (
            "RUN",
            ["schedule.stream=false", "objective.advantage.std=batch"],
            {},
            "there are not two schedules to compare: objective.advantage.std=batch",
        ),
    ],
)
def test_what_cannot_be_verified_is_bad_input_with_a_fix(
    run_url: str, target: str, overrides: list[str], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        verify(run_url if target == "RUN" else target, overrides, **({"iterations": 1} | options))
