"""The rooms of a run, opened together and closed together: what trainer and evaluation stand on."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import torch

from pa_core.config import TrainConfig
from pa_core.data.prompts import PromptSet, load_prompts
from pa_core.errors import ConfigError
from pa_core.loop.producer import Producer
from pa_core.loop.run import Run
from pa_core.model.loading import LoadedModel, load_policy
from pa_core.rewards.pool import RewardPool
from pa_core.rollout.pool import ReplicaPool
from pa_core.rollout.process import ReplicaSet, fair_threads
from pa_core.rollout.protocol import API_KEY_VARIABLE
from pa_core.store.rollouts import RolloutBuffer
from pa_core.store.weights import Manifest, WeightStore
from pa_core.tracking.timeline import Timeline


def load_problems(config: TrainConfig, tokenizer: object, context_limit: int) -> PromptSet:
    """Training problems and, beside them, the held-out ones that evaluation uses.

    Raises:
        DataError: as :func:`pa_core.data.prompts.load_prompts`.
    """
    problems = load_prompts(config.data, tokenizer, config.seed, context_limit, config.sampling.max_tokens)
    if config.evaluation.data is None:
        held_out = problems.held_out
    else:
        other = load_prompts(
            config.evaluation.data, tokenizer, config.seed, context_limit, config.sampling.max_tokens
        )
        held_out = other.held_out or other.train
    return problems.with_held_out(held_out[: config.evaluation.limit])


def log_folder(run: Run) -> Path:
    """Local folder for the logs of the run's replicas: in the run's folder where that is local."""
    if "://" not in run.url or run.url.startswith("file://"):
        return Path(run.url.removeprefix("file://")) / "logs"
    return Path(tempfile.gettempdir()) / "periodic-asynchrony" / run.name


def replica_set(run: Run) -> ReplicaSet:
    """The run's replica processes, not yet started."""
    return ReplicaSet(run.url, run.config.engine, log_folder(run))


class Services:
    """Model, data, store, replicas and rewards of one run.

    Args:
        run: a prepared run.
        replicas: the replica processes, where this program started them; otherwise ``PA_API_KEY`` holds their key.
    """

    def __init__(self, run: Run, replicas: ReplicaSet | None) -> None:
        config = run.config
        torch.set_num_threads(config.trainer.threads or fair_threads(config.engine.replicas))
        torch.manual_seed(config.seed)
        self.run = run
        self.model: LoadedModel = load_policy(config.model)
        tokenizer = self.model.tokenizer
        self.problems = load_problems(config, tokenizer, self.model.context_limit)
        self.weights = WeightStore(run.store)
        self.buffer = RolloutBuffer(run.store, config.schedule.max_staleness)
        self.rewards = RewardPool(config.rewards, config.scoring)
        self.timeline = Timeline()
        self.replica_ids = [f"r{index}" for index in range(config.engine.replicas)]
        pool = ReplicaPool(
            run.store,
            self.replica_ids,
            replicas.api_key if replicas else _key_from_environment(),
            config.engine,
            replicas.processes if replicas else None,
        )
        self.producer = Producer(
            pool, self.rewards, self.buffer, self.timeline, _decoder(tokenizer), config.seed
        )

    def __enter__(self) -> Services:
        self.rewards.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.producer.close()
        self.rewards.close()

    def publish(self, version: int, tensors: Mapping[str, torch.Tensor]) -> Manifest:
        """Make ``version`` visible to the replicas: weights, model configuration and tokenizer."""
        return self.weights.publish(version, tensors, self.model.files())


def _key_from_environment() -> str:
    key = os.environ.get(API_KEY_VARIABLE)
    if not key:
        raise ConfigError(f"{API_KEY_VARIABLE} is not set: it must hold the key the replicas were started with")
    return key


def _decoder(tokenizer: object):  # noqa: ANN202
    def decode(token_ids: object) -> str:
        return tokenizer.decode(token_ids, skip_special_tokens=True)

    return decode
