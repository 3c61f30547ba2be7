"""What a model does between its output embedding and its logits: a factor, a soft cap, or nothing."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PretrainedConfig

# Models whose `logits_scaling` is a factor; Granite, who introduced it, divides.
_MULTIPLY_BY_LOGITS_SCALING = frozenset({"hyperclovax"})


@dataclass(frozen=True)
class LogitRule:
    """``logits = softcap · tanh(multiplier · h W / softcap)``, or ``multiplier · h W`` without a soft cap."""

    multiplier: float = 1.0
    softcap: float | None = None


def logit_rule(config: PretrainedConfig) -> LogitRule:
    """The rule of a causal language model of the library.

    Known are ``logits_scaling`` (Granite), ``logit_scale`` (Cohere), ``lm_head_multiplier`` (Falcon-H1) and
    ``final_logit_softcapping`` (Gemma). The self-check at start finds a model that does something else.
    """
    config = config.get_text_config()
    multiplier = 1.0
    scaling = getattr(config, "logits_scaling", None)
    if scaling:
        multiplier = scaling if config.model_type in _MULTIPLY_BY_LOGITS_SCALING else 1 / scaling
    for name in ("logit_scale", "lm_head_multiplier"):
        multiplier *= getattr(config, name, None) or 1.0
    return LogitRule(float(multiplier), getattr(config, "final_logit_softcapping", None))
