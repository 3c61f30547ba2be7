"""``pa bench engine``: tokens per second of one vLLM replica, through the pool and by vLLM's own benchmark client."""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from pa_core.bench.served import Served, bench_config, serving
from pa_core.errors import EngineError
from pa_core.rollout.protocol import GenerateRequest
from pa_core.rollout.vllm_command import SERVED_NAME, vllm_python

_CLIENT = (
    "import argparse; from vllm.benchmarks.serve import add_cli_args, main; "
    "parser = argparse.ArgumentParser(); add_cli_args(parser); main(parser.parse_args())"
)
_CLIENT_LIMIT_S = 1800


def run(
    config_path: Path,
    overrides: list[str],
    *,
    sequences: int,
    group_size: int,
    prompt_tokens: int,
    response_tokens: int,
    repeats: int,
) -> dict[str, Any]:
    """Serve the config's model and generate ``sequences`` responses at once, ``repeats`` times by each client in turn.

    vLLM's client asks for single completions, without log-probabilities. The pool asks for the same number of single
    responses, and for groups of ``group_size`` besides, with log-probabilities and version spans, as training does.

    Raises:
        EngineError: the server or vLLM's client failed.
    """
    config = bench_config(
        config_path,
        overrides,
        # vLLM's client sends text, which only a server with a tokenizer can take.
        "engine.vllm.extra_args=[--no-skip-tokenizer-init]",
        f"engine.concurrency={sequences}",
        "engine.hedge_after=null",
        "engine.request_timeout_s=1800",
    )

    async def measure() -> dict[str, list[float]]:
        rates: dict[str, list[float]] = {"client": [], "pool": [], "pool_groups": []}
        async with serving(config) as served:
            await served.pool.load(0)
            await _generate(served, 1, sequences, prompt_tokens, 4, seed=1000)  # warm
            for number in range(repeats):
                rates["client"].append(
                    await asyncio.to_thread(_client, served, sequences, prompt_tokens, response_tokens, number)
                )
                for name, samples in (("pool", 1), ("pool_groups", group_size)):
                    rates[name].append(
                        await _generate(
                            served, samples, sequences // samples, prompt_tokens, response_tokens, seed=number
                        )
                    )
        return rates

    rates = asyncio.run(measure())
    medians = {name: statistics.median(values) for name, values in rates.items()}
    return {
        "sequences": sequences,
        "group_size": group_size,
        "prompt_tokens": prompt_tokens,
        "response_tokens": response_tokens,
        "repeats": repeats,
        "tokens_per_s": medians,
        "all": rates,
        "ratio": medians["pool"] / medians["client"],
        "ratio_groups": medians["pool_groups"] / medians["client"],
    }


async def _generate(
    served: Served, samples: int, groups: int, prompt_tokens: int, response_tokens: int, seed: int
) -> float:
    """Tokens per second of ``groups`` groups of random prompts through the pool."""
    random = np.random.default_rng(seed)
    vocabulary = int(served.model.model.config.vocab_size)
    requests = [
        GenerateRequest(
            group_id=f"{seed}-{samples}-{number}",
            token_ids=random.integers(0, vocabulary, prompt_tokens, dtype=np.int32),
            samples=samples,
            temperature=1.0,
            max_tokens=response_tokens,
            seed=seed,
            version=0,
        )
        for number in range(groups)
    ]
    started = time.perf_counter()
    answers = await asyncio.gather(*map(served.pool.generate, requests))
    wall = time.perf_counter() - started
    return sum(len(one.token_ids) for answer in answers for one in answer.generations) / wall


def _client(served: Served, sequences: int, prompt_tokens: int, response_tokens: int, seed: int) -> float:
    """Output tokens per second by vLLM's benchmark client, of random prompts of the same length."""
    with tempfile.TemporaryDirectory(prefix="pa-bench-client-") as folder:
        arguments = {
            "--backend": "openai",
            "--base-url": served.record.url,
            "--endpoint": "/v1/completions",
            "--model": SERVED_NAME,
            "--tokenizer": served.model.source,
            "--dataset-name": "random",
            "--random-input-len": prompt_tokens,
            "--random-output-len": response_tokens,
            "--num-prompts": sequences,
            "--request-rate": "inf",
            "--temperature": 1.0,
            "--seed": seed,
            "--result-dir": folder,
            "--result-filename": "result.json",
        }
        line = [str(vllm_python(served.run.config.engine.vllm)), "-c", _CLIENT, "--ignore-eos", "--save-result"]
        result = subprocess.run(
            [*line, *(str(part) for pair in arguments.items() for part in pair)],
            env={**os.environ, "OPENAI_API_KEY": served.api_key},
            capture_output=True,
            text=True,
            timeout=_CLIENT_LIMIT_S,
            check=False,
        )
        if result.returncode:
            raise EngineError(f"vLLM's benchmark client failed:\n{result.stderr[-2000:]}")
        figures = json.loads((Path(folder) / "result.json").read_text())
    if figures["completed"] != sequences:
        raise EngineError(f"vLLM's benchmark client completed {figures['completed']} of {sequences} requests")
    return float(figures["output_throughput"])


def render(result: dict[str, Any]) -> str:
    """Both clients beside each other."""
    rates = result["tokens_per_s"]
    return "\n".join(
        [
            f"{result['sequences']} responses at once, {result['prompt_tokens']} + {result['response_tokens']} tokens, "
            f"median of {result['repeats']}, output tokens/s:",
            f"  vLLM's benchmark client          {rates['client']:8.1f}",
            f"  pool, single responses           {rates['pool']:8.1f}   {result['ratio']:.2f} of the client's",
            f"  pool, groups of {result['group_size']:<4}             {rates['pool_groups']:8.1f}   "
            f"{result['ratio_groups']:.2f} of the client's",
        ]
    )
