"""How every side of a comparison hands over its gradients."""

from __future__ import annotations

from safetensors.torch import save_file
from torch import nn


def save_gradients(model: nn.Module, path: str, divisor: float = 1.0) -> None:
    """Write the gradient of each parameter that has one, divided, by the parameter's name, as safetensors."""
    save_file(
        {
            name: (parameter.grad / divisor).contiguous()
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        },
        path,
    )
