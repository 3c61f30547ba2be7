"""The rooms of a run, opened together and closed together: what trainer and evaluation stand on."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from pa_core.config import TrainConfig
from pa_core.data.prompts import PromptSet, load_prompts, without
from pa_core.errors import ConfigError, DataError
from pa_core.loop.producer import Producer
from pa_core.loop.run import Run
from pa_core.model.exactness import carried_state
from pa_core.model.fixed_point import deterministic_kernels
from pa_core.model.loading import LoadedModel, context_limit, load_policy
from pa_core.model.parallel import training_device
from pa_core.rewards.pool import RewardPool
from pa_core.rollout.config import EngineConfig
from pa_core.rollout.connect import connect
from pa_core.rollout.fabric import FabricTransfer
from pa_core.rollout.pool import ReplicaPool
from pa_core.rollout.process import ReplicaSet, trainer_threads
from pa_core.rollout.protocol import API_KEY_VARIABLE
from pa_core.store.rollouts import RolloutBuffer
from pa_core.store.weights import WeightStore
from pa_core.tracking.exporter import Live, ReplicaNow, RunMetrics
from pa_core.tracking.timeline import Span, Timeline

WAVES = 4
"""Times that the prompts of an iteration are sent out, so that there is something to train on while others generate."""


def load_problems(config: TrainConfig, tokenizer: PreTrainedTokenizerBase, context_limit: int) -> PromptSet:
    """Training problems and, beside them, the held-out ones that evaluation uses; no problem is in both.

    Raises:
        DataError: as :func:`pa_core.data.prompts.load_prompts`.
    """
    if config.evaluation.data is None:
        return load_held_out(config, tokenizer, context_limit)
    problems = load_prompts(config.data, tokenizer, config.seed, context_limit, config.sampling.max_tokens)
    held_out = load_held_out(config, tokenizer, context_limit).held_out
    train = without(problems.train, held_out)
    if not train:
        raise DataError("evaluation.data asks every training problem too, which leaves none to train on; change one")
    return replace(problems, train=train, held_out=held_out)


def load_held_out(config: TrainConfig, tokenizer: PreTrainedTokenizerBase, context_limit: int) -> PromptSet:
    """The problems that evaluation uses, as ``held_out`` of their source: ``evaluation.data`` or a part of ``data``.

    Raises:
        DataError: as :func:`pa_core.data.prompts.load_prompts`.
    """
    source = config.evaluation.data or config.data
    problems = load_prompts(source, tokenizer, config.seed, context_limit, config.sampling.max_tokens)
    whole = config.evaluation.data is not None and not problems.held_out
    held_out = problems.train if whole else problems.held_out
    return replace(problems, held_out=held_out[: config.evaluation.limit])


def usable_context(config: TrainConfig, model: LoadedModel) -> int:
    """Tokens that both trainer and replicas can attend to."""
    served = config.engine.vllm.max_model_len if config.engine.kind == "vllm" else None
    trained = context_limit(model.model.config)
    return trained if served is None else min(trained, served)


def require_engine(config: TrainConfig, model: LoadedModel) -> None:
    """Raise :class:`ConfigError` when the configured engine cannot generate with ``model``."""
    state = carried_state(model.model)
    if config.engine.kind == "embedded" and state is not None:
        raise ConfigError(
            f"engine.kind=embedded repeats a prompt's keys and values for its K samples, and {state} carries state "
            "from token to token instead; set engine.kind=vllm"
        )


def in_waves(config: TrainConfig) -> EngineConfig:
    """The engine's settings with its concurrency decided, where the config leaves that open.

    vLLM decodes everything in flight together, so all groups would finish at about the same time, and the trainer
    would have nothing to do before. On a streaming schedule an iteration therefore goes out in four waves.
    """
    engine = config.engine
    if engine.kind != "vllm" or engine.concurrency is not None or not config.schedule.stream:
        return engine
    replicas = max(1, engine.replicas + len(engine.urls))
    groups = max(2, math.ceil(config.prompts_per_iteration / (WAVES * replicas)))
    return engine.model_copy(update={"concurrency": groups})


def describing_files(model: LoadedModel) -> dict[str, bytes]:
    """Configuration and tokenizer, published beside the weights, so that a version explains itself."""
    with tempfile.TemporaryDirectory(prefix="pa-describe-") as folder:
        model.model.config.save_pretrained(folder)
        if model.model.generation_config is not None:
            model.model.generation_config.save_pretrained(folder)
        model.tokenizer.save_pretrained(folder)
        return {file.name: file.read_bytes() for file in Path(folder).iterdir() if file.is_file()}


def replica_set(run: Run) -> ReplicaSet:
    """The run's replica processes, not yet started."""
    return ReplicaSet(run.url, run.config.engine, run.log_folder)


class Services:
    """Model, data, store, replicas and rewards of one run.

    Args:
        run: a prepared run.
        replicas: the replica processes, where this program started them; otherwise ``PA_API_KEY`` holds their key.

    Attributes:
        fabric: sends weights where trainer and replicas share a fabric; otherwise the store hands them over.
        patience_s: seconds the trainer waits for the next group before it gives up; the producer's own deadlines
            come first and say more.
    """

    def __init__(self, run: Run, replicas: ReplicaSet | None) -> None:
        config = run.config
        torch.set_num_threads(trainer_threads(config))
        torch.manual_seed(config.seed)
        if config.deterministic:
            deterministic_kernels()
        self.run = run
        self.patience_s = 2 * config.engine.request_timeout_s + 120
        self.rewards = RewardPool(config.rewards, config.scoring)  # first: a mistyped name should not cost a model
        self.model = load_policy(config.model)
        require_engine(config, self.model)
        self.model_files = describing_files(self.model)
        self.problems = load_problems(config, self.model.tokenizer, usable_context(config, self.model))
        self.weights = WeightStore(run.store)
        self.buffer = RolloutBuffer(run.store, config.schedule.max_staleness)
        self.timeline = Timeline()
        self.metrics = RunMetrics(run.name, config, self.live)
        self.timeline.on_span = self.metrics.span
        fabric = config.engine.weight_transfer != "fsspec"
        self.fabric = None
        if fabric:  # what is sent is the model that is trained, on its device
            policy = self.model.model.to(training_device(config.trainer.device))
            self.fabric = FabricTransfer(config.engine, policy)
        self._expected = [f"r{index}" for index in range(config.engine.replicas)]
        self._pool = ReplicaPool(
            run.store,
            self._expected,
            replicas.api_key if replicas else _key_from_environment(),
            in_waves(config),
            replicas.processes if replicas else None,
            partial(connect, fabric=self.fabric),
        )
        self.producer = Producer(
            self._pool,
            self.rewards,
            self.buffer,
            self.timeline,
            self._decode,
            seed=config.seed,
            stop_token_ids=self.model.eos_token_ids,
            longest_first=config.engine.longest_first,
        )

    def __enter__(self) -> Services:
        self.rewards.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.producer.close()
        if self.fabric is not None:
            self.fabric.close()
        self.rewards.close()

    def live(self) -> Live:
        """What the metrics show of the pipeline right now. May be called from any thread."""
        pool, producer, buffer = self._pool, self.producer, self.buffer
        queued, scoring, loaded = pool.queued, producer.scoring, pool.versions
        return Live(
            open_groups={
                "queued": queued,
                "generating": max(0, producer.in_flight - queued - scoring),
                "scoring": scoring,
                "buffered": buffer.waiting,
            },
            groups={"scored": buffer.accepted, "duplicated": buffer.duplicates, "stale": buffer.stale},
            tokens_generated=producer.tokens,
            restarts=pool.restarts,
            retries=pool.retries,
            hedges=pool.hedged,
            hedges_won=pool.hedges_won,
            replicas={name: self._replica_now(name) for name in {*pool.expected, *loaded, *pool.dead}},
        )

    def _replica_now(self, name: str) -> ReplicaNow:
        record = self._pool.records.get(name)
        return ReplicaNow(
            ready=self._pool.versions.get(name) is not None,
            in_flight=self._pool.in_flight.get(name, 0),
            url=None if record is None else record.url,
            engine="" if record is None else record.engine,
        )

    def replicas(self, spans: Iterable[Span]) -> list[str]:
        """The replicas that serve now and those that worked in ``spans``: they come and go."""
        worked = {span.lane for span in spans if span.name in ("generate", "load")}
        return sorted(worked | set(self._pool.versions)) or self._expected

    def _decode(self, token_ids: NDArray[np.int32]) -> str:
        return str(self.model.tokenizer.decode(token_ids, skip_special_tokens=True))


def _key_from_environment() -> str:
    key = os.environ.get(API_KEY_VARIABLE)
    if not key:
        raise ConfigError(f"{API_KEY_VARIABLE} is not set: it must hold the key the replicas were started with")
    return key
