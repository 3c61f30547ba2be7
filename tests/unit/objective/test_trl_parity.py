"""Advantages, losses and gradients agree with those that TRL's trainers gave on the same batch.

``trl_recording.json`` holds the batch and TRL's results; ``record_trl.py`` made it.
"""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from token_batch import TokenBatch
from torch import Tensor

from pa_core.config import ObjectiveConfig
from pa_core.loop.penalties import without_truncated
from pa_core.model.packing import pack, train_group
from pa_core.objective.advantages import batch_advantages
from pa_core.objective.conventions import resolve_advantage
from pa_core.objective.kl import kl_estimate
from pa_core.objective.losses import policy_loss
from pa_core.records import Group, Prompt, Sample

RECORDING: dict[str, Any] = json.loads(Path(__file__).with_name("trl_recording.json").read_text())
INPUTS = RECORDING["inputs"]

# Our keys for what TRL calls each case; the settings of TRL are in record_trl.py.
OURS: dict[str, dict[str, Any]] = {
    "grpo": {"loss_normalization": "sequence"},
    "bnpo": {},
    "dapo": {"clip_high": 0.28},
    "dr_grpo": {"advantage": "dr_grpo", "loss_normalization": "constant"},
    "batch_std": {"advantage": {"preset": "trl", "std": "batch_rewards"}},
    "two_sided": {"loss_normalization": "sequence", "clip_dual": 1.5},
    "gspo": {"loss": "gspo"},
    "gspo_token_mean": {"loss": "gspo", "loss_normalization": "token", "clip_low": 0.1, "clip_high": 0.1},
    "cispo": {"loss": "cispo", "clip_high": 0.4},
    "sequence_sum": {"loss_normalization": "sequence_sum"},
    "kl": {"loss_normalization": "sequence", "beta": 0.1},
    "kl_dr_grpo": {"loss_normalization": "constant", "beta": 0.1},
    "kl_weighted": {"beta": 0.1, "kl": {"weighted": True}},
    "entropy": {"entropy_coefficient": 0.05},
    "truncated": {"mask_truncated": True},
    "truncated_grpo": {"loss_normalization": "sequence", "mask_truncated": True},
    "token_truncate": {"correction": {"kind": "truncate", "cap": 1.3}},
    "token_mask": {"loss_normalization": "sequence", "beta": 0.1, "correction": {"kind": "mask", "cap": 1.3}},
    "sequence_truncate": {"correction": {"kind": "truncate", "level": "sequence", "cap": 1.3}},
    "sequence_mask": {
        "loss_normalization": "sequence",
        "correction": {"kind": "mask", "level": "sequence", "cap": 1.3},
    },
}


def _groups() -> list[Group]:
    samples = [
        Sample(
            token_ids=np.arange(len(mask), dtype=np.int32),
            logprobs=np.array(engine[: len(mask)], dtype=np.float32),
            versions=[(0, len(mask))],
            loss_mask=np.array(mask, dtype=np.uint8),
            finish_reason="length" if number in INPUTS["truncated"] else "stop",
            reward=reward,
        )
        for number, (mask, engine, reward) in enumerate(
            zip(INPUTS["loss_mask"], INPUTS["engine"], INPUTS["rewards"], strict=True)
        )
    ]
    size = INPUTS["group_size"]
    prompt = np.array([2, 3], dtype=np.int32)
    return [
        Group(Prompt(f"g{start}", start, "", prompt, ""), samples[start : start + size], 0, "replica")
        for start in range(0, len(samples), size)
    ]


def _trained(groups: list[Group]) -> Tensor:
    """Which places of the recording's [samples, longest] tables are trained tokens."""
    mask = torch.zeros(len(INPUTS["rewards"]), INPUTS["max_completion_length"], dtype=torch.bool)
    for row, sample in enumerate(sample for group in groups for sample in group.samples):
        mask[row, : len(sample)] = torch.from_numpy(sample.loss_mask.astype(bool))
    return mask


@pytest.mark.parametrize("case", RECORDING["grpo_trainer"])
def test_the_loss_and_its_gradient_are_those_of_trl(case: str) -> None:
    truth = RECORDING["grpo_trainer"][case]
    config = ObjectiveConfig(**({"advantage": "trl"} | OURS[case]))
    groups = _groups()
    rewards = [torch.tensor([sample.reward for sample in group.samples]) for group in groups]
    advantages = [each.values for each in batch_advantages(rewards, resolve_advantage(config.advantage))]
    torch.testing.assert_close(torch.cat(advantages), torch.tensor(truth["advantages"]), rtol=1e-6, atol=1e-7)

    if config.mask_truncated:
        groups = [without_truncated(group) for group in groups]
    packed = pack([train_group(*pair) for pair in zip(groups, advantages, strict=True)], "per_sample")
    trained = _trained(groups)
    table = {
        name: torch.tensor(INPUTS[name], dtype=torch.float64) for name in ("policy", "old", "reference", "entropy")
    }
    policy = table["policy"].requires_grad_()
    batch = TokenBatch(
        **{name: values[trained] for name, values in table.items()},
        advantages=packed.advantages,
        engine_logprobs=packed.engine_logprobs,
        sample_index=packed.sample_index,
        sample_tokens=packed.sample_tokens,
    )
    sums = policy_loss(batch, batch, config, INPUTS["max_completion_length"])
    loss = sums.loss / sums.denominator
    (gradient,) = torch.autograd.grad(loss, policy)
    expected = torch.tensor(truth["gradient"], dtype=torch.float64)
    assert loss.item() == pytest.approx(truth["loss"], rel=1e-6)
    assert float((gradient - expected).norm()) <= 1e-6 * float(expected.norm())


def test_every_recorded_case_differs_from_the_others() -> None:
    losses = sorted(case["loss"] for case in RECORDING["grpo_trainer"].values())
    assert all(not math.isclose(a, b, rel_tol=1e-4) for a, b in itertools.pairwise(losses))


@pytest.mark.parametrize(("case", "beta"), [("rloo", 0.0), ("rloo_kl", 0.05)])
def test_leave_one_out_advantages_and_kl_in_the_reward_are_those_of_trl(case: str, beta: float) -> None:
    lengths = torch.tensor([len(mask) for mask in INPUTS["loss_mask"]]).unsqueeze(1)
    mine = torch.arange(INPUTS["max_completion_length"]) < lengths
    old, reference = (torch.tensor(INPUTS[name], dtype=torch.float64) for name in ("old", "reference"))
    kl = (kl_estimate(old, reference, "k1") * mine).sum(1)
    rewards = torch.tensor(INPUTS["rewards"]) - beta * kl
    convention = resolve_advantage(ObjectiveConfig(advantage="rloo").advantage)
    groups = batch_advantages(list(rewards.split(INPUTS["group_size"])), convention)
    truth = torch.tensor(RECORDING["rloo_trainer"][case]["advantages"], dtype=torch.float32)
    torch.testing.assert_close(torch.cat([group.values for group in groups]), truth, rtol=1e-5, atol=1e-6)
