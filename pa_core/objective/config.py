"""The ``objective`` section of the configuration tree. Imports no torch.

Which keys make which published objective:

================== ========================================================================================
GRPO               ``loss_normalization: sequence``
Dr. GRPO           ``advantage: dr_grpo, loss_normalization: constant``
DAPO               ``clip_high: 0.28`` (and sampling.dynamic, mask_truncated, the reward ``overlong``)
GSPO               ``loss: gspo``
CISPO              ``loss: cispo``
RLOO               ``loss: reinforce, advantage: rloo``
REINFORCE++        ``advantage: reinforce_pp, beta: 0.001, kl: {estimator: k2}`` and schedule.stream false
dual-clip PPO      ``clip_dual: 3``
================== ========================================================================================
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Literal

from pydantic import Field, model_validator

from pa_core.config_section import Section
from pa_core.objective.conventions import PRESETS

Normalization = Literal["token", "sequence", "sequence_sum", "constant"]

# What each loss was published with; explicit keys win.
_PUBLISHED: dict[str, dict[str, Any]] = {
    "grpo": {"loss_normalization": "token", "clip_low": 0.2, "clip_high": 0.2},
    "gspo": {"loss_normalization": "sequence", "clip_low": 3e-4, "clip_high": 4e-4},
    "cispo": {"loss_normalization": "token", "clip_low": 1.0, "clip_high": 4.0},
    "reinforce": {"loss_normalization": "sequence_sum", "clip_low": 0.2, "clip_high": 0.2},
}

# The default of such a field: a validator fills it in before anybody sees it.
_DEPENDS: Any = None


def _nullable(schema: dict[str, Any]) -> None:
    """Let a form leave a field empty whose default depends on other fields; once validated it always has a value."""
    typed = {name: schema.pop(name) for name in list(schema) if name not in ("title", "description", "default")}
    schema["anyOf"] = [typed, {"type": "null"}]


class AdvantageConfig(Section):
    """Group advantage (r - baseline) / (std + eps). Libraries differ in std and eps; presets name them or a method."""

    preset: Literal[
        "trl",
        "trl_async",
        "verl",
        "openrlhf",
        "open_instruct",
        "areal",
        "dr_grpo",
        "nemo_rl",
        "rloo",
        "reinforce_pp",
    ] = Field("verl", description="Convention of this library or method; the fields below override it.")
    std: Literal["unbiased", "population", "none", "batch", "batch_rewards"] | None = Field(
        None,
        description="Standard deviation: within the group, none (Dr. GRPO), of the whole batch's distances to their "
        "group's mean, or of the whole batch's rewards. Default: the preset's.",
    )
    baseline: Literal["mean", "leave_one_out"] | None = Field(
        None, description="What is subtracted; default: the preset's."
    )
    eps: float | None = Field(None, ge=0, description="Added to the standard deviation; default: the preset's.")

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, value: Any) -> Any:
        tree = {"preset": value} if isinstance(value, str) else value
        published = PRESETS.get(str(tree.get("preset", "verl"))) if isinstance(tree, dict) else None
        if published is None:
            return tree
        return asdict(published) | {key: given for key, given in tree.items() if given is not None}


class KlConfig(Section):
    """The KL term, of weight objective.beta, that holds the policy near the reference."""

    placement: Literal["loss", "reward"] = Field(
        "loss", description="A term of the loss (GRPO), or subtracted from the reward before the advantage (RLHF)."
    )
    estimator: Literal["k1", "k2", "k3"] = Field(
        _DEPENDS,
        json_schema_extra=_nullable,
        description="Estimator per token. Default: k3 in the loss, as GRPO has it; k1 in the reward. The gradient of "
        "the KL divergence itself comes from k2 in the loss and k1 in the reward.",
    )
    clamp: float | None = Field(None, gt=0, description="Largest size of the estimate of one token; verl: 10.")
    weighted: bool = Field(
        False, description="In the loss: times the probability ratio, which makes its gradient unbiased (TRL does)."
    )

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("estimator") is None:
            return value | {"estimator": "k1" if value.get("placement") == "reward" else "k3"}
        return value

    @model_validator(mode="after")
    def _right_gradient(self) -> KlConfig:
        if self.placement == "loss" and self.estimator == "k1" and not self.weighted:
            raise ValueError(
                "objective.kl.estimator=k1 in the loss has an expected gradient of 0: it regularises nothing; use k2 "
                "or k3, or set objective.kl.weighted=true or objective.kl.placement=reward"
            )
        if self.placement == "reward" and self.weighted:
            raise ValueError(
                "objective.kl.weighted=true is about a term of the loss; with objective.kl.placement=reward leave it "
                "out"
            )
        return self


class CorrectionConfig(Section):
    """Importance weight w = p_trainer / p_engine: engine and trainer compute slightly different probabilities."""

    kind: Literal["none", "truncate", "mask"] = Field(
        "none", description="truncate: min(w, cap) (TIS); mask: w, but 0 outside [1 / cap, cap] (MIS, IcePop)."
    )
    level: Literal["token", "sequence"] = Field(
        "token", description="w of each token, or the product over a whole response."
    )
    cap: float = Field(2.0, gt=1, description="Largest weight.")


class ObjectiveConfig(Section):
    """The policy-gradient objective; loss_normalization and the clip bounds default to what the loss came with."""

    advantage: AdvantageConfig = Field(default_factory=AdvantageConfig, description="Advantage convention.")
    loss: Literal["grpo", "gspo", "cispo", "reinforce"] = Field(
        "grpo",
        description="grpo: clipped surrogate of the token's ratio; gspo: of the whole response's ratio; cispo: "
        "log-probability with clipped weight; reinforce: plain log-probability (RLOO).",
    )
    loss_normalization: Normalization = Field(
        _DEPENDS,
        json_schema_extra=_nullable,
        description="Mean over tokens, mean over samples of their token mean, of their sum, or of their sum / "
        "max_tokens. Default: token for grpo and cispo, sequence for gspo, sequence_sum for reinforce.",
    )
    clip_low: float = Field(
        _DEPENDS,
        gt=0,
        le=1,
        json_schema_extra=_nullable,
        description="Ratio is clipped below at 1 - clip_low. Default: 0.2; gspo 3e-4; cispo 1 (not at all).",
    )
    clip_high: float = Field(
        _DEPENDS,
        gt=0,
        json_schema_extra=_nullable,
        description="Ratio is clipped above at 1 + clip_high. Default: 0.2 (clip-higher: 0.28); gspo 4e-4; cispo 4.",
    )
    clip_dual: float | None = Field(
        None,
        gt=1,
        description="For negative advantages the ratio counts as at most this (dual clip: 3); null: no limit.",
    )
    beta: float = Field(0.0, ge=0, description="KL weight against the reference; 0 drops the reference model.")
    kl: KlConfig = Field(default_factory=KlConfig, description="The KL term.")
    entropy_coefficient: float = Field(0.0, ge=0, description="Weight of the entropy bonus.")
    correction: CorrectionConfig = Field(
        default_factory=CorrectionConfig, description="Importance correction of the engine's mismatch."
    )
    mask_truncated: bool = Field(
        False,
        description="Responses cut at max_tokens give no gradient, but stay in their group's statistics (DAPO's "
        "overlong filtering).",
    )

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        published = _PUBLISHED.get(str(value.get("loss", "grpo")), {})
        return published | {key: given for key, given in value.items() if given is not None or key not in published}

    @model_validator(mode="after")
    def _some_kl(self) -> ObjectiveConfig:
        if self.kl.placement == "reward" and not self.beta:
            raise ValueError(
                "objective.kl.placement=reward subtracts beta x KL, and objective.beta is 0; set objective.beta or "
                "leave objective.kl out"
            )
        return self

    @model_validator(mode="after")
    def _dual_clip(self) -> ObjectiveConfig:
        if self.clip_dual is None:
            return self
        if self.loss not in ("grpo", "gspo"):
            raise ValueError(f"objective.clip_dual has no meaning for objective.loss={self.loss}; leave it out")
        if self.clip_dual <= 1 + self.clip_high:
            raise ValueError(
                f"objective.clip_dual={self.clip_dual:g} must exceed 1 + objective.clip_high={1 + self.clip_high:g}"
            )
        return self

    @property
    def kl_in_loss(self) -> bool:
        """Whether the loss has a KL term."""
        return self.beta > 0 and self.kl.placement == "loss"

    @property
    def kl_in_reward(self) -> bool:
        """Whether the KL divergence is subtracted from the reward."""
        return self.beta > 0 and self.kl.placement == "reward"
