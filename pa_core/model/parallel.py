"""How a model lies on several devices: tensor parallel inside its layers, FSDP2 around them, both on one mesh.

The mesh has two dimensions: along ``fsdp`` every process has other samples and a part of every weight; along ``tp``
processes compute the same samples together, each with a part of every layer (by the library's own plan). Parameters
are DTensors that know their place, so that a tensor is spread, gathered and stored the same way in every layout.

Gradients are sums: FSDP adds what its processes have computed and divides by nothing. A parameter that ``tp`` leaves
whole has a gradient on every one of its processes; :func:`join_replicas` makes them one.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel
from transformers.integrations.tensor_parallel import apply_tensor_parallelism
from transformers.modeling_layers import GradientCheckpointingLayer

from pa_core.errors import ConfigError, ModelError
from pa_core.model.dtensors import local, split_over_tp

# Gathering a tensor that both dimensions split takes one step per dimension, which torch remarks on every time.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)

_PARTIAL_GRADIENT = "replicated_with_grad_allreduce"
"""The library's style of a weight that every process has whole and applies to its own heads only."""

_STYLES = frozenset(
    {"colwise", "rowwise", "colwise_gather_output", "rowwise_split_input", "embedding_rowwise", _PARTIAL_GRADIENT}
)


@dataclass(frozen=True)
class Layout:
    """This process's device and its place among the others.

    Attributes:
        device: where models and batches are.
        mesh: dimensions ``fsdp`` and ``tp``; None for a single process.
    """

    device: torch.device
    mesh: DeviceMesh | None = None

    def size(self, dimension: str) -> int:
        """Processes along ``fsdp`` or ``tp``."""
        return 1 if self.mesh is None else self.mesh[dimension].size()

    def rank(self, dimension: str) -> int:
        """This process's number along ``fsdp`` or ``tp``."""
        return 0 if self.mesh is None else self.mesh[dimension].get_local_rank()

    @property
    def leads(self) -> bool:
        """Whether this is the process that does what is done once."""
        return self.mesh is None or dist.get_rank() == 0

    def gathered(self, values: Sequence[float]) -> list[list[float]]:
        """``values`` of every process along ``fsdp``, in order; the same everywhere."""
        if self.mesh is None:
            return [list(values)]
        own = torch.tensor(values, dtype=torch.float64, device=self.device)
        parts = [torch.empty_like(own) for _ in range(self.size("fsdp"))]
        dist.all_gather(parts, own, group=self.mesh.get_group("fsdp"))
        return [part.tolist() for part in parts]


def training_device(setting: str) -> torch.device:
    """The device of this process, by ``trainer.device`` and the process's number on its host.

    Raises:
        ConfigError: there is no such device, or not one for every process of this host.
    """
    if importlib.util.find_spec("torch_npu") is not None:
        importlib.import_module("torch_npu")
    kind = setting
    if setting == "auto":
        kind = next((name for name in ("cuda", "npu") if _devices(name)), "cpu")
    if kind == "cpu":
        return torch.device("cpu")
    number, found = int(os.environ.get("LOCAL_RANK", "0")), _devices(kind)
    if number >= found:
        raise ConfigError(
            f"trainer.device={setting}: process {number} of this host needs {kind}:{number}, and the host has "
            f"{found} {kind} device(s); lower parallel.fsdp or parallel.tp, or set trainer.device=cpu"
        )
    device = torch.device(kind, number)
    getattr(torch, kind).set_device(device)
    return device


def _devices(kind: str) -> int:
    module = getattr(torch, kind, None)
    return int(module.device_count()) if module is not None and module.is_available() else 0


class Spread(nn.Module):
    """A model on the mesh. Calling it runs ``function(model, …)`` as one forward pass, weights gathered as needed.

    Attributes:
        model: the library's model; its parameters are this process's parts.
        partial: names of whole parameters whose gradient here covers this process's heads only.
    """

    def __init__(self, model: PreTrainedModel, function: Callable[..., Any], layout: Layout) -> None:
        """Lay out ``model``, which is on the meta device; its tensors are uninitialised afterwards.

        Raises:
            ModelError: the model cannot be split as the layout wants.
        """
        super().__init__()
        assert layout.mesh is not None
        self.model = model
        self.partial: frozenset[str] = frozenset()
        self._function = function
        if layout.size("tp") > 1:
            self.partial = _split_layers(model, layout.mesh["tp"])
        # One layer at a time exists whole, and only until it is sharded.
        fsdp = layout.mesh["fsdp"] if layout.size("fsdp") > 1 else None
        for layer in [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]:
            layer.to_empty(device=layout.device)
            if fsdp is not None:
                _shard(layer, fsdp, keep=False)
        for module in model.modules():
            own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
            if any(tensor.is_meta for tensor in own):
                module.to_empty(device=layout.device, recurse=False)
        model.tie_weights()
        if fsdp is not None:
            # A trained model needs embedding and head again at once in its backward pass.
            _shard(self, fsdp, keep=any(parameter.requires_grad for parameter in model.parameters()))

    def forward(self, *arguments: Any) -> Any:
        """``function(model, *arguments)``."""
        return self._function(self.model, *arguments)

    def free(self) -> None:
        """After a forward pass without backward: give back what was gathered."""
        if isinstance(self, FSDPModule):
            self.reshard()


def _shard(module: nn.Module, mesh: DeviceMesh, *, keep: bool) -> None:
    fully_shard(module, mesh=mesh, reshard_after_forward=not keep)
    assert isinstance(module, FSDPModule)
    # The sum as it is: gradients are divided once, when the iteration's denominator is known. Without the second
    # call a factor of 1 is a kind of reduction that only NCCL has.
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)


def _split_layers(model: PreTrainedModel, mesh: DeviceMesh) -> frozenset[str]:
    """Split the layers by the model's own plan; the names of whole parameters whose gradient will be partial."""
    plan = dict(model.tp_plan or {})
    _require_plan(model, plan, mesh.size())
    parameters = {name for name, _ in model.named_parameters()}
    steps: dict[str, str] = {}
    partial = set()
    for path, module in model.named_modules():
        style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", path))
        if style is None:
            continue
        own = [f"{path}.{name}" for name, _ in module.named_parameters(recurse=False)]
        if style == _PARTIAL_GRADIENT:
            # The library would add gradients up after every backward pass, what was accumulated before included.
            partial |= set(own)
            continue
        # A head that is tied to the embedding is spread as the embedding.
        steps |= {name: style for name in own if name in parameters}
        if module is not model.get_output_embeddings():
            steps[path] = style
    apply_tensor_parallelism(model, mesh, steps)
    return frozenset(partial)


def _require_plan(model: PreTrainedModel, plan: Mapping[str, str], size: int) -> None:
    name, config = type(model).__name__, model.config.get_text_config()
    fix = "use parallel.fsdp instead"
    if not any(style.startswith("colwise") and path.count(".") > 1 for path, style in plan.items()):
        raise ModelError(f"parallel.tp={size}: the library has no tensor-parallel plan for {name}; {fix}")
    unknown = sorted(set(plan.values()) - _STYLES)
    if unknown:
        raise ModelError(f"parallel.tp={size}: the plan of {name} has {', '.join(unknown)}, which is not tested; {fix}")
    heads = {key: getattr(config, key, None) for key in ("num_attention_heads", "num_key_value_heads")}
    for key, count in heads.items():
        if count is not None and count % size:
            raise ModelError(f"parallel.tp={size}: must divide the model's {key}={count}; choose another, or {fix}")


@torch.no_grad()
def fill(
    models: Sequence[nn.Module],
    names: Iterable[str],
    source: Mapping[str, Tensor] | None,
    layout: Layout,
    progress: Callable[[], None] = lambda: None,
) -> None:
    """Set tensors of laid-out models, one after the other, from whole ones that the leading process has.

    Args:
        models: of the same structure; the first one's dtype is that of ``source``, the others may have their own.
        names: parameters and buffers; the same on every process.
        source: on the leading process, at least ``names``.
        progress: called for every tensor.

    Raises:
        ModelError: a tensor has another shape than in the model.
    """
    tensors = [dict(model.named_parameters()) | dict(model.named_buffers()) for model in models]
    for name in names:
        progress()
        target = tensors[0][name]
        full = torch.empty(target.shape, dtype=target.dtype, device=layout.device)
        if source is not None:
            if source[name].shape != full.shape:
                raise ModelError(f"{name} is {tuple(source[name].shape)} there and {tuple(full.shape)} in the model")
            full.copy_(source[name])
        dist.broadcast(full, src=0)
        for found in tensors:
            own = found[name]
            part = full
            if isinstance(own, DTensor):
                part = local(distribute_tensor(full, own.device_mesh, own.placements, src_data_rank=None))
            local(own.detach()).copy_(part)


@torch.no_grad()
def join_replicas(
    gradients: Mapping[str, Tensor], parameters: Mapping[str, Tensor], partial: frozenset[str], layout: Layout
) -> None:
    """Make the gradients of parameters that ``tp`` leaves whole the same along ``tp``, in place.

    They are computed from the same numbers and differ, if at all, by rounding, which would let the replicas drift
    apart: their mean is taken. Where each process saw its own heads only (``partial``), it is the sum.

    Args:
        gradients: local gradients by name. parameters: the parameters that they are of.
    """
    size = layout.size("tp")
    if size == 1:
        return
    assert layout.mesh is not None
    for name, gradient in gradients.items():
        if not split_over_tp(parameters[name]):
            dist.all_reduce(gradient, group=layout.mesh.get_group("tp"))
            if name not in partial:
                gradient.div_(size)


@torch.no_grad()
def total_norm(gradients: Mapping[str, Tensor], parameters: Mapping[str, Tensor], layout: Layout) -> Tensor:
    """Euclidean norm of the whole gradient, from every process's local parts; the same everywhere."""
    if layout.mesh is None:
        return torch.nn.utils.get_total_norm(list(gradients.values()))
    counted = [
        gradient
        for name, gradient in gradients.items()
        if gradient.numel() and (layout.rank("tp") == 0 or split_over_tp(parameters[name]))
    ]
    own = torch.nn.utils.get_total_norm(counted) if counted else torch.zeros(())
    square = own.to(layout.device, torch.float64).square()
    dist.all_reduce(square)
    return square.sqrt().float()
