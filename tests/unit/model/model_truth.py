"""Small random models and the truth they are compared with: Hugging Face's own forward, one sample at a time."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from pa_core.model.packing import TrainGroup, TrainSample

VOCABULARY = 61
_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def tiny_model(
    kind: str, heads: int = 4, kv_heads: int = 2, dtype: torch.dtype = torch.float32, scale: float = 0.25
) -> PreTrainedModel:
    """A random ``llama``, ``qwen2`` or ``qwen3`` with grouped-query attention, the same for every call.

    ``scale`` is the standard deviation of its weights; the default makes attention shape the output visibly.
    """
    torch.manual_seed(0)
    classes: dict[str, tuple[type[PretrainedConfig], type[PreTrainedModel]]] = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    }
    config_class, model_class = classes[kind]
    config = config_class(
        **_SHAPE,
        initializer_range=scale,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=32 // heads,
        tie_word_embeddings=True,
    )
    model: PreTrainedModel = model_class(config).to(dtype).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:  # initialised to constants, under which mistakes could hide
            parameter.data.normal_(1.0 if "norm" in name else 0.0, 0.2)
    return model


def random_groups(shapes: list[tuple[int, tuple[int, ...]]], seed: int = 0, masked: bool = False) -> list[TrainGroup]:
    """Groups of ``(prompt length, response lengths)`` with random tokens, advantages and engine log-probabilities."""
    generator = np.random.default_rng(seed)

    def sample(length: int) -> TrainSample:
        mask = generator.random(length) < 0.7 if masked else np.ones(length, np.bool_)
        return TrainSample(
            generator.integers(0, VOCABULARY, length, dtype=np.int32),
            -generator.random(length, dtype=np.float32),
            mask,
            float(generator.normal()),
        )

    return [
        TrainGroup(
            f"g{number}",
            generator.integers(0, VOCABULARY, prompt_length, dtype=np.int32),
            tuple(sample(length) for length in lengths),
        )
        for number, (prompt_length, lengths) in enumerate(shapes)
    ]


def per_sample_logprobs(
    model: PreTrainedModel, groups: list[TrainGroup], temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies of all trained tokens: each sample forwarded whole and alone."""
    logprobs, entropies = [], []
    for group in groups:
        for sample in group.samples:
            ids = torch.tensor([*group.prompt_ids.tolist(), *sample.token_ids.tolist()])
            logits = model(input_ids=ids.unsqueeze(0), use_cache=False).logits[0] / temperature
            distribution = logits.log_softmax(-1)
            for position in np.flatnonzero(sample.loss_mask):
                row = distribution[len(group.prompt_ids) + position - 1]
                logprobs.append(row[int(sample.token_ids[position])])
                entropies.append(-(row.exp() * row).sum())
    return torch.stack(logprobs), torch.stack(entropies)


def gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    """Gradients of all parameters."""
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    missing = [name for name, grad in found.items() if grad is None]
    assert not missing, f"no gradient: {missing}"
    return {name: grad for name, grad in found.items() if grad is not None}


def relative(ours: Tensor, truth: Tensor) -> float:
    """Distance relative to the truth's norm."""
    return float((ours.detach() - truth.detach()).norm() / truth.detach().norm())
