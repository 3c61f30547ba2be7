"""What a replica is asked and what it answers: token ids in, token ids and log-probabilities out.

Text never crosses this line, so nothing is tokenised twice. Imports neither torch nor aiohttp.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pa_core.errors import ConfigError, EngineError

API_KEY_VARIABLE = "PA_API_KEY"
"""Environment variable with a run's key; replicas answer nobody who does not present it."""


def required_key() -> str:
    """The run's key from the environment. Raises :class:`ConfigError` where there is none."""
    key = os.environ.get(API_KEY_VARIABLE, "")
    if not key:
        raise ConfigError(f"set {API_KEY_VARIABLE} to the run's key before serving a replica")
    return key


class VersionMismatch(EngineError):
    """A replica was asked for a policy version other than the one it has loaded."""


@dataclass(frozen=True)
class GenerateRequest:
    """One group to generate.

    Attributes:
        group_id: id of the prompt; part of the random stream.
        token_ids: the prompt, i32[Lp], Lp >= 1.
        samples: K, responses to draw.
        temperature: softmax temperature; 0 decodes greedily.
        max_tokens: longest response in tokens.
        seed: the run's seed; the random stream is that of ``(seed, version, group_id)``.
        version: the policy version that must generate every token.
        stop_token_ids: tokens that end a response, beside those that the replica knows by itself (vLLM knows none).
    """

    group_id: str
    token_ids: NDArray[np.int32]
    samples: int
    temperature: float
    max_tokens: int
    seed: int
    version: int
    stop_token_ids: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain tree for a JSON body."""
        return {**vars(self), "token_ids": self.token_ids.tolist()}

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> GenerateRequest:
        """Inverse of :meth:`to_json`. Raises :class:`EngineError` that names what is wrong with the request."""
        try:
            request = cls(
                group_id=str(tree["group_id"]),
                token_ids=np.asarray(tree["token_ids"], dtype=np.int32),
                samples=int(tree["samples"]),
                temperature=float(tree["temperature"]),
                max_tokens=int(tree["max_tokens"]),
                seed=int(tree["seed"]),
                version=int(tree["version"]),
                stop_token_ids=tuple(int(token) for token in tree.get("stop_token_ids", ())),
            )
        except KeyError as error:
            raise EngineError(f"generate request lacks {error}") from None
        except (TypeError, ValueError, OverflowError) as error:
            raise EngineError(f"generate request is malformed: {error}") from None
        request.check()
        return request

    def check(self) -> None:
        """Raise :class:`EngineError` naming the first value no engine could serve."""
        if self.token_ids.ndim != 1 or not len(self.token_ids):
            raise EngineError(f"group {self.group_id}: token_ids must be a non-empty list of token ids")
        for name in ("samples", "max_tokens"):
            if getattr(self, name) < 1:
                raise EngineError(f"group {self.group_id}: {name}={getattr(self, name)} must be at least 1")
        if not self.temperature >= 0:
            raise EngineError(f"group {self.group_id}: temperature={self.temperature} must be 0 (greedy) or more")


@dataclass(frozen=True)
class Generation:
    """One response.

    Attributes:
        token_ids: i32[L], a stop token included when one was sampled.
        logprobs: f32[L] in nats, of the distribution sampled from (temperature applied); greedy responses
            carry those at temperature 1.
        finish_reason: ``stop`` (a stop token is last) or ``length``.
        versions: spans ``(policy version, number of tokens)`` that cover all L tokens, as the engine reports them.
        routed_experts: experts that each token but the last took, i32[Lp + L - 1, layers, experts per token], from
            engines that report them.
        sampling_mask: per response token the ids that sampling could choose from, from engines that report them.
    """

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    finish_reason: str
    versions: tuple[tuple[int, int], ...]
    routed_experts: NDArray[np.int32] | None = None
    sampling_mask: tuple[NDArray[np.int32], ...] | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain tree, as the embedded server sends it; float32 values survive the trip through JSON exactly."""
        return {
            "token_ids": self.token_ids.tolist(),
            "logprobs": self.logprobs.tolist(),
            "finish_reason": self.finish_reason,
            "versions": self.versions,
        }

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> Generation:
        """Inverse of :meth:`to_json`."""
        return cls(
            token_ids=np.asarray(tree["token_ids"], dtype=np.int32),
            logprobs=np.asarray(tree["logprobs"], dtype=np.float32),
            finish_reason=str(tree["finish_reason"]),
            versions=tuple((int(version), int(tokens)) for version, tokens in tree["versions"]),
        )

    def check_versions(self, version: int) -> None:
        """Invariant 1 at the engine's door: raise :class:`VersionMismatch` unless ``version`` sampled every token."""
        covered = sum(tokens for _, tokens in self.versions)
        others = sorted({found for found, _ in self.versions if found != version})
        if others or covered != len(self.token_ids):
            raise VersionMismatch(
                f"{len(self.token_ids)} tokens asked of version {version} come with version spans {list(self.versions)}"
            )


@dataclass(frozen=True)
class GenerateResponse:
    """A finished group.

    Attributes:
        version: the policy version that sampled every token.
        generations: the K responses, in the order of their random streams.
        started_at: when the replica took the group up, seconds since the epoch.
        ended_at: when its last response ended, seconds since the epoch.
        replica: id of the replica.
    """

    group_id: str
    version: int
    generations: list[Generation]
    started_at: float
    ended_at: float
    replica: str

    def to_json(self) -> dict[str, Any]:
        """Plain tree for a JSON body."""
        return {**vars(self), "generations": [generation.to_json() for generation in self.generations]}

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> GenerateResponse:
        """Inverse of :meth:`to_json`. Raises :class:`EngineError` on an answer that is none."""
        try:
            return cls(
                group_id=str(tree["group_id"]),
                version=int(tree["version"]),
                generations=[Generation.from_json(generation) for generation in tree["generations"]],
                started_at=float(tree["started_at"]),
                ended_at=float(tree["ended_at"]),
                replica=str(tree["replica"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(f"a replica's answer is malformed: {type(error).__name__}: {error}") from None


class Engine(Protocol):
    """What a replica's server drives. All methods may be called from any thread."""

    @property
    def version(self) -> int | None:
        """The loaded policy version; None before the first load, while loading and after a failed load."""

    def submit(self, request: GenerateRequest) -> Future[GenerateResponse]:
        """Queue a group. A cancelled future is dropped. Raises :class:`VersionMismatch`, :class:`EngineError`."""

    def load(self, version: int) -> str:
        """Wait until nothing is in flight, load in place, return the digest of the weights. Raises UserError."""

    def close(self) -> None:
        """Fail what is queued and end the engine's threads."""
