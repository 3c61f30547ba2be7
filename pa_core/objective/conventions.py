"""Advantage conventions by library or method: same formula, different std and eps. Imports no torch.

Sources: each library's released code as surveyed in 2026. The group advantage is
(r - baseline) / (std + eps). Methods: ``dr_grpo`` arXiv 2503.20783; ``rloo`` arXiv 2402.14740, r minus the mean of the
others' rewards; ``reinforce_pp`` arXiv 2501.03262 (REINFORCE++ with baseline), r minus the group's mean, over the whole
batch's std of samples (of tokens in OpenRLHF and verl, which gives long responses more weight).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from pa_core.objective.config import AdvantageConfig

Std = Literal["unbiased", "population", "none", "batch", "batch_rewards"]
Baseline = Literal["mean", "leave_one_out"]


@dataclass(frozen=True)
class AdvantageConvention:
    """How a group's rewards become advantages."""

    std: Std
    eps: float
    baseline: Baseline = "mean"

    @property
    def whole_batch(self) -> bool:
        """Whether the std is taken over every group, which must all be there first."""
        return self.std in ("batch", "batch_rewards")


PRESETS: dict[str, AdvantageConvention] = {
    "trl": AdvantageConvention("unbiased", 1e-4),
    "trl_async": AdvantageConvention("population", 1e-8),
    "verl": AdvantageConvention("unbiased", 1e-6),
    "openrlhf": AdvantageConvention("unbiased", 1e-9),
    "open_instruct": AdvantageConvention("population", 1e-8),
    "areal": AdvantageConvention("batch", 1e-5),
    "dr_grpo": AdvantageConvention("none", 0.0),
    "nemo_rl": AdvantageConvention("unbiased", 1e-6, "leave_one_out"),
    "rloo": AdvantageConvention("none", 0.0, "leave_one_out"),
    "reinforce_pp": AdvantageConvention("batch", 1e-8),
}


def resolve_advantage(config: AdvantageConfig) -> AdvantageConvention:
    """The convention of a validated config, whose fields its preset has filled."""
    assert config.std is not None and config.baseline is not None and config.eps is not None
    return AdvantageConvention(config.std, config.eps, config.baseline)
