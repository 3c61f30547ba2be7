"""The models that benchmarks run on: one from a path, or one of a known shape with random weights."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, Qwen3Config

from pa_core.errors import ConfigError
from pa_core.model.loading import resolve_source

#: Qwen3-0.6B, and eight of the 36 layers of Qwen3-8B, as their model cards have them.
SHAPES = {
    "qwen3-0.6b": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "8b-layers": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 8,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
}


def model_config(name: str) -> PretrainedConfig:
    """Structure of the model ``name``: a shape's name, or a source as ``model.path``."""
    if name in SHAPES:
        return Qwen3Config(vocab_size=151936, head_dim=128, max_position_embeddings=40960, **SHAPES[name])
    return AutoConfig.from_pretrained(resolve_source(name))


def build_model(name: str, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """The model in evaluation mode; a shape's weights are random, seeded."""
    if name not in SHAPES:
        return AutoModelForCausalLM.from_pretrained(resolve_source(name), dtype=dtype).to(device).eval()
    torch.manual_seed(0)
    with device:
        return AutoModelForCausalLM.from_config(model_config(name), dtype=dtype).eval()


def choose_device(name: str | None) -> str:
    """``name``, or cuda where there is one, or cpu.

    Raises:
        ConfigError: cuda is asked for and not there.
    """
    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda"):
        raise ConfigError(f"--device {name}: expected cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no CUDA device here; use --device cpu")
    return name
