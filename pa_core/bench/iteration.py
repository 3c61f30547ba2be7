"""``pa bench iteration``: whole iterations (generate, score, train) by ``pa train`` and by TRL's GRPOTrainer.

Same model, prompts, rewards, learning rate, iteration size and cores; each in the best of its settings that are tried.
Counted are completion tokens, end-of-sequence included, over wall time from the end of the first iteration to the end
of the last, so that start-up and warm-up are left out on both sides.

Ours runs as people run it, as a process with its replica; the settings tried are the engines, each as shipped and with
every group computed. ``pa train`` skips groups whose rewards are all alike, since their gradient is exactly zero, and
TRL never does: the first figure is what people get, the second compares the same work. TRL's settings are
transformers' ``generate`` and its continuous batching, each with the training micro-batch that is fastest, found by
trial on recorded groups of the same shape. TRL's vLLM modes are not among them: their weight transfer wants an
accelerator.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pa_core.bench.peers import PEERS, peer_versions, peers_python
from pa_core.bench.side import Side
from pa_core.bench.workload import Recorded
from pa_core.config import TrainConfig
from pa_core.config_files import load_config
from pa_core.data.prompts import load_prompts
from pa_core.data.stream import PromptStream
from pa_core.errors import ConfigError, UserError
from pa_core.model.loading import context_of, load_tokenizer, resolve_source

log = logging.getLogger(__name__)

#: What both sides have in common, over the config that is named.
_COMMON = (
    "schedule.stream=true",
    "evaluation.enabled=false",
    "checkpoint.every=0",
    "tracking.log_model=false",
    "objective.beta=0",
    "optimizer.learning_rate=1e-7",
    "optimizer.warmup_iterations=0",
    "optimizer.decay=constant",
)
# With an entropy term, however small, no group is skipped.
_EVERY_GROUP = "objective.entropy_coefficient=1e-6"
_TRL_SETTINGS = {"generate": False, "continuous_batching": True}
_LIMIT_S = 7200.0


@dataclass(frozen=True)
class Rate:
    """Completion tokens of every iteration, and when it ended (s)."""

    tokens: list[float]
    ends: list[float]

    @property
    def tokens_per_s(self) -> float:
        """Tokens over time, the first iteration left out."""
        return sum(self.tokens[1:]) / (self.ends[-1] - self.ends[0])

    def facts(self) -> dict[str, Any]:
        """As JSON values."""
        return {"tokens_per_s": self.tokens_per_s, "tokens": self.tokens, "ends": self.ends}


def run(
    config_path: Path,
    overrides: list[str],
    *,
    engines: Sequence[str],
    iterations: int,
    prompts: int,
    samples: int,
    max_tokens: int,
    threads: int,
) -> dict[str, Any]:
    """Measure all settings of both sides.

    Args:
        config_path: a config of reasoning-gym arithmetic rewarded by :mod:`pa_core.rewards.arithmetic`.
        overrides: for our side, after those above.
        engines: settings of ours to try: embedded, vllm.
        threads: cores that TRL's process uses; ours has the same machine.

    Raises:
        ConfigError: the peers' environment is missing, or the config is not of that kind.
        UserError: no setting of a side ran.
    """
    if iterations < 2:
        raise ConfigError(f"--iterations {iterations}: the first one is left out, so at least 2 are needed")
    versions = peer_versions()
    sizes = (f"iterations={iterations}", f"prompts_per_iteration={prompts}", f"group_size={samples}")
    given = [*_COMMON, *sizes, f"sampling.max_tokens={max_tokens}", *overrides]
    config = load_config(config_path, given)
    trl = _trl(config, iterations=iterations, threads=threads)
    ours, every = (
        {
            engine: _attempt(f"ours, {engine}{how}", partial(_ours, config_path, [*given, *more], engine))
            for engine in engines
        }
        for how, more in (("", []), (", every group", [_EVERY_GROUP]))
    )
    sides = {"ours": ours, "every_group": every, "trl": trl}
    best = {side: _best(side, settings) for side, settings in sides.items()}
    rates = {side: settings[best[side]]["tokens_per_s"] for side, settings in sides.items()}
    return {
        "config": str(config_path),
        "overrides": overrides,
        "iterations": iterations,
        "prompts": prompts,
        "samples": samples,
        "max_tokens": max_tokens,
        "cores": threads,
        "versions": versions,
        **sides,
        "best": best,
        "tokens_per_s": rates,
        "ratio": rates["ours"] / rates["trl"],
        "ratio_every_group": rates["every_group"] / rates["trl"],
    }


def _best(name: str, settings: dict[str, dict[str, Any]]) -> str:
    rates = {setting: facts["tokens_per_s"] for setting, facts in settings.items() if "tokens_per_s" in facts}
    if not rates:
        reasons = "; ".join(f"{setting}: {facts['failed']}" for setting, facts in settings.items())
        raise UserError(f"{name}: no setting ran ({reasons})")
    return max(rates, key=rates.__getitem__)


def _attempt(name: str, measure: Callable[[], Rate]) -> dict[str, Any]:
    """Facts of a setting, or why it did not run: one that this machine cannot run must not cost the others."""
    try:
        facts = measure().facts()
    except UserError as error:
        log.warning("%s did not run: %s", name, error)
        return {"failed": str(error).strip()[-300:]}
    log.info("%s: %.1f tokens/s", name, facts["tokens_per_s"])
    return facts


def _ours(config_path: Path, given: list[str], engine: str) -> Rate:
    """``pa train`` as a process, its figures read from its MLflow run."""
    from mlflow import MlflowClient

    with tempfile.TemporaryDirectory(prefix="pa-bench-iteration-") as folder:
        uri = f"sqlite:///{folder}/mlflow.db"
        places = [f"store.url={folder}/runs", f"tracking.uri={uri}", f"engine.kind={engine}"]
        command = [sys.executable, "-m", "pa_core.cli", "train", str(config_path), *given, *places, "--json"]
        # The libraries of the trainer and its replicas are told their threads by the config.
        environment = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, env=environment)
        except subprocess.TimeoutExpired:
            raise UserError(f"pa train with engine.kind={engine} took more than {_LIMIT_S:.0f} s") from None
        if done.returncode:
            raise UserError(f"pa train with engine.kind={engine} failed:\n{done.stderr[-2000:]}")
        run_id = json.loads(done.stdout.splitlines()[-1])["mlflow_run_id"]
        client = MlflowClient(uri)

        def history(name: str) -> list[float]:
            points = sorted(client.get_metric_history(run_id, name), key=lambda metric: metric.step)
            return [point.value for point in points]

        return Rate(history("perf/tokens"), history("perf/elapsed"))


def _trl(config: TrainConfig, *, iterations: int, threads: int) -> dict[str, dict[str, Any]]:
    """All of TRL's settings."""
    model, dtype = resolve_source(config.model.path), config.model.dtype
    tokenizer = load_tokenizer(config.model)
    context = context_of(model, config.model)
    problems = load_prompts(config.data, tokenizer, config.seed, context, config.sampling.max_tokens)
    stream = PromptStream(problems.train, config.seed, config.data.shuffle)
    count = config.prompts_per_iteration * iterations
    chosen = stream.take(count)
    if not all("expression" in prompt.metadata for prompt in chosen):
        raise ConfigError(
            f"data.name={config.data.name}: pa bench iteration needs an arithmetic task of reasoning-gym, whose "
            "problems have an 'expression', such as basic_arithmetic"
        )
    ids = [prompt.token_ids.tolist() for prompt in chosen]
    task = {
        "prompts": tokenizer.batch_decode(ids),
        "token_ids": ids,
        "answers": [prompt.answer for prompt in chosen],
        "expressions": [prompt.metadata["expression"] for prompt in chosen],
        "rewards": {reward.name: reward.weight for reward in config.rewards},
    }
    size = _fastest_micro_batch(model, config, max(map(len, ids)), threads)
    common = {
        "size": size,
        "iterations": iterations,
        "prompts": config.prompts_per_iteration,
        "samples": config.group_size,
        "max_tokens": config.sampling.max_tokens,
        "learning_rate": config.optimizer.learning_rate,
    }

    def measure(continuous: bool) -> Rate:
        with Side("pa_core.bench.trl_iteration_side", python=peers_python(), threads=threads) as side:
            side.ask("load", model=model, dtype=dtype, threads=threads, **task)
            return Rate(**side.ask("train", _LIMIT_S, **common, continuous_batching=continuous))

    return {
        name: _attempt(f"TRL, {name}", partial(measure, continuous)) | {"micro_batch": size}
        for name, continuous in _TRL_SETTINGS.items()
    }


def _fastest_micro_batch(model: str, config: TrainConfig, prompt_len: int, threads: int) -> int:
    """Samples per training micro-batch that are fastest for TRL, on recorded samples of the iteration's shape."""
    samples = config.prompts_per_iteration * config.group_size
    vocabulary = len(load_tokenizer(config.model))
    recorded = Recorded(vocabulary, samples, prompt_len, config.sampling.max_tokens)
    with Side(PEERS["trl"], python=peers_python(), threads=threads) as side:
        found = side.ask(
            "load",
            model=model,
            dtype=config.model.dtype,
            device="cpu",
            threads=threads,
            prompt=recorded.prompt.tolist(),
            responses=recorded.responses.tolist(),
            rewards=recorded.rewards.tolist(),
        )
    log.info("TRL trains fastest in micro-batches of %d samples", found["size"])
    return int(found["size"])


def render(result: dict[str, Any]) -> str:
    """All settings, the best of each side, and their ratio."""
    lines = [
        f"{result['iterations'] - 1} iterations of {result['prompts']} prompts x {result['samples']} samples, up to "
        f"{result['max_tokens']} tokens, on {result['cores']} cores; completion tokens/s:"
    ]
    titles = {"ours": "pa train", "every_group": "pa train, every group", "trl": f"TRL {result['versions']['trl']}"}
    for side, title in titles.items():
        for name, facts in result[side].items():
            best = " (best)" if result["best"][side] == name else ""
            figure = f"{facts['tokens_per_s']:8.1f}" if "tokens_per_s" in facts else f"not run: {facts['failed']}"
            lines.append(f"  {title + ', ' + name:<36}{figure}{best}")
    lines.append(
        f"ratio {result['ratio']:.2f}x as shipped, {result['ratio_every_group']:.2f}x with every group computed "
        "(floor 3x, aim 5x)"
    )
    return "\n".join(lines)
