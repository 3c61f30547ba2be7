"""The figures of one iteration that come from its groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pa_core.records import Group, Sample


def rollout_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Rewards, lengths and shares over an iteration's groups; unscored samples enter only their own share."""
    samples = [sample for group in groups for sample in group.samples]
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    lengths = [len(sample) for sample in samples]
    metrics = {
        "reward/unscored_share": 1 - len(rewards) / len(samples),
        "reward/zero_variance_groups": float(sum(_zero_variance(group) for group in groups)),
        "rollout/response_length": float(np.mean(lengths)),
        "rollout/truncated_share": float(np.mean([sample.finish_reason == "length" for sample in samples])),
        "rollout/duplicate_share": float(np.mean([_duplicate_share(group.samples) for group in groups])),
    }
    if rewards:
        metrics["reward/mean"] = float(np.mean(rewards))
        metrics["reward/std"] = float(np.std(rewards))
        for name in sorted({name for sample in samples for name in sample.rewards}):
            values = [sample.rewards[name] for sample in samples if name in sample.rewards]
            metrics[f"reward/{name}"] = float(np.mean(values))
    return metrics


def _zero_variance(group: Group) -> bool:
    rewards = {sample.reward for sample in group.scored}
    return len(rewards) <= 1


def _duplicate_share(samples: Sequence[Sample]) -> float:
    """Share of a group's responses that repeat another one of it, token by token."""
    distinct = {sample.token_ids.tobytes() for sample in samples}
    return 1 - len(distinct) / len(samples)


def sample_rows(groups: Sequence[Group], version: int, limit: int = 16) -> list[dict[str, Any]]:
    """Rows of the table of sample rollouts: the first samples of as many groups as fit."""
    per_group = max(1, limit // max(1, len(groups)))
    return [
        {
            "version": version,
            "prompt": group.prompt.text,
            "answer": group.prompt.answer,
            "response": sample.text,
            "reward": sample.reward,
            **{f"reward_{name}": value for name, value in sorted(sample.rewards.items())},
            "unscored": sample.unscored,
            "tokens": len(sample),
            "finish_reason": sample.finish_reason,
        }
        for group in groups
        for sample in group.samples[:per_group]
    ][:limit]
