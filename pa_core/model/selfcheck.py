"""Before a model is trained: do our log-probabilities equal the model's own, sample by sample?"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from pa_core.errors import ModelError
from pa_core.model.attention import ATTENTION_NAME
from pa_core.model.packing import Attention, PackedBatch, TrainGroup, TrainSample, pack
from pa_core.model.rope import rope_limit

# Allowed mean and maximum of the differences, in nats. Rounding alone gives a maximum of about 1e-5 in float32, and
# one of 0.1 to 0.2 with a mean of 0.03 in bfloat16, for a 30-layer model; broken attention moves them by about 1.
_TOLERANCES = {torch.float32: (5e-5, 5e-4), torch.bfloat16: (0.1, 1.0), torch.float16: (0.02, 0.2)}
_SHAPES = ((9, (4, 7, 0, 1)), (13, (5, 3)), (40, (2, 6, 6)))
# A larger sliding window is not exceeded by the probe, which would take longer than the check is worth.
_PROBED_WINDOW = 256


def own_implementation(model: PreTrainedModel) -> str:
    """The library's attention implementation that computes ``model`` as it is meant to be."""
    return "sdpa" if model._supports_sdpa else "eager"


def _shapes(model: PreTrainedModel) -> list[tuple[int, tuple[int, ...]]]:
    """Prompt and response lengths of the probe, with a sample longer than a small sliding window."""
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None) or _PROBED_WINDOW + 1
    shapes = [*_SHAPES, (window + 5, (9, min(window, 40) + 3))] if window <= _PROBED_WINDOW else list(_SHAPES)
    limit = rope_limit(config)
    # One batch must not mix contexts that a rotary embedding treats differently.
    return [shape for shape in shapes if limit is None or shape[0] + max(shape[1]) <= limit.tokens]


def probe_groups(model: PreTrainedModel) -> list[TrainGroup]:
    """Random groups with ragged responses, the same for every call."""
    vocabulary = model.get_input_embeddings().num_embeddings
    generator = np.random.default_rng(0)

    def tokens(length: int) -> np.ndarray:
        return generator.integers(0, vocabulary, length, dtype=np.int32)

    return [
        TrainGroup(
            str(number),
            tokens(prompt_length),
            tuple(
                TrainSample(tokens(length), np.zeros(length, np.float32), np.ones(length, np.bool_), 0.0)
                for length in lengths
            ),
        )
        for number, (prompt_length, lengths) in enumerate(_shapes(model))
    ]


def _own_logprobs(model: PreTrainedModel, groups: list[TrainGroup]) -> Tensor:
    """Log-probabilities of every response token from the model's plain forward, one sample at a time."""
    parts = []
    for group in groups:
        for sample in group.samples:
            ids = torch.from_numpy(np.concatenate([group.prompt_ids, sample.token_ids]).astype(np.int64))
            logits = model(input_ids=ids.to(model.device).unsqueeze(0), use_cache=False).logits[0]
            logprobs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
            first = len(group.prompt_ids) - 1
            targets = ids[first + 1 :].to(model.device).unsqueeze(1)
            parts.append(logprobs[first:-1].gather(1, targets).squeeze(1))
    return torch.cat(parts)


@torch.no_grad()
def check_logprobs(model: PreTrainedModel, attention: Attention, logprobs: Callable[[PackedBatch], Tensor]) -> float:
    """Compare ``logprobs`` of a small random batch with the model's own per-sample forward.

    Args:
        logprobs: the path to check: log-probabilities f32[T] of a packed batch at temperature 1.

    Returns:
        The largest difference, in nats.

    Raises:
        ModelError: when it is above what rounding explains. The message names the setting to change.
    """
    implementation = model.config._attn_implementation
    groups = probe_groups(model)
    ours = logprobs(pack(groups, attention).to(model.device))
    try:
        if implementation == ATTENTION_NAME:
            model.set_attn_implementation(own_implementation(model))
        truth = _own_logprobs(model, groups)
    finally:
        model.set_attn_implementation(implementation)
    differences = (ours - truth).abs()
    mean, largest = float(differences.mean()), float(differences.max())
    allowed_mean, allowed = _TOLERANCES.get(model.dtype, _TOLERANCES[torch.float32])
    # Written so that NaN is refused as well.
    if not (mean <= allowed_mean and largest <= allowed):
        fix = (
            "set model.attention=per_sample"
            if attention == "shared_prompt"
            else "what the model does between its last hidden state and its logits is not supported"
        )
        raise ModelError(
            f"model.attention={attention}: log-probabilities of {type(model).__name__} differ from its own forward by "
            f"{mean:.3g} nats in the mean and {largest:.3g} at most (allowed: {allowed_mean:.3g} and {allowed:.3g}); "
            f"{fix}"
        )
    return largest
