"""The figures of one iteration that come from its groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pa_core.loop.draws import Quota, informative
from pa_core.records import Group, Sample


def rollout_metrics(groups: Sequence[Group], quota: Quota) -> dict[str, float]:
    """Rewards, lengths and shares over an iteration's groups; unscored samples enter only their own share.

    Args:
        groups: all that were generated. Were the uninformative ones of dynamic sampling left out, the mean reward
            would be that of a selection: for a reward of 0 or 1 pulled towards 1/2, however well the policy does.
        quota: what the iteration asked for.
    """
    dull = sum(not informative(group) for group in groups)
    samples = [sample for group in groups for sample in group.samples]
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    lengths = [len(sample) for sample in samples]
    metrics = {
        "reward/unscored_share": 1 - len(rewards) / len(samples),
        "reward/zero_variance_groups": float(dull),
        "rollout/draws": float(len(groups)),
        "rollout/uninformative_share": dull / len(groups),
        "rollout/unfilled_groups": float(quota.groups - sum(quota.counts(group) for group in groups)),
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


def _duplicate_share(samples: Sequence[Sample]) -> float:
    """Share of a group's responses that repeat another one of it, token by token."""
    distinct = {sample.token_ids.tobytes() for sample in samples}
    return 1 - len(distinct) / len(samples)


def most_telling(trained: Sequence[Group], advantages: Mapping[str, Sequence[float]]) -> Group:
    """The group to look at more closely: the first of the prompt stream that taught something, else the first."""
    ordered = sorted(trained, key=lambda group: group.prompt.index)
    return next((group for group in ordered if any(advantages[group.id])), ordered[0])


def sample_rows(
    groups: Sequence[Group], advantages: Mapping[str, Sequence[float]], limit: int = 16
) -> list[dict[str, Any]]:
    """Rows of the table of sample rollouts: the first samples of as many groups as fit.

    Args:
        advantages: by id of the groups that were trained on; samples of others have none.
    """
    per_group = max(1, limit // max(1, len(groups)))
    rows = []
    for group in groups[:limit]:
        earned = advantages.get(group.id, [None] * len(group.samples))
        for sample, advantage in list(zip(group.samples, earned, strict=True))[:per_group]:
            rows.append(_row(group, sample, advantage))
    return rows[:limit]


def _row(group: Group, sample: Sample, advantage: float | None) -> dict[str, Any]:
    return {
        "version": group.version,
        "group": group.id,
        "prompt": group.prompt.text,
        "answer": group.prompt.answer,
        "response": sample.text,
        "reward": sample.reward,
        **{f"reward_{name}": value for name, value in sorted(sample.rewards.items())},
        "advantage": advantage,
        "unscored": sample.unscored,
        "tokens": len(sample),
        "logprob_mean": float(np.mean(sample.logprobs)) if len(sample) else None,
        "finish_reason": sample.finish_reason,
    }
