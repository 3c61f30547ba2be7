"""The result of evaluating one policy version: ``evaluations/v000012.json``, with a table of samples beside it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from pa_core.config import TrainConfig
from pa_core.errors import RewardError
from pa_core.evaluation.answers import answer_extractor
from pa_core.evaluation.scores import Score, judge, scores
from pa_core.records import Group


class EvaluationResult(BaseModel):
    """What one version scored on one set of problems."""

    model_config = ConfigDict(frozen=True)

    version: int = Field(description="Policy version.")
    metric: str = Field(description="Reward that was averaged.")
    accuracy: float = Field(description="Mean of the metric over samples, then over problems: avg_at_k.")
    ci95: float = Field(description="Half the width of the 95 % confidence interval of accuracy.")
    problems: int = Field(description="Problems with at least one scored sample.")
    samples: int = Field(description="Responses generated.")
    samples_per_problem: int = Field(description="k.")
    scores: dict[str, Score] = Field(description="pass_at_1, avg_at_k and, for k > 1, maj_at_k.")
    unscored: int = Field(description="Samples without a value of the metric: in no score, and not zero.")
    unscored_by_cause: dict[str, int] = Field(description="Those samples by cause:reward.")
    unanswered: int = Field(description="Scored samples without an answer that can be read: they cast no vote.")
    response_length: float = Field(description="Mean response length in tokens.")
    truncated_share: float = Field(description="Share of responses cut at max_tokens.")
    temperature: float
    max_tokens: int

    def metrics(self, prefix: str = "eval") -> dict[str, float]:
        """The result as metrics; ``prefix`` names the group."""
        values = {
            "accuracy": self.accuracy,
            "ci95": self.ci95,
            "problems": float(self.problems),
            "response_length": self.response_length,
            "truncated_share": self.truncated_share,
            "unscored_share": self.unscored / self.samples,
            **{name: score.value for name, score in self.scores.items()},
        }
        return {f"{prefix}/{name}": value for name, value in values.items()}


def summarise_groups(config: TrainConfig, version: int, groups: Sequence[Group]) -> EvaluationResult:
    """Scores of ``groups``, which ``version`` generated for evaluation.

    Raises:
        RewardError: no sample could be scored.
        ConfigError: ``evaluation.answer_pattern`` is wrong.
    """
    metric = config.evaluation_metric
    problems = judge(groups, metric, answer_extractor(config))
    samples = [sample for group in groups for sample in group.samples]
    causes = Counter(sample.unscored or f"none:{metric}" for sample in samples if metric not in sample.rewards)
    try:
        found = scores(problems)
    except ValueError:
        listed = ", ".join(f"{count} x {cause}" for cause, count in causes.most_common()) or "there are no samples"
        raise RewardError(f"evaluation: reward {metric!r} scored none of {len(groups)} problems ({listed})") from None
    average = found["avg_at_k"]
    return EvaluationResult(
        version=version,
        metric=metric,
        accuracy=average.value,
        ci95=(average.high - average.low) / 2,
        problems=sum(any(sample.value is not None for sample in problem) for problem in problems),
        samples=len(samples),
        samples_per_problem=max(len(group.samples) for group in groups),
        scores=found,
        unscored=causes.total(),
        unscored_by_cause=dict(causes.most_common()),
        unanswered=sum(one.value is not None and one.answer is None for problem in problems for one in problem),
        response_length=float(np.mean([len(sample) for sample in samples])),
        truncated_share=float(np.mean([sample.finish_reason == "length" for sample in samples])),
        temperature=config.evaluation.temperature,
        max_tokens=config.sampling.max_tokens,
    )
