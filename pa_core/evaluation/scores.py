"""Scores over problems with several samples each, and their 95 % confidence intervals.

Problems are the clusters: samples of one problem are not independent, problems are. Every score is therefore a mean
over problems of a value per problem, and its interval comes from the spread of those values.

============== =========================================================================================
score          value of one problem
============== =========================================================================================
``pass_at_1``  share of its samples that are right (the metric reaches 1)
``avg_at_k``   mean of the metric over its k samples; equal to pass_at_1 for a metric of 0 or 1
``maj_at_k``   whether the most frequent answer among its samples is right
============== =========================================================================================

A sample without a score (the reward raised, hung, gave None or NaN) enters no score; a problem without any scored
sample is left out. Of answers that tie for the majority each counts with equal weight, as if one were drawn. A scored
sample whose answer cannot be read casts no vote; a problem without a vote has no majority and counts as wrong.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

from pa_core.evaluation.answers import Extractor
from pa_core.records import Group

Z = 1.959964
"""97.5 % quantile of the normal distribution."""

_RIGHT = 1 - 1e-9


class Score(BaseModel):
    """A mean over problems with its 95 % confidence interval."""

    model_config = ConfigDict(frozen=True)

    value: float
    low: float = Field(description="Lower end of the interval.")
    high: float = Field(description="Upper end of the interval.")


@dataclass(frozen=True)
class Judged:
    """One sample.

    Attributes:
        value: its metric; None when unscored.
        answer: what it votes for; None when it gives no answer that can be read.
    """

    value: float | None
    answer: str | None

    @property
    def right(self) -> bool:
        """Whether the metric reaches 1."""
        return self.value is not None and self.value >= _RIGHT


def judge(groups: Sequence[Group], metric: str, extract: Extractor) -> list[list[Judged]]:
    """The samples of each group with their value of reward ``metric`` and their answers."""
    return [[Judged(sample.rewards.get(metric), extract(sample.text)) for sample in group.samples] for group in groups]


def scores(problems: Sequence[Sequence[Judged]]) -> dict[str, Score]:
    """The three scores of the module's table; ``maj_at_k`` only where some problem has several samples.

    Raises:
        ValueError: no sample has a value.
    """
    scored = [[sample for sample in problem if sample.value is not None] for problem in problems]
    kept = [problem for problem in scored if problem]
    if not kept:
        raise ValueError("no sample has a value")
    samples = sum(map(len, kept))
    right = [sum(sample.right for sample in problem) / len(problem) for problem in kept]
    means = [sum(sample.value or 0.0 for sample in problem) / len(problem) for problem in kept]
    found = {"pass_at_1": interval(right, samples), "avg_at_k": interval(means, samples)}
    if max(len(problem) for problem in problems) > 1:
        found["maj_at_k"] = interval([majority(problem) for problem in kept], len(kept))
    return found


def majority(samples: Sequence[Judged]) -> float:
    """1 when the most frequent answer is right, 0 when it is wrong, the mean over those that tie."""
    votes: defaultdict[str, list[bool]] = defaultdict(list)
    for sample in samples:
        if sample.answer is not None:
            votes[sample.answer].append(sample.right)
    most = max(map(len, votes.values()), default=0)
    winners = [sum(right) / len(right) for right in votes.values() if len(right) == most]
    return sum(winners) / len(winners) if winners else 0.0


def interval(values: Sequence[float], samples: int) -> Score:
    """Mean of the problems' ``values`` with its 95 % interval.

    For values between 0 and 1 it is Wilson's score interval with the effective sample size n* = p(1 - p) / se², where
    se² is the variance of the mean over problems: with one sample per problem this is Wilson's interval itself, and it
    has a width also where all values are equal. n* is at most the number of ``samples``, and that of problems when all
    are 0 or all are 1. Other values (rewards outside of 0 and 1) get the normal interval, mean ± 1.96 se.
    """
    n = len(values)
    mean = sum(values) / n
    squares = sum((value - mean) ** 2 for value in values)
    if min(values) < 0 or max(values) > 1:
        half = Z * math.sqrt(squares / max(1, n - 1) / n)
        return Score(value=mean, low=mean - half, high=mean + half)
    variance = squares / n / n
    spread = mean * (1 - mean)
    if spread < 1e-12:
        effective = float(n)
    else:
        effective = min(float(samples), spread / variance) if variance > 0 else float(samples)
    scale = 1 + Z**2 / effective
    centre = (mean + Z**2 / (2 * effective)) / scale
    half = Z / scale * math.sqrt(spread / effective + Z**2 / (4 * effective**2))
    # Rounding must not put the mean itself outside.
    return Score(value=mean, low=min(mean, max(0.0, centre - half)), high=max(mean, min(1.0, centre + half)))
