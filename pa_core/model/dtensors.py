"""Tensors that may be spread over processes (DTensor) or not, treated alike."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """This process's part of ``tensor``, in the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_gradient(parameter: Tensor) -> Tensor | None:
    """The gradient of this process's part; those that share ``parameter`` must call this together.

    Autograd leaves a DTensor's gradient in the layout that it came in, which need not be the parameter's.
    """
    gradient = parameter.grad
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor) and gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)
    return None if gradient is None else local(gradient)


def whole(tensor: Tensor) -> Tensor:
    """All of ``tensor``, on every process; all of them must call this together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def laid_out_like(tensor: Tensor, model: Tensor) -> Tensor:
    """This process's part ``tensor`` as part of a whole that lies as ``model`` does."""
    if not isinstance(model, DTensor):
        return tensor
    return DTensor.from_local(
        tensor, model.device_mesh, model.placements, run_check=False, shape=model.shape, stride=model.stride()
    )


def split_over_tp(parameter: Tensor) -> bool:
    """Whether the processes along ``tp`` have different parts of it."""
    if not isinstance(parameter, DTensor):
        return False
    names = parameter.device_mesh.mesh_dim_names or ()
    return any(
        name == "tp" and not placement.is_replicate()
        for name, placement in zip(names, parameter.placements, strict=True)
    )
