"""Learners in several layouts, trained on the same made-up rollouts: ``torchrun --nproc-per-node 4 … FOLDER``.

``FOLDER/llama`` and ``FOLDER/qwen3`` are models; ``FOLDER/<fsdp>x<tp>`` gets what tests compare.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from pa_core.config import TrainConfig
from pa_core.config_files import parse_config
from pa_core.loop.joining import join, take_part
from pa_core.loop.learner import Learner
from pa_core.loop.ranks import Ranks
from pa_core.model.loading import load_policy
from pa_core.model.parallel import Layout
from pa_core.records import Group, Prompt, Sample
from pa_core.store.checkpoints import CheckpointStore
from pa_core.store.objects import ObjectStore
from pa_core.store.weights import WeightStore

SCENARIOS: dict[str, dict[str, Any]] = {
    # With so large an eps AdamW's step is nearly linear in the gradient, so that an error is seen as large as it is.
    "shared": {"optimizer": {"learning_rate": 1e-1, "eps": 1e-2, "weight_decay": 0.01, "max_grad_norm": 0.05}},
    "per_sample": {
        "model": {"path": "qwen3", "attention": "per_sample"},
        "optimizer": {"learning_rate": 1e-1, "eps": 1e-2},
        "objective": {"loss_normalization": "sequence"},
    },
    "kl": {
        "optimizer": {"learning_rate": 1e-3, "steps_per_iteration": 2},
        "objective": {"beta": 0.1, "entropy_coefficient": 0.01},
        "trainer": {"activation_checkpointing": True},
    },
}


LAYOUTS = {"2x2": ("shared", "per_sample", "kl"), "2x1": ("shared",), "1x2": ("shared", "per_sample")}
"""Scenarios by layout, fsdp x tp. Each of them shows something that the others do not; more would show it again."""


def config_for(root: Path, scenario: str, fsdp: int = 1, tp: int = 1) -> TrainConfig:
    """The config of a scenario; models are below ``root``."""
    tree: dict[str, Any] = {
        "iterations": 10,
        "prompts_per_iteration": 4,
        "group_size": 5,
        "model": {},
        "data": {"name": "chain_sum"},
        "trainer": {},
        "parallel": {"fsdp": fsdp, "tp": tp, "timeout_s": 60},
        **SCENARIOS[scenario],
    }
    tree["model"] = {"path": "llama", **tree["model"]}
    tree["model"]["path"] = str(root / tree["model"]["path"])
    tree["trainer"] = {"micro_batch_tokens": 64, "device": "cpu", **tree["trainer"]}
    return parse_config(tree)


def rollouts(version: int) -> list[Group]:
    """Four ragged groups of an iteration; one is above the token budget, one has no variance, one sample no reward."""
    random = np.random.default_rng(version)
    groups = []
    for index in range(4):
        prompt_ids = random.integers(5, 200, 30 if index == 3 else random.integers(3, 9)).astype(np.int32)
        samples = []
        for number in range(5):
            length = int(random.integers(0 if number else 1, 9))
            samples.append(
                Sample(
                    token_ids=random.integers(5, 200, length).astype(np.int32),
                    logprobs=np.full(length, -5.0, dtype=np.float32),
                    versions=[(version, length)],
                    loss_mask=np.ones(length, dtype=np.uint8),
                    finish_reason="stop",
                    reward=float(random.random()),
                )
            )
        prompt = Prompt(f"p{version * 4 + index:08d}", index, "q", prompt_ids, "a")
        groups.append(Group(prompt, samples, version, "r0"))
    groups[0].samples[1].reward = None
    for sample in groups[2].samples:
        sample.reward = 0.5
    return groups


def iterate(learner: Learner, version: int, steps: int) -> dict[str, float]:
    """One iteration, its groups arriving alone and together."""
    groups = rollouts(version)
    learner.begin_iteration()
    for step in range(steps):
        part = groups[step * len(groups) // steps : (step + 1) * len(groups) // steps]
        while part:
            learner.accumulate(part[: 1 + len(part) % 4])
            part = part[1 + len(part) % 4 :]
        learner.step()
    learner.advance()
    return learner.metrics()


def train(config: TrainConfig, learner: Learner, folder: Path, name: str, previous: Path) -> None:
    """Two iterations with a checkpoint between them, and the second one again, resumed from another layout's."""
    store = ObjectStore.open(str(folder / name))
    steps = config.optimizer.steps_per_iteration
    weights = WeightStore(store)
    metrics = [iterate(learner, 0, steps)]
    weights.publish(1, learner.whole_weights())
    CheckpointStore(store).save(1, learner.save_optimizer, {"steps": learner.steps})
    metrics.append(iterate(learner, 1, steps))
    weights.publish(2, learner.whole_weights())
    other = ObjectStore.open(str(previous / name))
    found = CheckpointStore(other).load(1)
    files = [asdict(file) for file in found.files]
    learner.restore(other.url, 1, found.url, found.folder, files, found.state["steps"])
    metrics.append(iterate(learner, 1, steps))
    weights.publish(3, learner.whole_weights())
    facts = {"metrics": metrics, "self_check": learner.tri.self_check_difference}
    (folder / f"{name}.json").write_text(json.dumps(facts))


def train_in(layout: Layout | None, root: Path, previous: str, fsdp: int = 1, tp: int = 1) -> None:
    """Train a layout's scenarios; None: all of them in a single process."""
    folder = root / f"{fsdp}x{tp}"
    folder.mkdir(parents=True, exist_ok=True)
    for name in LAYOUTS.get(folder.name, SCENARIOS):
        config = config_for(root, name, fsdp, tp)
        ranks = None if layout is None else Ranks(config.parallel.timeout_s)
        if layout is not None and ranks is not None and not ranks.leads:
            take_part(config, layout, ranks)
            continue
        train(config, Learner(config, load_policy(config.model).model, layout, ranks), folder, name, root / previous)
        if ranks is not None:
            ranks.close()


def main(root: Path) -> None:
    """Four processes: first fsdp 2 x tp 2 with all of them, then fsdp 2 with two of them and tp 2 with the others."""
    torch.set_num_threads(1)
    store, number, _ = next(dist.rendezvous("env://"))
    pairs = [(2, 1, number), (1, 2, number - 2)][number // 2]
    for (fsdp, tp, own), previous in (((2, 2, number), "1x1"), (pairs, "2x2")):
        layout = join(config_for(root, "shared", fsdp, tp), dist.PrefixStore(f"{fsdp}x{tp}", store), own)
        train_in(layout, root, previous, fsdp, tp)
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
