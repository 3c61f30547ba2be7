"""Evaluation of one published version: generate, score, sum up."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pyarrow as pa

from pa_core.config import TrainConfig
from pa_core.evaluation.result import EvaluationResult, summarise_groups
from pa_core.evaluation.store import sample_table
from pa_core.loop.producer import Producer
from pa_core.records import Prompt

log = logging.getLogger(__name__)

Show = Callable[[int, int], None]
"""Told how many of how many problems are done."""


@dataclass(frozen=True)
class Evaluation:
    """A result and the samples that it sums up (:mod:`pa_core.evaluation.store`)."""

    result: EvaluationResult
    table: pa.Table


def measure(
    config: TrainConfig,
    producer: Producer,
    version: int,
    prompts: Sequence[Prompt],
    show: Show = lambda done, total: None,
) -> Evaluation:
    """Generate and score ``evaluation.samples`` responses to each of ``prompts`` at ``version``.

    Raises:
        EngineError: some problems were not finished in time, or no replica is left.
        RewardError: when no sample could be scored.
    """
    settings = config.evaluation
    groups = producer.evaluate(
        version,
        prompts,
        temperature=settings.temperature,
        max_tokens=config.sampling.max_tokens,
        samples=settings.samples,
        timeout_s=config.engine.request_timeout_s * max(1, len(prompts)),
        show=show,
    )
    result = summarise_groups(config, version, groups)
    if result.unscored:
        causes = ", ".join(f"{count} x {cause}" for cause, count in result.unscored_by_cause.items())
        log.warning("evaluation: %d of %d samples have no score (%s)", result.unscored, result.samples, causes)
    return Evaluation(result, sample_table(config, groups))
