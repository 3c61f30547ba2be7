"""Rotary embeddings whose frequencies depend on the longest sample of a batch, hence on the other samples.

The library computes one set of frequencies per forward pass. ``longrope`` (Phi-3-128k, arXiv 2402.13753) has one set
for contexts up to the original length and one beyond: exact as long as a batch holds samples of one kind only.
``dynamic`` has another set for every length beyond, and keeps the longest it has met: exact only up to the original
length.
"""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PretrainedConfig

from pa_core.errors import ModelError


@dataclass(frozen=True)
class RopeLimit:
    """Frequencies of ``kind`` are the same for all contexts of up to ``tokens`` tokens."""

    kind: str
    tokens: int

    def check(self, shortest: int, longest: int) -> None:
        """Raise :class:`ModelError` when a batch with contexts of ``shortest`` to ``longest`` tokens is not exact."""
        if longest <= self.tokens or (self.kind == "longrope" and shortest > self.tokens):
            return
        what = f"a sample of {longest} tokens is beyond the {self.tokens} tokens that"
        if self.kind == "longrope":
            raise ModelError(
                f"{what} rotary embedding 'longrope' treats alike, and shares a batch with one of {shortest} tokens; "
                "form batches by micro_batches(…, rope=rope_limit(config)), which keeps them apart"
            )
        raise ModelError(
            f"{what} the model was made for, where rotary embedding {self.kind!r} depends on the samples before it; "
            "lower sampling.max_tokens, leave longer prompts out, or set another rope_type (such as yarn or linear) "
            "in the model's config.json"
        )


def rope_limit(config: PretrainedConfig) -> RopeLimit | None:
    """The limit of a model's rotary embeddings; None when they are the same for every length."""
    config = config.get_text_config()
    parameters = getattr(config, "rope_parameters", None) or {}
    # Models with several layer types have one set of parameters for each.
    sets = [value for value in parameters.values() if isinstance(value, dict)] or [parameters]
    limits: set[RopeLimit] = set()
    for found in sets:
        kind = found.get("rope_type", "default")
        if kind == "longrope":
            limits.add(RopeLimit(kind, found.get("original_max_position_embeddings", config.max_position_embeddings)))
        elif kind == "dynamic":
            limits.add(RopeLimit(kind, config.max_position_embeddings))
    if len(limits) > 1:
        return RopeLimit("dynamic", min(limit.tokens for limit in limits))
    return next(iter(limits), None)
