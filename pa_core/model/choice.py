"""Which attention a model is trained with: shared prompt where it is exact, else sample by sample."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Literal

from torch import Tensor
from transformers import PreTrainedModel

from pa_core.errors import ModelError
from pa_core.model.attention import ATTENTION_NAME, backend_for
from pa_core.model.exactness import obstacle
from pa_core.model.packing import Attention, PackedBatch
from pa_core.model.selfcheck import check_logprobs, own_implementation

logger = logging.getLogger(__name__)

#: ``auto``: shared prompt where it is exact for the model.
AttentionChoice = Literal["auto", "shared_prompt", "per_sample"]


def prepare_attention(
    model: PreTrainedModel,
    choice: AttentionChoice,
    logprobs: Callable[[PackedBatch], Tensor],
    *,
    self_check: bool = True,
) -> tuple[Attention, float | None]:
    """Switch ``model``, in place, to the attention of ``choice``; check and log which it is.

    Args:
        logprobs: log-probabilities f32[T] of a packed batch of either kind, at temperature 1.

    Returns:
        The attention, and the self-check's largest difference in nats (None without a self-check).

    Raises:
        ModelError: when log-probabilities would not be the model's own; names the setting to change.
    """
    if choice != "per_sample":
        try:
            _share_prompts(model)
            difference = check_logprobs(model, "shared_prompt", logprobs) if self_check else None
        except ModelError as error:
            if choice == "shared_prompt":
                raise
            # Every such error ends with the setting that chooses this path.
            logger.warning("training computes a prompt for each of its responses: %s to do so unwarned", error)
        else:
            config = model.config.get_text_config()
            backend = backend_for(model.device, model.dtype, getattr(config, "attn_logit_softcapping", None))
            logger.info("attention: shared prompt, kernel %s", backend.name)
            return "shared_prompt", difference
    if model.config._attn_implementation == ATTENTION_NAME:
        model.set_attn_implementation(own_implementation(model))
    difference = check_logprobs(model, "per_sample", logprobs) if self_check else None
    logger.info("attention: per sample, kernel %s", model.config._attn_implementation)
    return "per_sample", difference


def _share_prompts(model: PreTrainedModel) -> None:
    reason = obstacle(model)
    if reason is None:
        model.set_attn_implementation(ATTENTION_NAME)
        if model.config._attn_implementation != ATTENTION_NAME:
            reason = f"{type(model).__name__} does not take an attention function"
    if reason is not None:
        raise ModelError(f"model.attention=shared_prompt: {reason}; set model.attention=per_sample")
