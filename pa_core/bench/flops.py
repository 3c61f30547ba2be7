"""Floating-point operations of one training step over a group, by formula.

What the mathematics of forward and backward needs; anything recomputed to save memory does not count, which is the
convention behind "model FLOPs utilisation" (PaLM, arXiv 2204.02311, appendix B). A multiply-add is 2 operations, and
the backward pass costs twice the forward pass:

========== =====================================================================================
body       6 x (weights of the linear layers inside the blocks) per computed token
head       6 x hidden x vocabulary per trained response token
attention  12 x heads x head size x layers per pair of a query and a key that it may attend to
========== =====================================================================================

Norms, rotations and activations are left out (well below 1 %). A response's last token is never computed, because
nothing is predicted from it: a response of Lr tokens costs Lr - 1 tokens of body and Lr of head, on both sides alike.
Sliding windows are counted as full attention.
"""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PretrainedConfig

from pa_core.errors import ModelError


@dataclass(frozen=True)
class ModelShape:
    """What the formulas need of a model.

    Attributes:
        body: weights of the linear layers inside the blocks.
        head: hidden size x vocabulary.
        attention: heads x head size x layers.
    """

    body: int
    head: int
    attention: int

    @staticmethod
    def of(config: PretrainedConfig) -> ModelShape:
        """The shape of a dense decoder with a gated MLP (Llama, Qwen, Mistral, Gemma, …).

        Raises:
            ModelError: a mixture of experts, whose work depends on the router.
        """
        text = config.get_text_config()
        if getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None):
            raise ModelError(f"no FLOP formula for model type {text.model_type!r}: it has experts; use a dense model")
        hidden, heads = text.hidden_size, text.num_attention_heads
        size = getattr(text, "head_dim", None) or hidden // heads
        kv_heads = getattr(text, "num_key_value_heads", None) or heads
        layer = 2 * hidden * size * (heads + kv_heads) + 3 * hidden * text.intermediate_size
        return ModelShape(
            body=layer * text.num_hidden_layers,
            head=hidden * text.vocab_size,
            attention=heads * size * text.num_hidden_layers,
        )


@dataclass(frozen=True)
class GroupWork:
    """What one step computes: body tokens, trained response tokens, pairs of query and key."""

    tokens: int
    trained: int
    pairs: int

    def flops(self, shape: ModelShape) -> dict[str, float]:
        """Operations by part: ``body``, ``head``, ``attention``."""
        return {
            "body": 6.0 * shape.body * self.tokens,
            "head": 6.0 * shape.head * self.trained,
            "attention": 12.0 * shape.attention * self.pairs,
        }

    def total(self, shape: ModelShape) -> float:
        """Operations of the whole step."""
        return sum(self.flops(shape).values())


def _causal(length: int) -> int:
    return length * (length + 1) // 2


def per_sample_work(group_size: int, prompt_len: int, response_len: int) -> GroupWork:
    """K rows of prompt + response, each on its own."""
    length = prompt_len + response_len - 1
    return GroupWork(group_size * length, group_size * response_len, group_size * _causal(length))


def shared_work(group_size: int, prompt_len: int, response_len: int) -> GroupWork:
    """The prompt once, and K responses that attend to it and to themselves."""
    computed = response_len - 1
    return GroupWork(
        prompt_len + group_size * computed,
        group_size * response_len,
        _causal(prompt_len) + group_size * (computed * prompt_len + _causal(computed)),
    )


def token_ratio(group_size: int, prompt_len: int, response_len: int) -> float:
    """rho = K (Lp + Lr) / (Lp + K Lr): tokens computed per sample over tokens computed with a shared prompt."""
    return group_size * (prompt_len + response_len) / (prompt_len + group_size * response_len)


def flop_ratio(shape: ModelShape, group_size: int, prompt_len: int, response_len: int) -> float:
    """Operations of the per-sample step over those of the shared-prompt step: what a perfect implementation gains."""
    sizes = (group_size, prompt_len, response_len)
    return per_sample_work(*sizes).total(shape) / shared_work(*sizes).total(shape)
