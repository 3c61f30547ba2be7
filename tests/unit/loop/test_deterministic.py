"""``deterministic: true``: the update is bitwise the same in whatever order and portions groups come."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from test_learner import config_for, iterate, largest_difference, learner_for, make_groups

from pa_core.config import ScheduleConfig
from pa_core.errors import ConfigError, TrainingError
from pa_core.loop.draws import Quota
from pa_core.loop.learner import Learner
from pa_core.records import Group
from pa_core.store.objects import ObjectStore
from pa_core.verify import shuffled, train

VARIANTS: dict[str, dict[str, Any]] = {
    "token": {},
    "sequence, KL, entropy": {
        "objective": {"loss_normalization": "sequence", "beta": 0.05, "entropy_coefficient": 0.01}
    },
    "lora": {"lora": {"rank": 4, "target_modules": ["q_proj", "v_proj"]}},
    "split groups": {"trainer": {"micro_batch_tokens": 12}},
    "bfloat16": {"model": {"dtype": "bfloat16"}},
}


def _learner(tiny_model: Path, changes: dict[str, Any]) -> Learner:
    model = {"path": str(tiny_model), "dtype": "float32"} | changes.get("model", {})
    config = config_for(tiny_model, **changes | {"model": model, "deterministic": True})
    learner = learner_for(config)
    learner.tri.policy.to(getattr(torch, config.model.dtype))
    return learner


def _in_pieces(groups: list[Group], seed: int) -> list[list[Group]]:
    """Shuffled, in portions of one to three."""
    arrival = random.Random(seed)
    waiting = arrival.sample(groups, len(groups))
    portions = []
    while waiting:
        size = arrival.randint(1, 3)
        portions.append(waiting[:size])
        waiting = waiting[size:]
    return portions


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_order_and_every_portioning_gives_bitwise_the_same_weights(tiny_model: Path, variant: str) -> None:
    sync, *others = (_learner(tiny_model, VARIANTS[variant]) for _ in range(3))
    for version in range(2):
        groups = make_groups(6, version)
        iterate(sync, [groups])
        for seed, other in enumerate(others):
            iterate(other, _in_pieces(groups, seed))
    assert sync.metrics()["train/grad_norm"] > 0
    for other in others:
        for name, weight in sync.weights().items():
            assert torch.equal(weight, other.weights()[name]), name


def test_several_steps_per_iteration_are_bitwise_the_same_too(tiny_model: Path) -> None:
    changes = {"optimizer": {"learning_rate": 1e-3, "steps_per_iteration": 2}}
    left, right = _learner(tiny_model, changes), _learner(tiny_model, changes)
    groups = make_groups(6)
    for learner, seed in ((left, 1), (right, 2)):
        learner.begin_iteration()
        for half in (groups[:3], groups[3:]):
            for portion in _in_pieces(half, seed):
                learner.accumulate(portion)
            learner.step()
        learner.advance()
    assert largest_difference(left, right) == 0.0


def test_the_update_is_the_ordinary_one_up_to_rounding(tiny_model: Path) -> None:
    # A large eps, so that Adam does not blow rounding of tiny gradients up.
    settings = {"learning_rate": 1e-1, "eps": 1e-2}
    ordinary = learner_for(config_for(tiny_model, optimizer=settings))
    deterministic, before = (_learner(tiny_model, {"optimizer": settings}) for _ in range(2))
    for learner in (ordinary, deterministic):
        iterate(learner, [make_groups(6)])
    moved = largest_difference(deterministic, before)
    assert moved > 1e-3
    assert largest_difference(ordinary, deterministic) < 1e-5 * moved


def test_a_gradient_beyond_the_range_names_its_group_and_leaves_the_weights(tiny_model: Path) -> None:
    changes = {"objective": {"advantage": "dr_grpo"}}
    learner, before = _learner(tiny_model, changes), _learner(tiny_model, changes)
    groups = make_groups(6)
    groups[4].samples[0].reward = 1e30
    learner.begin_iteration()
    with pytest.raises(TrainingError, match=f"group {groups[4].id}: its gradient of .* reaches .*huge values"):
        learner.accumulate(groups)
    assert largest_difference(learner, before) == 0.0


def test_replayed_dynamic_sampling_draws_in_the_order_of_causes_and_ends_alike(
    tiny_model: Path, tmp_path: Path
) -> None:
    # Of these eight groups two are uninformative, so that the last two were drawn because of them.
    groups = make_groups(8)
    config = config_for(tiny_model, deterministic=True, sampling={"dynamic": {"max_draws": 2}})
    quota = Quota.of(config)
    for seed in range(20):
        order = [group for portion in shuffled(groups, quota, random.Random(seed)) for group in portion]
        assert sorted(group.id for group in order) == [group.id for group in groups]
        for place, group in enumerate(order):
            causes = sum(not quota.counts(earlier) for earlier in order[:place])
            assert group.prompt.index < config.prompts_per_iteration + causes
    final = {}
    for stream in (True, False):
        scheduled = config.model_copy(update={"schedule": ScheduleConfig(stream=stream)})
        *_, last = train(scheduled, [groups], ObjectStore.open(str(tmp_path / str(stream))))
        final[stream] = last
    for name, weight in final[True].items():
        assert torch.equal(weight, final[False][name]), name


@pytest.mark.parametrize("parallel", [{"fsdp": 2}, {"tp": 2}])
def test_several_processes_are_refused_with_key_and_fix(tiny_model: Path, parallel: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"parallel\.fsdp=.*Set deterministic=false, or remove the parallel section"):
        config_for(tiny_model, deterministic=True, parallel=parallel)
