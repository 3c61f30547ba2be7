"""The contracts that travel: Prompt, Sample, Group. Imports neither torch, Prefect nor MLflow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Prompt:
    """One problem, ready to be sent to a replica.

    Attributes:
        id: name made of letters, digits and ``-`` only; equal for equal positions of the stream.
        index: position in the endless prompt stream, from 0.
        text: the problem as the data set has it.
        token_ids: the chat-templated prompt, i32[Lp].
        answer: the gold answer, never part of ``token_ids``.
        metadata: what the data set knows besides; passed to reward functions.
    """

    id: str
    index: int
    text: str
    token_ids: NDArray[np.int32]
    answer: str
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Sample:
    """One response of a prompt. Token in, token out: text is never re-tokenised.

    Attributes:
        token_ids: i32[L], the end-of-sequence token included when one was sampled.
        logprobs: f32[L], log-probabilities (nats) of the distribution that was sampled from.
        versions: spans ``(policy version, number of tokens)`` that cover all L tokens.
        loss_mask: u1[L], 1 where the policy chose the token, 0 for tool and environment tokens.
        finish_reason: ``stop`` or ``length``.
        text: the decoded response, for rewards and people.
        reward: weighted total, or None when the sample is unscored.
        rewards: each component by name; an unscored component is absent.
        unscored: why there is no score: ``error``, ``timeout``, ``none``, ``nan``, with the reward's name.
        routed_experts: experts that each token but the last took, i32[Lp + L - 1, layers, experts per token], from
            engines that report them.
        sampling_mask: per response token the ids that sampling could choose from, from engines that report them.
    """

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: list[tuple[int, int]]
    loss_mask: NDArray[np.uint8]
    finish_reason: str
    text: str = ""
    reward: float | None = None
    rewards: dict[str, float] = field(default_factory=dict)
    unscored: str | None = None
    routed_experts: NDArray[np.int32] | None = None
    sampling_mask: tuple[NDArray[np.int32], ...] | None = None

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass
class Group:
    """A prompt with its K samples: the unit that travels, is stored, consumed and accounted.

    Attributes:
        version: the policy version that every token was sampled by.
        replica: id of the replica that generated it.
        generated_at: start and end of generation on the replica, seconds since the epoch.
    """

    prompt: Prompt
    samples: list[Sample]
    version: int
    replica: str
    generated_at: tuple[float, float] = (0.0, 0.0)

    @property
    def id(self) -> str:
        """Name of the group within its iteration."""
        return self.prompt.id

    @property
    def scored(self) -> list[Sample]:
        """Samples that have a reward; only these enter statistics and gradient."""
        return [sample for sample in self.samples if sample.reward is not None]
