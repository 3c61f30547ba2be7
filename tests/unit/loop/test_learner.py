"""The update of an iteration: the same whatever order the groups come in, and what a checkpoint brings back."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch

from pa_core.config import ModelConfig, OptimizerConfig, TrainConfig
from pa_core.config_files import parse_config
from pa_core.errors import TrainingError
from pa_core.loop.learner import Learner, learning_rate_factor
from pa_core.model.loading import load_policy
from pa_core.records import Group, Prompt, Sample
from pa_core.store.objects import ObjectStore
from pa_core.store.weights import WeightStore

VOCABULARY = 200


def make_groups(count: int, version: int = 0) -> list[Group]:
    """Random groups of four samples; one has an unscored sample, one a single scored one, one no variance."""
    random = np.random.default_rng(version)
    groups = []
    for index in range(count):
        prompt_ids = random.integers(5, VOCABULARY, random.integers(3, 9)).astype(np.int32)
        samples = []
        for _ in range(4):
            length = int(random.integers(1, 7))
            samples.append(
                Sample(
                    token_ids=random.integers(5, VOCABULARY, length).astype(np.int32),
                    logprobs=np.full(length, -5.0, dtype=np.float32),
                    versions=[(version, length)],
                    loss_mask=np.ones(length, dtype=np.uint8),
                    finish_reason="stop",
                    reward=float(random.random()),
                )
            )
        prompt = Prompt(f"p{version * count + index:08d}", index, "q", prompt_ids, "a")
        groups.append(Group(prompt, samples, version, "r0"))
    groups[0].samples[1].reward = None
    for sample in groups[1].samples[1:]:
        sample.reward = None
    for sample in groups[2].samples:
        sample.reward = 0.5
    return groups


def config_for(tiny_model: Path, **changes: object) -> TrainConfig:
    tree: dict[str, object] = {
        "iterations": 10,
        "prompts_per_iteration": 6,
        "group_size": 4,
        "model": {"path": str(tiny_model)},
        "data": {"name": "chain_sum"},
        "optimizer": {"learning_rate": 1e-3},
        **changes,
    }
    return parse_config(tree)


def learner_for(config: TrainConfig) -> Learner:
    return Learner(config, load_policy(ModelConfig(path=config.model.path)).model)


def iterate(learner: Learner, portions: list[list[Group]]) -> None:
    learner.begin_iteration()
    for groups in portions:
        learner.accumulate(groups)
    learner.step()
    learner.advance()


def largest_difference(left: Learner, right: Learner) -> float:
    return max(float((left.weights()[name] - value).abs().max()) for name, value in right.weights().items())


@pytest.mark.parametrize("normalization", ["token", "sequence", "constant"])
def test_streamed_groups_in_another_order_give_the_synchronous_weights(tiny_model: Path, normalization: str) -> None:
    # Adam divides by the gradient's own size; a larger eps keeps it from blowing rounding of tiny gradients up.
    config = config_for(
        tiny_model,
        objective={"loss_normalization": normalization, "beta": 0.05},
        optimizer={"learning_rate": 1e-1, "eps": 1e-2},
    )
    sync, streamed = learner_for(config), learner_for(config)
    before = learner_for(config)
    for version in range(2):
        groups = make_groups(6, version)
        iterate(sync, [groups])
        iterate(streamed, [[groups[index]] for index in (4, 0, 5, 2, 1, 3)])
    moved = largest_difference(sync, before)
    assert moved > 1e-3
    assert largest_difference(sync, streamed) < 1e-5 * moved


def test_one_step_per_iteration_has_ratio_exactly_one(tiny_model: Path) -> None:
    learner = learner_for(config_for(tiny_model))
    learner.begin_iteration()
    learner.accumulate(make_groups(6))
    assert learner.metrics()["train/ratio"] == 1.0


def test_a_second_step_of_an_iteration_is_measured_against_the_snapshot(tiny_model: Path) -> None:
    config = config_for(tiny_model, optimizer={"learning_rate": 1e-2, "steps_per_iteration": 2})
    learner = learner_for(config)
    groups = make_groups(6)
    learner.begin_iteration()
    learner.accumulate(groups[:3])
    learner.step()
    assert learner.torn
    learner.accumulate(groups[3:])
    assert learner.metrics()["train/ratio"] != 1.0


def test_an_iteration_without_any_gradient_leaves_the_weights_alone(tiny_model: Path) -> None:
    config = config_for(tiny_model)
    learner, before = learner_for(config), learner_for(config)
    iterate(learner, [[make_groups(3)[2]]])
    assert learner.version == 1
    assert "train/ratio" not in learner.metrics()
    assert largest_difference(learner, before) == 0.0


def test_a_restored_learner_continues_bit_for_bit(tiny_model: Path, tmp_path: Path) -> None:
    config = config_for(tiny_model, optimizer={"learning_rate": 1e-3, "decay": "linear"})
    unbroken = learner_for(config)
    iterate(unbroken, [make_groups(6, 0)])
    WeightStore(ObjectStore.open(str(tmp_path))).publish(1, unbroken.weights())
    files = unbroken.save_optimizer(str(tmp_path), "optimizer")

    resumed = learner_for(config)
    resumed.restore(str(tmp_path), 1, str(tmp_path), "optimizer", [asdict(file) for file in files], unbroken.steps)
    for learner in (unbroken, resumed):
        iterate(learner, [make_groups(6, 1)])
    assert resumed.version == unbroken.version == 2
    assert largest_difference(resumed, unbroken) == 0.0


def test_the_learning_rate_warms_up_and_decays() -> None:
    config = OptimizerConfig(learning_rate=1.0, warmup_iterations=4, decay="linear")
    factors = [learning_rate_factor(config, 12, step) for step in range(13)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0]
    assert factors[4:] == pytest.approx([1 - step / 8 for step in range(9)])
    cosine = OptimizerConfig(learning_rate=1.0, decay="cosine")
    assert learning_rate_factor(cosine, 8, 4) == pytest.approx(0.5)


def test_a_gradient_that_is_not_finite_stops_the_run(tiny_model: Path) -> None:
    learner = learner_for(config_for(tiny_model))
    with torch.no_grad():
        next(learner.tri.policy.parameters()).fill_(float("inf"))
    learner.begin_iteration()
    learner.accumulate(make_groups(6))
    with pytest.raises(TrainingError, match="gradient of version 0 has norm"):
        learner.step()
