"""What a training step's time is spent on, by kind, from torch.profiler."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

#: The kinds, in the order in which they are shown, and what belongs to each.
KINDS = {
    "body": "matrix products of the blocks",
    "head": "logits: products (those recomputed in backward included), softmax, their gradient",
    "attention": "attention kernels",
    "elementwise": "norms, activations, rotation, residuals, copies, embedding",
    "optimizer": "clipping and AdamW",
    "rest": "Python, autograd, waiting",
}
_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::mkldnn_linear")
_OPTIMIZER = ("adamw", "_foreach_", "linalg_vector_norm")
_EMBEDDING = ("embedding", "aten::index_put_", "aten::_index_put_impl_")


def kind_of(name: str, shapes: Iterable[Any], vocabulary: int) -> str | None:
    """The kind of an operator call; None for what is not an operator of torch's.

    Args:
        name: as the profiler has it, ``aten::mm``.
        shapes: shapes of its inputs.
        vocabulary: rows of the output head's weight, by which its operators are known.
    """
    if not name.startswith("aten::"):
        return None
    if any(part in name for part in _OPTIMIZER):
        return "optimizer"
    if "attention" in name:
        return "attention"
    if any(part in name for part in _EMBEDDING):
        return "elementwise"
    if any(vocabulary in shape for shape in _dimensions(shapes)):
        return "head"
    if name in _PRODUCTS:
        return "body" if name in ("aten::mm", "aten::addmm", "aten::mkldnn_linear") else "attention"
    return "elementwise"


def _dimensions(shapes: Iterable[Any]) -> list[Sequence[int]]:
    """Shapes of tensors, those of lists of tensors among them."""
    found: list[Sequence[int]] = []
    for shape in shapes:
        if isinstance(shape, (list, tuple)):
            nested = shape and isinstance(shape[0], (list, tuple))
            found.extend(shape if nested else [shape])
    return found


def seconds_by_kind(step: Callable[[], float], vocabulary: int, device: torch.device) -> tuple[float, dict[str, float]]:
    """Profile one call of ``step``, which returns its seconds.

    Returns:
        Those seconds, and seconds by kind: an operator counts without those it calls. On CUDA they are the device's.
    """
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    with profile(activities=activities, record_shapes=True) as profiler:
        total = step()
    kinds = dict.fromkeys(KINDS, 0.0)
    for event in profiler.key_averages(group_by_input_shape=True):
        kind = kind_of(event.key, event.input_shapes or (), vocabulary)
        if kind is not None:
            spent = event.self_device_time_total if device.type == "cuda" else event.self_cpu_time_total
            kinds[kind] += spent / 1e6
    kinds["rest"] = max(0.0, total - sum(kinds.values()))
    return total, kinds
