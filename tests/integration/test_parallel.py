"""Several processes that train as one: the same update in every layout, checkpoints that fit another one, and ends."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml
from parallel_worker import LAYOUTS, config_for, iterate, train_in

from pa_core.config_files import parse_config
from pa_core.loop.learner import Learner
from pa_core.model.loading import load_policy
from pa_core.records import Group
from pa_core.store.checkpoints import CheckpointStore
from pa_core.store.ledger import Ledger
from pa_core.store.objects import ObjectStore
from pa_core.store.rollouts import RolloutBuffer
from pa_core.store.weights import WeightStore

WORKER = Path(__file__).parents[1] / "parallel_worker.py"
EACH = pytest.mark.parametrize(
    ("layout", "scenario"), [(layout, scenario) for layout, scenarios in LAYOUTS.items() for scenario in scenarios]
)

# Norm of the difference over norm of the movement. Rounding was seen to make 6e-7 where the step is nearly linear in
# the gradient, and 1e-5 where AdamW's division blows up gradients that are nearly zero.
TOLERANCES = {"shared": 5e-6, "per_sample": 5e-6, "kl": 1e-4}

Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def root(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where every layout has trained every scenario; the vocabulary is odd, heads tied or not."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    root = tmp_path_factory.mktemp("layouts")
    shutil.copytree(tiny_model, root / "llama")
    shutil.copytree(tiny_model, root / "qwen3")
    torch.manual_seed(1)
    config = Qwen3Config(
        vocab_size=261,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=False,
        attention_bias=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(root / "qwen3")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    train_in(None, root, "1x1")
    torch.set_num_threads(threads)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    result = subprocess.run(
        [*command, WORKER, root], capture_output=True, text=True, timeout=280, check=False, env=environment()
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return root


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def weights(folder: Path, version: int) -> Weights:
    return WeightStore(ObjectStore.open(str(folder))).load(version)


def initial(root: Path, scenario: str) -> Weights:
    state: Weights = load_policy(config_for(root, scenario).model).model.state_dict()
    return state


def distance(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> float:
    assert left.keys() == right.keys()
    return math.sqrt(sum(float((left[name] - right[name]).double().square().sum()) for name in left))


@EACH
def test_every_layout_makes_the_single_process_s_update(root: Path, layout: str, scenario: str) -> None:
    start = initial(root, scenario)
    for version in (1, 2):
        expected = weights(root / "1x1" / scenario, version)
        found = weights(root / layout / scenario, version)
        assert distance(found, expected) <= TOLERANCES[scenario] * distance(expected, start)


@EACH
def test_metrics_and_gradient_norm_do_not_depend_on_the_layout(root: Path, layout: str, scenario: str) -> None:
    expected = json.loads((root / "1x1" / f"{scenario}.json").read_text())["metrics"]
    found = json.loads((root / layout / f"{scenario}.json").read_text())["metrics"]
    assert len(found) == len(expected) == 3
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=2e-5, abs=1e-7)
        assert theirs["train/grad_norm"] > 0


@EACH
def test_a_checkpoint_goes_on_in_another_layout(root: Path, layout: str, scenario: str) -> None:
    """Fsdp 2 x tp 2 from a single process's, fsdp 2 and tp 2 from that one's: the second iteration is the same."""
    expected = weights(root / "1x1" / scenario, 2)
    found = weights(root / layout / scenario, 3)
    assert distance(found, expected) <= TOLERANCES[scenario] * distance(expected, initial(root, scenario))


@pytest.mark.parametrize("layout", ["2x1", "1x2"])
def test_a_single_process_goes_on_from_several(root: Path, layout: str) -> None:
    config = config_for(root, "shared")
    learner = Learner(config, load_policy(config.model).model)
    store = ObjectStore.open(str(root / layout / "shared"))
    found = CheckpointStore(store).load(1)
    files = [vars(file) for file in found.files]
    learner.restore(store.url, 1, found.url, found.folder, files, found.state["steps"])
    iterate(learner, 1, 1)
    expected = weights(root / "1x1/shared", 2)
    moved = distance(expected, initial(root, "shared"))
    assert distance(learner.weights(), expected) <= TOLERANCES["shared"] * moved


@EACH
def test_a_published_version_does_not_tell_its_layout(root: Path, layout: str, scenario: str) -> None:
    alone = WeightStore(ObjectStore.open(str(root / "1x1" / scenario))).require(2)
    found = WeightStore(ObjectStore.open(str(root / layout / scenario))).require(2)
    assert found.table.tied == alone.table.tied
    assert {name: (entry.dtype, entry.shape) for name, entry in found.table.entries.items()} == {
        name: (entry.dtype, entry.shape) for name, entry in alone.table.entries.items()
    }


@EACH
def test_the_spread_model_was_checked_against_the_whole_one(root: Path, layout: str, scenario: str) -> None:
    difference = json.loads((root / layout / f"{scenario}.json").read_text())["self_check"]
    assert 0 <= difference < 1e-5


PA = [sys.executable, "-m", "pa_core.cli"]


def tree(model: Path, folder: Path, **changes: Any) -> dict[str, Any]:
    (folder / "own.py").write_text(
        "def vowels(response, answer, *, metadata):\n"
        "    return sum(c in 'aeiou' for c in response) / max(1, len(response))\n"
    )
    return {
        "run_name": "run",
        "iterations": 3,
        "prompts_per_iteration": 3,
        "group_size": 4,
        "model": {"path": str(model)},
        "data": {"name": "chain_sum", "options": {"size": 40, "max_digits": 1}},
        "rewards": [{"name": "vowels", "function": f"{folder / 'own.py'}:vowels"}],
        "sampling": {"max_tokens": 8},
        "optimizer": {"learning_rate": 1e-1, "eps": 1e-2},
        "trainer": {"device": "cpu", "threads": 1},
        "parallel": {"fsdp": 2, "timeout_s": 120},
        "engine": {"replicas": 1, "batch_groups": 1, "threads": 1},
        "evaluation": {"enabled": False},
        "store": {"url": str(folder / "runs"), "keep_versions": 9},
        "tracking": {"uri": f"sqlite:///{folder / 'mlflow.db'}"},
    } | changes


def command(folder: Path, config: dict[str, Any]) -> list[str]:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return [*PA, "train", str(path), "--json"]


def rollouts(run: ObjectStore, version: int) -> list[Group]:
    entry = Ledger(run).read(version)
    assert entry is not None
    return RolloutBuffer(run).stored(version, list(entry.group_ids))


def test_pa_train_on_two_processes_makes_the_versions_that_one_would(tiny_model: Path, tmp_path: Path) -> None:
    """From the rollouts that the run has kept, a single learner computes every version anew."""
    config = tree(tiny_model, tmp_path)
    result = subprocess.run(
        command(tmp_path, config), capture_output=True, text=True, timeout=240, check=False, env=environment()
    )
    assert result.returncode == 0, result.stderr[-4000:]
    summary = json.loads(result.stdout.strip().splitlines()[-1])
    assert (summary["iterations"], summary["groups"], summary["groups_lost"]) == (3, 9, 0)
    assert "training on 2 processes (fsdp 2 x tp 1), cpu" in result.stderr

    run = ObjectStore.open(str(tmp_path / "runs/run"))
    learner = Learner(parse_config(config | {"parallel": {}}), load_policy(parse_config(config).model).model)
    start = {name: tensor.clone() for name, tensor in learner.weights().items()}
    for version in range(3):
        learner.begin_iteration()
        learner.accumulate(rollouts(run, version))
        learner.step()
        learner.advance()
        found = WeightStore(run).load(version + 1)
        alone = learner.weights()
        assert distance(alone, start) > 0.01
        assert distance(found, alone) <= 1e-5 * distance(alone, start)
    assert_logged_model(tmp_path, summary, found)


def assert_logged_model(folder: Path, summary: dict[str, Any], expected: Weights) -> None:
    """The model in the MLflow run is the last version: no process had it whole while it was trained."""
    from mlflow import MlflowClient
    from transformers import AutoModelForCausalLM

    client = MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}")
    place = client.get_run(summary["mlflow_run_id"]).info.artifact_uri.removeprefix("file://")
    (config_file,) = Path(place).rglob("config.json")
    kept = AutoModelForCausalLM.from_pretrained(config_file.parent).state_dict()
    assert distance(kept, expected) == 0.0


def training_process(trainer: psutil.Process, number: int) -> psutil.Process:
    for child in trainer.children():
        if child.environ().get("RANK") == str(number):
            return child
    raise AssertionError(f"no training process {number} among {trainer.children()}")


def test_a_killed_process_ends_the_run_within_seconds_and_with_its_name(tiny_model: Path, tmp_path: Path) -> None:
    config = tree(tiny_model, tmp_path, iterations=500, checkpoint={"every": 0})
    trainer = subprocess.Popen(
        command(tmp_path, config), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    )
    progress = tmp_path / "runs/run/progress.json"
    deadline = time.monotonic() + 200
    while not (progress.exists() and json.loads(progress.read_text())["iteration"] >= 1):
        assert trainer.poll() is None, trainer.communicate()[1][-4000:]
        assert time.monotonic() < deadline
        time.sleep(0.1)
    family = psutil.Process(trainer.pid).children(recursive=True)
    training_process(psutil.Process(trainer.pid), 1).kill()
    stdout, stderr = trainer.communicate(timeout=60)
    assert trainer.returncode == 1
    answer = json.loads(stdout.strip().splitlines()[-1])
    assert answer["exit_code"] == 1
    assert "training process 1 ended (killed by SIGKILL)" in answer["error"]
    assert "rank1.log" in answer["error"]
    assert "training process 1 ended" in stderr
    assert "Traceback" not in stderr
    _, alive = psutil.wait_procs(family, timeout=20)
    assert alive == []
