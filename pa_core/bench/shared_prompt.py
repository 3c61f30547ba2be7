"""Shared-prompt against per-sample training step: the same samples, loss, model, dtype and threads, side by side.

One step is forward, GRPO loss and backward over a group of K responses to one prompt. Both sides run the output head
on response positions only, in chunks. The per-sample side gets the micro-batch size that is best for it: candidates
are timed on a part of the group first. Both sides are then timed alternately, so that a slow phase of the machine
hits both.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from pa_core.config import ObjectiveConfig
from pa_core.model.loading import resolve_source
from pa_core.model.packing import Attention, TrainGroup, TrainSample, pack
from pa_core.model.tri_model import TriModel
from pa_core.objective.losses import grpo_loss


def token_ratio(group_size: int, prompt_len: int, response_len: int) -> float:
    """rho = K (Lp + Lr) / (Lp + K Lr): tokens computed per sample over tokens computed with a shared prompt."""
    return group_size * (prompt_len + response_len) / (prompt_len + group_size * response_len)


def _random_group(vocabulary: int, group_size: int, prompt_len: int, response_len: int, seed: int) -> TrainGroup:
    generator = np.random.default_rng(seed)

    def tokens(length: int) -> np.ndarray:
        return generator.integers(0, vocabulary, length, dtype=np.int32)

    mask = np.ones(response_len, np.bool_)
    samples = tuple(
        TrainSample(tokens(response_len), np.zeros(response_len, np.float32), mask, float(generator.normal()))
        for _ in range(group_size)
    )
    return TrainGroup("bench", tokens(prompt_len), samples)


def _parts(group: TrainGroup, size: int) -> list[TrainGroup]:
    return [replace(group, samples=group.samples[start : start + size]) for start in range(0, len(group.samples), size)]


def _step(model: PreTrainedModel, attention: Attention, parts: Sequence[TrainGroup]) -> float:
    """Seconds of one forward-backward over ``parts``, each a micro-batch of its own."""
    tri = TriModel(model, attention, self_check=False)
    model.zero_grad(set_to_none=False)
    config = ObjectiveConfig()
    started = time.perf_counter()
    for part in parts:
        batch = pack([part], attention).to(model.device)
        out = tri.logprobs(batch, 1.0)
        loss = grpo_loss(
            out.policy,
            out.old,
            None,
            out.entropy,
            advantages=batch.advantages,
            engine_logprobs=batch.engine_logprobs,
            sample_index=batch.sample_index,
            sample_tokens=batch.sample_tokens,
            config=config,
            max_tokens=int(batch.sample_tokens.max()),
        ).loss
        loss.backward()
    return time.perf_counter() - started


def _best_size(model: PreTrainedModel, group: TrainGroup) -> tuple[int, dict[int, float]]:
    """The per-sample micro-batch size with the least time per sample, and the seconds per sample of all tried.

    Sizes double until they get slower or reach the whole group.
    """
    seconds: dict[int, float] = {}
    size = 1
    while True:
        seconds[size] = _step(model, "per_sample", _parts(group, size)[:1]) / size
        best = min(seconds, key=seconds.__getitem__)
        if best != size or size == len(group.samples):
            return best, seconds
        size = min(2 * size, len(group.samples))


def _gradient(model: PreTrainedModel) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def run(
    model_path: str,
    group_size: int = 16,
    prompt_len: int = 512,
    response_len: int = 64,
    *,
    repeats: int = 3,
    dtype: str = "float32",
    threads: int | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Time one training step both ways.

    Args:
        model_path: as ``model.path``.
        group_size: K. prompt_len: Lp. response_len: Lr, in tokens.
        repeats: timed steps per side; the median counts.
        threads: CPU threads; default: torch's.

    Returns:
        Seconds of both sides, ``speedup``, ``rho`` and ``share_of_rho``, response tokens per second, and the
        relative distance of the two gradients.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(resolve_source(model_path), dtype=getattr(torch, dtype)).eval()
    group = _random_group(model.get_input_embeddings().num_embeddings, group_size, prompt_len, response_len, seed)
    _step(model, "per_sample", _parts(group, 1)[:1])  # warm up
    size, seconds_by_size = _best_size(model, group)
    sides: dict[str, Callable[[], float]] = {
        "shared": lambda: _step(model, "shared_prompt", [group]),
        "per_sample": lambda: _step(model, "per_sample", _parts(group, size)),
    }
    times: dict[str, list[float]] = {name: [] for name in sides}
    gradients: dict[str, Tensor] = {}
    for _ in range(repeats):
        for name, side in sides.items():
            times[name].append(side())
            gradients[name] = _gradient(model)
    shared, per_sample = (float(np.median(times[name])) for name in ("shared", "per_sample"))
    rho = token_ratio(group_size, prompt_len, response_len)
    return {
        "model": model_path,
        "dtype": dtype,
        "threads": torch.get_num_threads(),
        "group_size": group_size,
        "prompt_len": prompt_len,
        "response_len": response_len,
        "shared_s": shared,
        "shared_all_s": times["shared"],
        "per_sample_s": per_sample,
        "per_sample_all_s": times["per_sample"],
        "per_sample_micro_batch": size,
        "per_sample_seconds_per_sample": seconds_by_size,
        "speedup": per_sample / shared,
        "rho": rho,
        "share_of_rho": per_sample / shared / rho,
        "shared_response_tokens_per_s": group_size * response_len / shared,
        "per_sample_response_tokens_per_s": group_size * response_len / per_sample,
        "gradient_distance": float(
            (gradients["shared"] - gradients["per_sample"]).norm() / gradients["per_sample"].norm()
        ),
    }


def render(result: dict[str, Any]) -> str:
    """Both sides, their ratio, and rho beside it."""
    return "\n".join(
        [
            f"K={result['group_size']} Lp={result['prompt_len']} Lr={result['response_len']}, {result['dtype']}, "
            f"{result['threads']} threads",
            f"shared prompt  {result['shared_s']:8.2f} s  {result['shared_response_tokens_per_s']:7.1f} "
            "response tokens/s",
            f"per sample     {result['per_sample_s']:8.2f} s  {result['per_sample_response_tokens_per_s']:7.1f} "
            f"response tokens/s (best micro-batch: {result['per_sample_micro_batch']} samples)",
            f"speed-up {result['speedup']:.2f}x; rho {result['rho']:.2f} ({result['share_of_rho']:.0%} of it); "
            f"relative distance of the gradients {result['gradient_distance']:.1e}",
        ]
    )
