"""Activation checkpointing: keep each decoder layer's input alone and compute the layer again in the backward pass.

Memory for activations falls from all that a layer makes to one hidden state per layer, for one more forward pass
(about a third more computation). Values and gradients are those of the same operations.
"""

from __future__ import annotations

from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from pa_core.errors import ModelError


def checkpoint_layers(model: PreTrainedModel) -> None:
    """Turn activation checkpointing on for ``model``, which stays in evaluation mode.

    The library checkpoints a layer only while the layer's own ``training`` flag is set, so that flag alone is set:
    the modules inside, and with them every dropout, remain in evaluation mode. ``model.eval()`` undoes it.

    Raises:
        ModelError: the model has no layers that the library could compute again.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers or not model.supports_gradient_checkpointing:
        raise ModelError(
            f"trainer.activation_checkpointing=true: {type(model).__name__} has no layers that can be computed again; "
            "set it to false"
        )
    # Nothing here is random, so there is no generator state to put back.
    model.activation_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    # For frozen weights the library makes embeddings require gradients, which only the reentrant kind needs.
    model.disable_input_require_grads()
    for layer in layers:
        layer.training = True
