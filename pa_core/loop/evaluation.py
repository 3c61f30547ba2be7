"""Held-out accuracy of one published version."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pa_core.config import TrainConfig
from pa_core.config_files import load_config
from pa_core.errors import ConfigError, DataError, RewardError
from pa_core.loop.producer import Producer
from pa_core.loop.run import Run, open_run, prepare_run
from pa_core.loop.signals import StopSignals
from pa_core.records import Group, Prompt


@dataclass(frozen=True)
class Accuracy:
    """Mean of the evaluation metric over problems, with half the width of its 95 % interval."""

    version: int
    value: float
    ci95: float
    problems: int
    unscored: int


def measure(config: TrainConfig, producer: Producer, version: int, prompts: Sequence[Prompt]) -> Accuracy:
    """Generate, score and average: first over a problem's samples, then over problems.

    Raises:
        RewardError: when no sample could be scored.
    """
    settings = config.evaluation
    groups = producer.evaluate(
        version,
        prompts,
        temperature=settings.temperature,
        max_tokens=config.sampling.max_tokens,
        samples=settings.samples,
        timeout_s=config.engine.request_timeout_s * max(1, len(prompts)),
    )
    return accuracy(groups, config.evaluation_metric, version)


def accuracy(groups: Sequence[Group], metric: str, version: int) -> Accuracy:
    """Mean of reward ``metric`` over groups; samples without a score are left out and counted."""
    means = []
    unscored = 0
    for group in groups:
        values = [sample.rewards[metric] for sample in group.samples if metric in sample.rewards]
        unscored += len(group.samples) - len(values)
        if values:
            means.append(sum(values) / len(values))
    if not means:
        raise RewardError(f"evaluation: reward {metric!r} scored none of {len(groups)} problems")
    mean = sum(means) / len(means)
    variance = sum((value - mean) ** 2 for value in means) / max(1, len(means) - 1)
    return Accuracy(version, mean, 1.96 * math.sqrt(variance / len(means)), len(means), unscored)


def evaluate_target(target: str, overrides: list[str], version: int | None) -> dict[str, Any]:
    """What ``pa eval`` does: replicas up, one version loaded, accuracy out.

    Args:
        target: URL or folder of a run, or a YAML config whose untrained model is meant.
        version: published version; default the latest.
    """
    from pa_core.loop.services import Services, replica_set

    run, version = _find(target, overrides, version)
    with StopSignals(), replica_set(run) as replicas, Services(run, replicas) as services:
        held_out = services.problems.held_out
        if not held_out:
            raise DataError("evaluation: there are no held-out problems; set data.held_out or evaluation.data")
        if services.weights.manifest(version) is None:
            services.weights.publish(version, services.model.model.state_dict(), services.model_files)
        services.producer.start(run.config.engine.startup_timeout_s)
        found = measure(run.config, services.producer, version, held_out)
    return {"run_url": run.url, "metric": run.config.evaluation_metric, "accuracy": found.value, **vars(found)}


def _find(target: str, overrides: list[str], version: int | None) -> tuple[Run, int]:
    """The run to evaluate and the version meant; a config becomes a run of its own at version 0."""
    from pa_core.store.weights import WeightStore

    if target.endswith((".yaml", ".yml")):
        return prepare_run(load_config(target, overrides), f"eval-{Path(target).stem}"), 0
    run = open_run(target, overrides)
    weights = WeightStore(run.store)
    chosen = weights.latest() if version is None else version
    if chosen is None or weights.manifest(chosen) is None:
        raise ConfigError(f"{run.url}: version {chosen} is not published (latest: {weights.latest()})")
    return run, chosen
