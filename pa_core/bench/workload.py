"""One training step over a group of K responses to one prompt: forward, GRPO loss, backward."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from pa_core.model.packing import Attention, TrainGroup, TrainSample, pack
from pa_core.model.tri_model import TriModel
from pa_core.objective.config import ObjectiveConfig
from pa_core.objective.losses import policy_loss


class Recorded:
    """A recorded group: prompt i32[Lp], responses i32[K, Lr] and rewards f64[K], random and seeded."""

    def __init__(self, vocabulary: int, group_size: int, prompt_len: int, response_len: int, seed: int = 0) -> None:
        generator = np.random.default_rng(seed)
        self.prompt: NDArray[np.int32] = generator.integers(0, vocabulary, prompt_len, dtype=np.int32)
        self.responses: NDArray[np.int32] = generator.integers(
            0, vocabulary, (group_size, response_len), dtype=np.int32
        )
        self.rewards: NDArray[np.float64] = generator.normal(size=group_size)

    def train_group(self) -> TrainGroup:
        """The group with the advantages that TRL gives it: unbiased standard deviation, 1e-4 added."""
        advantages = (self.rewards - self.rewards.mean()) / (self.rewards.std(ddof=1) + 1e-4)
        length = self.responses.shape[1]
        samples = tuple(
            TrainSample(tokens, np.zeros(length, np.float32), np.ones(length, np.bool_), float(advantage))
            for tokens, advantage in zip(self.responses, advantages, strict=True)
        )
        return TrainGroup("bench", self.prompt, samples)


def parts_of(group: TrainGroup, size: int) -> list[TrainGroup]:
    """The group in parts of ``size`` samples, each to be a micro-batch."""
    return [replace(group, samples=group.samples[start : start + size]) for start in range(0, len(group.samples), size)]


def synchronize(device: torch.device) -> None:
    """Wait for what the device still computes; a CPU has nothing outstanding."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Step:
    """The training step of one attention over one model.

    Attributes:
        tokens: trained tokens of the last step: its denominator.
    """

    def __init__(self, model: PreTrainedModel, attention: Attention) -> None:
        self._tri = TriModel(model, attention, self_check=False)
        self._attention: Attention = attention
        self.model = model
        self.tokens = 0

    def run(self, parts: Sequence[TrainGroup]) -> float:
        """Seconds of forward, loss and backward over ``parts``; gradients replace those of the step before."""
        self.model.zero_grad(set_to_none=True)
        self.tokens = sum(part.tokens for part in parts)
        synchronize(self.model.device)
        started = time.perf_counter()
        for part in parts:
            self._micro_step(part)
        synchronize(self.model.device)
        return time.perf_counter() - started

    def _micro_step(self, part: TrainGroup) -> None:
        batch = pack([part], self._attention).to(self.model.device)
        policy_loss(batch, self._tri.logprobs(batch, 1.0), ObjectiveConfig(), part.tokens).loss.backward()
