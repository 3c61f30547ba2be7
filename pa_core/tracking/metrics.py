"""What every logged metric means: written once, shown in the run's description, checked by a test."""

from __future__ import annotations

import re
from collections.abc import Iterable

GROUPS: dict[str, str] = {
    "reward": "what the policy earned on the training prompts",
    "eval": "held-out problems, never trained on",
    "train": "the update: loss, gradient, and how far the policy moved",
    "rollout": "what the responses look like",
    "policy": "which weights are in use",
    "perf": "where the time went, per iteration; times in seconds",
    "system": "the trainer's machine, sampled every 10 seconds (the step is the sample's number)",
}

METRICS: dict[str, str] = {
    "reward/mean": "mean total reward over the iteration's scored samples, those of replaced groups included: the "
    "curve to watch",
    "reward/std": "standard deviation of the total reward over the iteration's scored samples",
    "reward/zero_variance_groups": "groups whose scored samples all earned the same: they carry no gradient",
    "reward/unscored_share": "share of samples without a score (the reward raised, hung, or gave None or NaN)",
    "eval/accuracy": "mean of the evaluation metric over held-out problems, before the first and after the last "
    "iteration and every evaluation.every iterations between; the step is the policy version",
    "eval/ci95": "half the width of the 95 % interval of eval/accuracy",
    "eval/problems": "number of held-out problems",
    "eval/pass_at_1": "probability that one response is right (the metric reaches 1)",
    "eval/avg_at_k": "the same as eval/accuracy, by its name for k = evaluation.samples responses to each problem",
    "eval/maj_at_k": "share of problems whose most frequent answer among k responses is right; ties count in part",
    "eval/response_length": "mean length of the responses evaluated (tokens)",
    "eval/truncated_share": "share of them cut at sampling.max_tokens",
    "eval/unscored_share": "share of them without a score, which enter no other figure",
    "train/loss": "objective that was minimised; its level means little, since the advantages of a group cancel",
    "train/kl": "estimate (objective.kl.estimator) of the KL divergence from the reference model, mean over tokens "
    "(nats)",
    "train/entropy": "mean entropy of the policy over response tokens (nats); near 0 it no longer explores",
    "train/ratio": "mean probability ratio of the policy to the old policy; exactly 1 with one step per iteration",
    "train/clip_fraction": "share of tokens on which the ratio's clip acted",
    "train/grad_norm": "global gradient norm before clipping",
    "train/learning_rate": "learning rate of the step",
    "train/advantage_std": "standard deviation of the advantages",
    "train/logprob_mismatch_mean": "mean |log-probability by the replica - by the trainer| over tokens (nats); near "
    "0 when both compute the same policy",
    "train/logprob_mismatch_max": "largest such difference of the iteration",
    "train/correction_weight": "mean importance weight for that difference, after truncation or masking",
    "train/corrected_share": "share of tokens whose importance weight was truncated or masked",
    "rollout/response_length": "mean response length (tokens)",
    "rollout/truncated_share": "share of responses cut at sampling.max_tokens",
    "rollout/duplicate_share": "share of a group's responses that repeat another one of it exactly",
    "rollout/draws": "prompts drawn for the iteration: with dynamic sampling one more for each uninformative group",
    "rollout/uninformative_share": "share of the groups drawn whose advantages are all 0",
    "rollout/unfilled_groups": "groups that the iteration went without, because sampling.dynamic.max_draws was reached",
    "policy/version": "policy version after the iteration: the number of iterations trained",
    "policy/staleness_max": "largest (trainer version - version that sampled a token); 0 is on-policy",
    "perf/wall": "wall-clock time of the iteration",
    "perf/elapsed": "seconds that the run has been running, time between a stop and its resume left out",
    "perf/t_generate": "time in which a replica generated, mean over replicas",
    "perf/t_train": "time in which the trainer computed gradients or stepped",
    "perf/t_sync": "time to publish the new weights and load them on the first replica",
    "perf/idle_generate": "time a replica neither generated nor loaded: it waited for the trainer (or for slower "
    "replicas)",
    "perf/idle_train": "time the trainer neither worked, published, saved nor logged: it waited for replicas",
    "perf/overlap": "share of the shorter side's work done while the other side worked: 0 synchronous, 1 perfect",
    "perf/bound": "(t_generate + t_train + t_sync) / (max(t_generate, t_train) + t_sync): the largest speed-up over "
    "the synchronous schedule that these times allow",
    "perf/tokens": "response tokens that the iteration trained on",
    "perf/tokens_per_s": "perf/tokens / perf/wall",
    "perf/tokens_per_s_per_device": "perf/tokens_per_s / number of devices (GPUs, or this machine as one)",
}

FAMILIES: dict[str, tuple[re.Pattern[str], str]] = {
    "reward/NAME": (re.compile(r"reward/[^/]+"), "mean of one reward component, before its weight"),
    "eval/SET/…": (
        re.compile(r"eval/[^/]+/(accuracy|ci95|problems|(pass|avg|maj)_at_[1k]|\w+_share|response_length)"),
        "the same figures on another set of problems, by `pa eval`",
    ),
    "system/…": (re.compile(r"system/.+"), "processor, memory, disk, network and GPU use"),
}

_FORBIDDEN = re.compile(r"[^\w\-. :/]")


def metric_key(name: str) -> str:
    """``name`` with every character that MLflow refuses (``@``, ``%``, …) as ``_``."""
    return _FORBIDDEN.sub("_", name)


def check_documented(keys: Iterable[str]) -> None:
    """Raise ValueError that lists the keys which are neither in ``METRICS`` nor in one of ``FAMILIES``."""
    unknown = sorted(
        key
        for key in keys
        if key not in METRICS and not any(pattern.fullmatch(key) for pattern, _ in FAMILIES.values())
    )
    if unknown:
        raise ValueError(f"metrics without documentation in pa_core.tracking.metrics: {', '.join(unknown)}")


def glossary() -> str:
    """All metrics as Markdown tables, one per group."""
    lines: list[str] = []
    for group, meaning in GROUPS.items():
        entries = {name: text for name, text in METRICS.items() if name.startswith(f"{group}/")}
        entries |= {name: text for name, (_, text) in FAMILIES.items() if name.startswith(f"{group}/")}
        lines += [f"**{group}/** {meaning}", "", "| metric | meaning |", "|---|---|"]
        for name, text in entries.items():
            cell = text.replace("|", "\\|")
            lines.append(f"| `{name}` | {cell} |")
        lines.append("")
    return "\n".join(lines).rstrip()
