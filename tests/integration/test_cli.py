"""The ``pa`` command as a person meets it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from pa_core import __version__

PA = [sys.executable, "-m", "pa_core.cli"]


def pa(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*PA, *arguments], capture_output=True, text=True, timeout=120, check=False)


def config(folder: Path, tiny_model: Path, changes: dict[str, object]) -> str:
    path = folder / "config.yaml"
    tree = {
        "model": {"path": str(tiny_model)},
        "data": {"name": "chain_sum", "options": {"size": 50}, "held_out": 0.3},
        "sampling": {"max_tokens": 8},
        "store": {"url": str(folder / "runs")},
        "tracking": {"uri": f"sqlite:///{folder / 'mlflow.db'}"},
        **changes,
    }
    path.write_text(yaml.safe_dump(tree))
    return str(path)


def test_help_lists_every_command_and_a_first_step() -> None:
    result = pa("--help")
    assert result.returncode == 0
    for word in ("train", "eval", "verify", "serve", "doctor", "bench", "pa train configs/quickstart.yaml"):
        assert word in result.stdout


def test_the_version_is_the_packages() -> None:
    assert pa("--version").stdout.strip() == f"pa {__version__}"


def test_an_unknown_option_is_bad_input() -> None:
    assert pa("train", "--nonsense").returncode == 2


def test_doctor_finds_model_data_store_and_tracking_in_order(tiny_model: Path, tmp_path: Path) -> None:
    result = pa("doctor", config(tmp_path, tiny_model, {}), "--json")
    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads(result.stdout.strip().splitlines()[-1])
    status = {check["name"]: check["status"] for check in found["checks"]}
    assert found["ok"]
    for name in ("python", "torch", "store", "tracking", "model and data"):
        assert status[name] == "ok", name
    assert not list((tmp_path / "runs").glob("*"))


@pytest.mark.parametrize(
    ("changes", "name", "fix"),
    [
        ({"store": {"url": "/proc/nowhere/runs"}}, "store", "/proc/nowhere"),
        ({"data": {"path": "missing.jsonl"}}, "model and data", "missing.jsonl"),
        ({"model": {"path": "./no-such-model"}}, "model and data", "model.path"),
        ({"tracking": {"uri": "http://127.0.0.1:9"}}, "tracking", "127.0.0.1"),
    ],
)
def test_doctor_names_what_is_missing_and_how_to_get_it(
    tiny_model: Path, tmp_path: Path, changes: dict[str, object], name: str, fix: str
) -> None:
    result = pa("doctor", config(tmp_path, tiny_model, changes), "--json")
    assert result.returncode == 1, result.stdout + result.stderr
    checks = json.loads(result.stdout.strip().splitlines()[-1])["checks"]
    (failed,) = [check for check in checks if check["status"] == "missing"]
    assert failed["name"] == name
    assert fix in failed["fix"]
