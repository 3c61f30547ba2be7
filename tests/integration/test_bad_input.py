"""What a person gets wrong, or what breaks under a run: one clear message, the right exit code, nothing lost."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from pa_core.store.objects import ObjectStore
from pa_core.store.weights import WeightStore

PA = [sys.executable, "-m", "pa_core.cli"]

OWN_REWARDS = """
import time

def raises(response, answer, *, metadata):
    raise RuntimeError("the judge is drunk")

def hangs(response, answer, *, metadata):
    time.sleep(3600)

def nan(response, answer, *, metadata):
    return float("nan")
"""


def tree_for(model: Path, folder: Path) -> dict[str, Any]:
    return {
        "run_name": "run",
        "iterations": 4,
        "prompts_per_iteration": 2,
        "group_size": 3,
        "model": {"path": str(model)},
        "data": {"name": "chain_sum", "options": {"size": 20}},
        "sampling": {"max_tokens": 4},
        "engine": {"threads": 1},
        "store": {"url": str(folder / "runs"), "keep_versions": 3},
        "checkpoint": {"every": 0},
        "tracking": {"uri": f"sqlite:///{folder / 'mlflow.db'}", "log_model": False},
    }


def run(folder: Path, tree: dict[str, Any], timeout: float = 240) -> subprocess.CompletedProcess[str]:
    (folder / "own.py").write_text(OWN_REWARDS)
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(tree))
    return subprocess.run(
        [*PA, "train", str(path), "--json"], capture_output=True, text=True, timeout=timeout, check=False
    )


def expect(result: subprocess.CompletedProcess[str], code: int, *parts: str) -> None:
    """Exit code, one JSON object with the message, the same message for people, and no traceback."""
    assert result.returncode == code, result.stderr[-3000:]
    message = json.loads(result.stdout.strip().splitlines()[-1])["error"]
    for part in parts:
        assert part in message
    assert "Traceback" not in result.stderr
    assert "error:" in result.stderr


def test_brackets_in_a_message_are_shown_as_they_are() -> None:
    result = subprocess.run([*PA, "eval", "[/x]"], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 2
    assert "[/x]" in result.stderr and "Traceback" not in result.stderr


def test_an_unknown_key_suggests_the_near_one(tiny_model: Path, tmp_path: Path) -> None:
    tree = tree_for(tiny_model, tmp_path) | {"optimiser": {"learning_rate": 1e-5}}
    expect(run(tmp_path, tree), 2, "optimiser: unknown key; did you mean 'optimizer'?")


def test_a_wrong_type_names_key_and_value(tiny_model: Path, tmp_path: Path) -> None:
    expect(run(tmp_path, tree_for(tiny_model, tmp_path) | {"group_size": "eight"}), 2, "group_size", "'eight'")


def test_bad_input_leaves_no_run_behind(tiny_model: Path, tmp_path: Path) -> None:
    expect(run(tmp_path, tree_for(tiny_model, tmp_path) | {"data": {"path": "nowhere.jsonl"}}), 2, "nowhere.jsonl")
    assert not (tmp_path / "runs" / "run").exists()


def test_a_run_that_does_not_exist_is_bad_input(tmp_path: Path) -> None:
    command = [*PA, "train", "--resume", str(tmp_path / "nope")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2
    assert "there is no run at" in result.stderr


def test_group_size_one_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    expect(run(tmp_path, tree_for(tiny_model, tmp_path) | {"group_size": 1}), 2, "group_size=1", "raise group_size")


def test_a_missing_config_file_is_named(tmp_path: Path) -> None:
    result = subprocess.run([*PA, "train", "nowhere.yaml"], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2
    assert "nowhere.yaml does not exist" in result.stderr


def test_a_missing_model_is_named(tiny_model: Path, tmp_path: Path) -> None:
    tree = tree_for(tiny_model, tmp_path) | {"model": {"path": str(tmp_path / "no-model")}}
    expect(run(tmp_path, tree), 2, "model.path", "no-model")


@pytest.mark.parametrize(
    ("content", "data", "parts"),
    [
        (None, {}, ["data.path", "rows.jsonl"]),
        ("", {}, ["rows.jsonl", "has no rows"]),
        ('{"quest": "1+1", "answer": "2"}\n', {}, ["question", "quest"]),
        (json.dumps({"question": "long " * 400, "answer": "2"}) + "\n", {}, ["row 1", "tokens", "sampling.max_tokens"]),
    ],
    ids=["missing file", "empty", "missing column", "longer than the context"],
)
def test_data_that_does_not_fit_is_named(
    tiny_model: Path, tmp_path: Path, content: str | None, data: dict[str, Any], parts: list[str]
) -> None:
    if content is not None:
        (tmp_path / "rows.jsonl").write_text(content)
    tree = tree_for(tiny_model, tmp_path) | {"data": {"path": str(tmp_path / "rows.jsonl"), **data}}
    expect(run(tmp_path, tree), 2, *parts)


@pytest.mark.parametrize(
    ("function", "parts"),
    [
        ("raises", ["'bad'", "the judge is drunk", "scoring.max_unscored"]),
        ("hangs", ["'bad'", "timeout", "scoring.timeout_s"]),
        ("nan", ["'bad'", "nan", "scoring.max_unscored"]),
    ],
)
def test_a_reward_that_fails_stops_the_run_by_name(
    tiny_model: Path, tmp_path: Path, function: str, parts: list[str]
) -> None:
    tree = tree_for(tiny_model, tmp_path) | {
        "rewards": [{"name": "bad", "function": f"{tmp_path / 'own.py'}:{function}"}],
        "scoring": {"timeout_s": 0.5},
    }
    expect(run(tmp_path, tree), 1, *parts)


def test_a_reward_that_is_not_there_is_named(tiny_model: Path, tmp_path: Path) -> None:
    tree = tree_for(tiny_model, tmp_path) | {"rewards": [{"name": "exactt"}]}
    expect(run(tmp_path, tree), 2, "exactt", "did you mean 'exact'?")


def test_a_replica_that_dies_at_start_is_named_with_its_end(tiny_model: Path, tmp_path: Path) -> None:
    def kill_the_first_replica() -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            for process in psutil.process_iter(["cmdline"]):
                if str(tmp_path) in " ".join(process.info["cmdline"] or []) and "--replica-id" in process.cmdline():
                    process.kill()
                    return
            time.sleep(0.05)

    killer = threading.Thread(target=kill_the_first_replica)
    killer.start()
    tree = tree_for(tiny_model, tmp_path)
    tree["engine"]["max_restarts"] = 0
    result = run(tmp_path, tree)
    killer.join()
    expect(result, 1, "replica r0 died at start", "SIGKILL")


def test_a_store_that_cannot_be_written_is_named(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    tree = tree_for(tiny_model, tmp_path) | {"store": {"url": str(tmp_path / "file" / "runs")}}
    expect(run(tmp_path, tree), 1, "store", str(tmp_path / "file"))


def test_a_model_with_state_is_sent_to_the_engine_that_can_run_it(tiny_model: Path, tmp_path: Path) -> None:
    from transformers import MambaConfig, MambaForCausalLM

    folder = tmp_path / "mamba"
    shutil.copytree(tiny_model, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    tokens = json.loads((tiny_model / "config.json").read_text())
    ids = {name: tokens[name] for name in ("vocab_size", "eos_token_id", "pad_token_id")}
    MambaForCausalLM(MambaConfig(hidden_size=32, num_hidden_layers=1, state_size=4, **ids)).save_pretrained(folder)
    expect(run(tmp_path, tree_for(folder, tmp_path)), 2, "carries state from token to token", "set engine.kind=vllm")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1.2 MB: room for two versions of the tiny model."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1200k", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_no_space_while_publishing_leaves_the_last_version_whole(
    tiny_model: Path, tmp_path: Path, small_disk: Path
) -> None:
    tree = tree_for(tiny_model, tmp_path) | {"store": {"url": str(small_disk), "keep_versions": 9}}
    expect(run(tmp_path, tree), 1, "No space left", str(small_disk))
    weights = WeightStore(ObjectStore.open(str(small_disk / "run")))
    latest = weights.latest()
    assert latest is not None
    weights.load(latest)
    facts = json.loads((small_disk / "run/run.json").read_text())
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    assert client.get_run(facts["mlflow_run_id"]).info.status == "FAILED"
