"""An iteration's gradient depends neither on the order in which groups finish nor on micro-batches.

The truth is synchronous GRPO written out from its formula over Hugging Face's own per-sample forward, in float64.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_truth import VOCABULARY, tiny_model
from torch import Tensor
from transformers import PreTrainedModel

from pa_core.config import ObjectiveConfig
from pa_core.model.packing import Attention, TrainGroup, train_group
from pa_core.model.tri_model import TriModel
from pa_core.objective.advantages import group_advantages
from pa_core.objective.conventions import PRESETS
from pa_core.objective.losses import denominator, needs_forward, policy_loss
from pa_core.records import Group, Prompt, Sample

MAX_TOKENS = 9
TEMPERATURE = 0.8
NORMALIZATIONS = ("token", "sequence", "constant")


def _group(name: str, rewards: list[float | None], seed: int) -> Group:
    generator = np.random.default_rng(seed)
    prompt = generator.integers(0, VOCABULARY, generator.integers(1, 14), dtype=np.int32)
    samples = []
    for reward in rewards:
        length = int(generator.integers(0, MAX_TOKENS + 1))
        ids = generator.integers(0, VOCABULARY, length, dtype=np.int32)
        mask = (generator.random(length) < 0.85).astype(np.uint8)
        samples.append(Sample(ids, np.zeros(length, np.float32), [(0, length)], mask, "stop", reward=reward))
    return Group(Prompt(name, 0, "", prompt, ""), samples, 0, "replica")


@functools.cache
def _models() -> tuple[PreTrainedModel, PreTrainedModel]:
    """The same random model to train and, in float64, as the truth.

    Its weights are small: with larger ones, float32 rounding of the forward pass alone exceeds 1e-6.
    """
    return tiny_model("qwen3", scale=0.05), tiny_model("qwen3", scale=0.05).double()


def _flat(model: PreTrainedModel) -> Tensor:
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return torch.cat([grad.flatten().double() for grad in grads])


def _truth(groups: list[Group], normalization: str, beta: float) -> Tensor:
    """Gradient of synchronous GRPO: one loss over all groups, every formula written out."""
    model = _models()[1]
    model.zero_grad()
    terms: list[Tensor] = []
    tokens = samples = 0
    for group in groups:
        scored = [sample for sample in group.samples if sample.reward is not None]
        if len(scored) < 2:
            continue
        rewards = np.array([sample.reward for sample in scored], dtype=np.float64)
        for sample, reward in zip(scored, rewards, strict=True):
            samples += 1
            advantage = (reward - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
            positions = np.flatnonzero(sample.loss_mask)
            tokens += len(positions)
            if not len(positions):
                continue
            ids = torch.tensor([*group.prompt.token_ids.tolist(), *sample.token_ids.tolist()])
            logits = model(input_ids=ids.unsqueeze(0), use_cache=False).logits[0] / TEMPERATURE
            rows = torch.from_numpy(positions) + len(group.prompt.token_ids) - 1
            logprobs = logits.log_softmax(-1)[rows].gather(1, ids[rows + 1].unsqueeze(1)).squeeze(1)
            # Old policy and reference are the policy itself, hence the ratio is 1 and k3 has value and gradient 0.
            losses = -torch.exp(logprobs - logprobs.detach()) * advantage
            if beta:
                delta = logprobs.detach() - logprobs
                losses = losses + beta * (delta.exp() - delta - 1)
            terms.append(losses.mean() if normalization == "sequence" else losses.sum())
    if not terms:
        return torch.zeros_like(_flat(model))
    total = torch.stack(terms).sum()
    if normalization == "constant":
        total = total / MAX_TOKENS
    (total / (tokens if normalization == "token" else samples)).backward()
    return _flat(model)


@dataclass(frozen=True)
class Arrival:
    """How an iteration reaches the trainer: groups in this order, cut into deliveries, each packed to the budget."""

    order: list[int]
    cuts: list[int]
    budget: int
    attention: Attention


def _streamed(groups: list[Group], arrival: Arrival, config: ObjectiveConfig) -> Tensor:
    """The gradient as a trainer accumulates it: sums over micro-batches, divided once."""
    model = _models()[0]
    model.zero_grad()
    tri = TriModel(model, arrival.attention, with_reference=config.beta > 0, self_check=False)
    total = 0.0
    bounds = [0, *sorted(arrival.cuts), len(groups)]
    for first, last in itertools.pairwise(bounds):
        delivered: list[TrainGroup] = []
        for position in arrival.order[first:last]:
            group = groups[position]
            rewards = torch.tensor([math.nan if s.reward is None else s.reward for s in group.samples])
            advantages = group_advantages(rewards, PRESETS["verl"])
            if not advantages.trainable:
                continue
            trained = train_group(group, advantages.values)
            if needs_forward(advantages.values, config):
                delivered.append(trained)
            else:
                total += denominator(config.loss_normalization, samples=len(trained.samples), tokens=trained.tokens)
        for batch in tri.micro_batches(delivered, arrival.budget):
            out = tri.logprobs(batch, TEMPERATURE)
            part = policy_loss(batch, out, config, MAX_TOKENS)
            part.loss.backward()
            total += part.denominator
    return _flat(model) / total if total else _flat(model)


REWARDS = st.one_of(st.none(), st.sampled_from([0.0, 0.1, 0.3, 1.0]))
GROUPS = st.lists(
    st.one_of(
        st.lists(REWARDS, min_size=4, max_size=4),  # some unscored
        st.just([0.3, 0.3, 0.3, 0.3]),  # zero variance
        st.just([None, None, None, 1.0]),  # too few scored
        st.just([None, None, None, None]),  # failed
    ),
    min_size=1,
    max_size=6,
)


@st.composite
def iterations(draw: st.DrawFn) -> tuple[list[Group], Arrival]:
    rewards = draw(GROUPS)
    seed = draw(st.integers(0, 1000))
    groups = [_group(f"g{number}", row, seed + number) for number, row in enumerate(rewards)]
    arrival = Arrival(
        order=draw(st.permutations(range(len(groups)))),
        cuts=draw(st.lists(st.integers(0, len(groups)), max_size=4)),
        budget=draw(st.sampled_from([1, 20, 45, 10_000])),
        attention=draw(st.sampled_from(["shared_prompt", "per_sample"])),
    )
    return groups, arrival


@settings(deadline=None, max_examples=40)
@given(iterations(), st.sampled_from(NORMALIZATIONS), st.sampled_from([0.0, 0.05]))
def test_any_order_and_any_split_give_the_synchronous_gradient(
    iteration: tuple[list[Group], Arrival], normalization: str, beta: float
) -> None:
    groups, arrival = iteration
    config = ObjectiveConfig(loss_normalization=normalization, beta=beta)
    truth, ours = _truth(groups, normalization, beta), _streamed(groups, arrival, config)
    assert float((ours - truth).norm()) <= 1e-6 * float(truth.norm())


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_zero_variance_groups_weigh_in_the_denominator_and_failed_ones_do_not(normalization: str) -> None:
    alone = [_group("a", [0.0, 1.0, 1.0], 1)]
    arrival = Arrival([0, 1], [], 100, "shared_prompt")
    config = ObjectiveConfig(loss_normalization=normalization)
    base = _streamed(alone, Arrival([0], [], 100, "shared_prompt"), config)
    flat, failed = _group("b", [1.0, 1.0, 1.0], 2), _group("c", [None, None, 1.0], 3)
    kind = "tokens" if normalization == "token" else "samples"
    weights = {"samples": (3, 6)}
    mask_sums = [sum(int(s.loss_mask.sum()) for s in g.samples) for g in (alone[0], flat)]
    weights["tokens"] = (mask_sums[0], sum(mask_sums))
    torch.testing.assert_close(
        _streamed([*alone, flat], arrival, config), base * weights[kind][0] / weights[kind][1], rtol=1e-6, atol=1e-12
    )
    torch.testing.assert_close(_streamed([*alone, failed], arrival, config), base, rtol=1e-6, atol=1e-12)
