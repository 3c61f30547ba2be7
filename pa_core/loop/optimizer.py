"""AdamW over this process's parts of the parameters, whatever the layout.

AdamW goes element by element, so the parts are given to it as plain tensors. What is not element by element, the
gradient's norm, is taken over all processes. Its state is stored as what it is a part of, so that it can be loaded
into another layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from pa_core.config import OptimizerConfig
from pa_core.model.dtensors import laid_out_like, local, local_gradient
from pa_core.model.parallel import Layout, join_replicas, total_norm
from pa_core.store.dcp import load_tensors, save_tensors
from pa_core.store.objects import ObjectStore
from pa_core.store.shards import StoredFile

_RANDOM = "rng"


class Optimizer:
    """AdamW and what belongs to one step of it.

    Args:
        parameters: what is trained, by name; gradients are theirs.
        partial: names of parameters that every process along ``tp`` has whole, with a gradient of its heads only.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        parameters: Mapping[str, nn.Parameter],
        layout: Layout,
        partial: frozenset[str] = frozenset(),
    ) -> None:
        self._config = config
        self._parameters = parameters
        self._layout = layout
        self._partial = partial
        self._parts = {
            name: parameter if layout.mesh is None else nn.Parameter(local(parameter.detach()))
            for name, parameter in parameters.items()
        }
        self._adamw = torch.optim.AdamW(
            self._parts.values(),
            lr=config.learning_rate,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=layout.device.type in ("cpu", "cuda"),
        )

    def clear(self) -> None:
        """Forget the gradients."""
        for name, parameter in self._parameters.items():
            parameter.grad = self._parts[name].grad = None

    def normalise(self, denominator: float) -> float | None:
        """Divide the gradients by ``denominator`` and clip them; their norm before that, None without a gradient."""
        for name, parameter in self._parameters.items():
            self._parts[name].grad = local_gradient(parameter)
        gradients = {name: part.grad for name, part in self._parts.items() if part.grad is not None}
        if not gradients:
            return None
        torch._foreach_div_(list(gradients.values()), denominator)
        join_replicas(gradients, self._parameters, self._partial, self._layout)
        norm = total_norm(gradients, self._parameters, self._layout)
        torch.nn.utils.clip_grads_with_norm_(self._parts.values(), self._config.max_grad_norm, norm)
        return float(norm)

    def step(self, learning_rate: float) -> None:
        """Step along the normalised gradients."""
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        self._adamw.step()

    def save(self, store: ObjectStore, folder: str) -> list[StoredFile]:
        """Store the state, and the random generator's; every process writes its parts. The files, on the first one."""
        tensors = {_RANDOM: torch.get_rng_state()}
        for name, part in self._parts.items():
            for field, value in self._adamw.state.get(part, {}).items():
                tensors[f"{name}/{field}"] = self._as_whole(name, value)
        return save_tensors(store, folder, tensors)

    def load(self, store: ObjectStore, folder: str, files: Sequence[StoredFile]) -> None:
        """Take over what :meth:`save` has stored, in this or another layout; every process reads its parts."""

        def empty(key: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
            name, _, _ = key.rpartition("/")
            if key == _RANDOM or shape != self._parameters[name].shape:
                return torch.empty(shape, dtype=dtype)
            return self._as_whole(name, torch.empty_like(self._parts[name], dtype=dtype, requires_grad=False))

        tensors = load_tensors(store, folder, files, empty)
        torch.set_rng_state(tensors.pop(_RANDOM))
        self._adamw.state.clear()
        for key, value in tensors.items():
            name, _, field = key.rpartition("/")
            self._adamw.state[self._parts[name]][field] = local(value)

    def _as_whole(self, name: str, value: Tensor) -> Tensor:
        """A state tensor of ``name``, as part of a whole where it has the parameter's shape."""
        part = self._parts[name]
        return laid_out_like(value, self._parameters[name]) if value.shape == part.shape else value
