"""Is shared-prompt attention exact for a model? Read from its configuration and its modules."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

#: Model types that are tested against the library's own per-sample forward.
SUPPORTED_MODEL_TYPES = (
    "gemma2",
    "gemma3_text",
    "gpt_oss",
    "granite",
    "llama",
    "mistral",
    "mixtral",
    "olmo2",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "smollm3",
)

# Layers whose attention is a matter of who sees whom; others carry something from token to token.
_ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention", "attention"})


def obstacle(model: PreTrainedModel) -> str | None:
    """Why shared-prompt attention would not be exact for ``model``, as half a sentence; None when it is.

    The responses of a group can share a prompt's computation only when tokens reach each other through attention
    alone. A state that runs from token to token would run from one response into the next.
    """
    config = model.config.get_text_config()
    state = carried_state(model)
    if state is not None:
        return f"{state} carries state from token to token, which would run from one response into the next"
    if getattr(config, "is_encoder_decoder", False):
        return "the model is an encoder-decoder"
    if getattr(config, "attention_chunk_size", None):
        return f"the model's attention_chunk_size={config.attention_chunk_size} is not computed exactly"
    if getattr(config, "use_bidirectional_attention", False):
        return "the model's attention is bidirectional"
    if model.config.model_type not in SUPPORTED_MODEL_TYPES:
        return (
            f"model type {model.config.model_type!r} is not among the tested ones ({', '.join(SUPPORTED_MODEL_TYPES)})"
        )
    return None


def carried_state(model: PreTrainedModel) -> str | None:
    """What carries state from token to token in ``model``, in words; None when nothing but attention does."""
    other = sorted(set(getattr(model.config.get_text_config(), "layer_types", None) or ()) - _ATTENTION_LAYERS)
    if other:
        return f"the model's layer type {other[0]!r}"
    for name, module in model.named_modules():
        convolves = isinstance(module, nn.Conv1d) and module.kernel_size[0] > 1
        if convolves or isinstance(module, nn.RNNBase):
            return f"module {name} ({type(module).__name__})"
    return type(model).__name__ if getattr(model, "_is_stateful", False) else None
