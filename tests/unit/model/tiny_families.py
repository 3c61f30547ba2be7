"""A small random model of every family that shares prompts, with all its peculiarities switched on."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

WINDOW = 8
_SHAPE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_ALTERNATING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {"num_experts_per_tok": 2}

#: What makes each family different from a plain decoder.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True},
    "qwen2": {**_ALTERNATING, "use_sliding_window": True},
    "qwen3": {**_ALTERNATING, "use_sliding_window": True},
    "qwen3_moe": {**_EXPERTS, "num_experts": 4, "moe_intermediate_size": 16, "norm_topk_prob": True},
    "mistral": {"sliding_window": WINDOW},
    "mixtral": {**_EXPERTS, "num_local_experts": 4, "sliding_window": WINDOW},
    "phi3": {"sliding_window": WINDOW, "original_max_position_embeddings": 256},
    "gemma2": {
        **_ALTERNATING,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        "query_pre_attn_scalar": 20,
    },
    "gemma3_text": {**_ALTERNATING, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 20},
    "smollm3": {**_ALTERNATING, "use_sliding_window": True, "no_rope_layers": [1, 0]},
    "olmo2": {},
    "granite": {
        "logits_scaling": 3.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.7,
        "embedding_multiplier": 2.0,
    },
    "gpt_oss": {**_ALTERNATING, **_EXPERTS, "num_local_experts": 4},
}


def tiny_family(kind: str, **changes: Any) -> PreTrainedModel:
    """A random model of family ``kind``, the same for every call; ``changes`` go into its configuration.

    Weights are large enough that attention, windows, caps and sinks shape the output visibly.
    """
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**_SHAPE, "initializer_range": 0.25, **FAMILIES.get(kind, {}), **changes})
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    centre = 0.0 if kind.startswith("gemma") else 1.0  # Gemma's norms multiply by 1 + weight
    for name, parameter in model.named_parameters():
        if "norm" in name:  # initialised to constants, under which mistakes could hide
            parameter.data.normal_(centre, 0.2)
        elif "bias" in name or "sinks" in name:
            parameter.data.normal_(0.0, 0.5)
    return model
