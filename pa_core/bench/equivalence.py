"""``pa bench equivalence``: the same rollouts trained on twice, synchronously and as they might have streamed in."""

from __future__ import annotations

import random
from typing import Any

import torch

from pa_core.errors import StoreError
from pa_core.loop.learner import Learner
from pa_core.loop.run import Run, open_run
from pa_core.model.loading import load_policy
from pa_core.records import Group
from pa_core.store.ledger import Ledger
from pa_core.store.rollouts import RolloutBuffer


def run(run_url: str, iterations: int) -> dict[str, Any]:
    """Repeat a run's first ``iterations`` from its initial model with both schedules and compare the weights.

    Synchronously, an iteration's groups come all at once and in prompt order. Periodically, they come in a shuffled
    order and in random portions, which also makes other micro-batches.

    Raises:
        StoreError: the run has not kept so many iterations.
    """
    source = open_run(run_url)
    rollouts = [_rollouts(source, version) for version in range(iterations)]
    sync = Learner(source.config, load_policy(source.config.model).model)
    initial = {name: tensor.clone() for name, tensor in sync.weights().items()}
    periodic = Learner(source.config, load_policy(source.config.model).model)
    arrival = random.Random(source.config.seed)
    rows = []
    for version, groups in enumerate(rollouts):
        _iterate(sync, [groups])
        _iterate(periodic, _portions(groups, arrival))
        rows.append({"version": version + 1, **_compare(sync, periodic, initial)})
    return {"run_url": source.url, "iterations": rows, "largest_difference": rows[-1]["largest_difference"]}


def _rollouts(source: Run, version: int) -> list[Group]:
    entry = Ledger(source.store).read(version)
    groups = RolloutBuffer(source.store).stored(version, entry.group_ids) if entry is not None else []
    if entry is None or len(groups) < len(entry.group_ids):
        raise StoreError(f"{source.url} has no complete iteration {version}; ask for fewer --iterations")
    return groups


def _portions(groups: list[Group], arrival: random.Random) -> list[list[Group]]:
    """``groups`` shuffled and cut into portions of one to three."""
    waiting = arrival.sample(groups, len(groups))
    portions = []
    while waiting:
        size = arrival.randint(1, 3)
        portions.append(waiting[:size])
        waiting = waiting[size:]
    return portions


def _iterate(learner: Learner, portions: list[list[Group]]) -> None:
    learner.begin_iteration()
    for groups in portions:
        learner.accumulate(groups)
    learner.step()
    learner.advance()


def _compare(sync: Learner, periodic: Learner, initial: dict[str, torch.Tensor]) -> dict[str, float]:
    """Largest absolute weight difference, beside how far training has moved any weight."""
    left, right = sync.weights(), periodic.weights()
    difference = max(float((left[name] - right[name]).abs().max()) for name in left)
    moved = max(float((left[name] - initial[name]).abs().max()) for name in left)
    return {"largest_difference": difference, "largest_movement": moved}


def render(result: dict[str, Any]) -> str:
    """One line per iteration."""
    lines = ["version   largest difference sync/periodic   largest movement by training"]
    for row in result["iterations"]:
        lines.append(f"{row['version']:>7}{row['largest_difference']:>33.3e}{row['largest_movement']:>31.3e}")
    return "\n".join(lines)
