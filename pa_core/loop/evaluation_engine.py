"""Replicas and rewards that evaluate versions of a run, apart from those that train it.

They meet in a temporary folder of their own: the run's trainer neither sees these replicas nor could send them work,
and of the run only published versions are read. Weights are loaded by the replicas alone; here is the tokenizer.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import aiohttp
import numpy as np
from numpy.typing import NDArray
from transformers import GenerationConfig, PreTrainedTokenizerBase

from pa_core.config import ModelConfig, TrainConfig
from pa_core.errors import DataError
from pa_core.loop import evaluation
from pa_core.loop.evaluation import Evaluation, Show
from pa_core.loop.producer import Producer
from pa_core.loop.run import RUN_KEY, Run
from pa_core.loop.services import load_held_out, require_engine, usable_context
from pa_core.model.loading import LoadedModel, eos_token_ids, load_structure, load_tokenizer, resolve_source
from pa_core.processes import usable_cores
from pa_core.rewards.pool import RewardPool
from pa_core.rollout.client import ReplicaClient
from pa_core.rollout.config import EngineConfig
from pa_core.rollout.connect import Connect, connect
from pa_core.rollout.pool import ReplicaPool
from pa_core.rollout.process import ReplicaSet, fair_threads
from pa_core.rollout.server import WEIGHTS_URL
from pa_core.store.objects import ObjectStore
from pa_core.store.rollouts import RolloutBuffer
from pa_core.tracking.timeline import Timeline


def engine_alone(config: TrainConfig) -> EngineConfig:
    """The run's engine with this machine's cores to itself."""
    engine = config.engine
    replicas = engine.replicas if engine.replicas or engine.urls else 1
    threads = engine.threads or max(1, usable_cores() // max(1, replicas))
    return engine.model_copy(update={"weight_transfer": "fsspec", "replicas": replicas, "threads": threads})


def engine_beside_training(config: TrainConfig) -> EngineConfig:
    """One more replica of the run's kind, with a fair share of the cores."""
    engine, devices = config.engine, config.evaluation.devices
    vllm = engine.vllm.model_copy(update={"devices": None if devices is None else [devices]})
    return engine.model_copy(
        update={
            "weight_transfer": "fsspec",
            "replicas": 1,
            "urls": [],
            "threads": engine.threads or fair_threads(engine.replicas + 1),
            "vllm": vllm,
        }
    )


class EvaluationEngine:
    """Evaluates versions that ``run`` has published. Entered, its replicas serve.

    Args:
        run: the run; its config says which problems, rewards and sampling.
        engine: the replicas to start.
        log_folder: local folder for their logs.

    Raises:
        ConfigError, DataError, ModelError, RewardSetupError: what the config asks for is not there.
        EngineError: the replicas do not come up.
    """

    def __init__(self, run: Run, engine: EngineConfig, log_folder: Path) -> None:
        self._run = run
        self._engine = engine
        self._log_folder = log_folder
        self.config = run.config.model_copy(update={"engine": engine})
        self._rewards = RewardPool(run.config.rewards, run.config.scoring)
        self._model = _without_weights(self.config.model)
        require_engine(self.config, self._model)
        context = usable_context(self.config, self._model)
        problems = load_held_out(self.config, self._model.tokenizer, context)
        self.problems = problems.held_out
        self.fingerprint = problems.fingerprint
        if not self.problems:
            raise DataError("evaluation: there are no held-out problems; set data.held_out or evaluation.data")
        self._exits = ExitStack()

    def __enter__(self) -> EvaluationEngine:
        with ExitStack() as exits:
            folder = exits.enter_context(_folder(self._run, self.config))
            replicas = exits.enter_context(ReplicaSet(folder.url, self._engine, self._log_folder))
            self._rewards.start()
            exits.callback(self._rewards.close)
            self._producer = self._new_producer(folder, replicas)
            exits.callback(self._producer.close)
            self._producer.start(self._engine.startup_timeout_s)
            self._exits = exits.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exits.close()

    def evaluate(self, version: int, show: Show = lambda done, total: None) -> Evaluation:
        """Load and evaluate a published version. Raises as :func:`pa_core.loop.evaluation.measure`."""
        return evaluation.measure(self.config, self._producer, version, self.problems, show)

    def _new_producer(self, folder: ObjectStore, replicas: ReplicaSet) -> Producer:
        pool = ReplicaPool(
            folder,
            replicas.ids,
            replicas.api_key,
            self._engine,
            replicas.processes,
            _connect_to(self._run.url),
            self._run.store,
        )
        return Producer(
            pool,
            self._rewards,
            RolloutBuffer(folder, 0),
            Timeline(),
            _decoder(self._model.tokenizer),
            seed=self.config.seed,
            stop_token_ids=self._model.eos_token_ids,
        )


@contextlib.contextmanager
def _folder(run: Run, config: TrainConfig) -> Iterator[ObjectStore]:
    """A temporary folder that is a run to the replicas, whose versions are those of ``run``."""
    with tempfile.TemporaryDirectory(prefix="pa-evaluation-", ignore_cleanup_errors=True) as path:
        store = ObjectStore.open(path)
        record = {"name": run.name, "config": config.model_dump(mode="json"), WEIGHTS_URL: run.url}
        store.publish(RUN_KEY, json.dumps(record).encode(), durable=False)
        yield store


def _connect_to(weights_url: str) -> Connect:
    """A connect whose replicas load the versions of the run at ``weights_url``."""

    def connect_replica(
        session: aiohttp.ClientSession, store_url: str, replica_id: str, engine: str, url: str, api_key: str
    ) -> ReplicaClient:
        return connect(session, weights_url, replica_id, engine, url, api_key)

    return connect_replica


def _decoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[NDArray[np.int32]], str]:
    return lambda token_ids: str(tokenizer.decode(token_ids, skip_special_tokens=True))


def _without_weights(config: ModelConfig) -> LoadedModel:
    """Structure, tokenizer and stop tokens of the model, as replicas have them; no weights are read."""
    structure, tokenizer, source = load_structure(config), load_tokenizer(config), resolve_source(config.path)
    with contextlib.suppress(OSError):  # a model without a generation config has what its config says
        structure.generation_config = GenerationConfig.from_pretrained(source)
    return LoadedModel(structure, tokenizer, source, "", eos_token_ids(structure, tokenizer))
