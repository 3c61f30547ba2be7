"""LoRA: a policy of which only low-rank factors are trained (arXiv 2106.09685), by peft.

peft puts its layers into the model itself, which stays the library's own class: attention, packing and
log-probabilities do not notice. With the adapter off it is the initial model, hence the reference without a copy.
There is no dropout, because log-probabilities must be those of the distribution that was sampled from.

The factors are kept in peft's types: float32, also under a bfloat16 base.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager

import peft
import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from pa_core.config import LoraConfig
from pa_core.errors import ModelError

CONFIG_FILE = "adapter_config.json"
_NAME = "default"
_PREFIX = "base_model.model."


class Adapter:
    """The adapter of a policy; its tensors are named as peft stores them.

    Attributes:
        scaling: factor of B A.
        pairs: for each target weight, by its name in the plain model, the names of its tensors A and B.
        parameters: the trained parameters, by name.
    """

    def __init__(self, policy: PreTrainedModel, config: LoraConfig, seed: int) -> None:
        """Put an adapter into ``policy``, in place: A random by ``seed``, B zero, everything else frozen.

        Raises:
            ModelError: the policy has no such modules; names those it has.
        """
        _require_modules(policy, config)
        settings = peft.LoraConfig(
            task_type=peft.TaskType.CAUSAL_LM,
            r=config.rank,
            lora_alpha=config.alpha,
            lora_dropout=0.0,
            target_modules=config.target_modules,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self._peft = peft.get_peft_model(policy, settings, adapter_name=_NAME)
        self._policy = policy
        self.scaling = config.alpha / config.rank
        self._layers = {name: module for name, module in policy.named_modules() if isinstance(module, LoraLayer)}
        self.pairs: dict[str, tuple[str, str]] = {}
        self.parameters: dict[str, nn.Parameter] = {}
        for name, layer in self._layers.items():
            a, b = (f"{_PREFIX}{name}.{factor}.weight" for factor in ("lora_A", "lora_B"))
            self.pairs[f"{name}.weight"] = (a, b)
            self.parameters |= {a: layer.lora_A[_NAME].weight, b: layer.lora_B[_NAME].weight}

    def tensors(self) -> dict[str, Tensor]:
        """The live tensors, by name: A ``[rank, in]`` and B ``[out, rank]`` of each target."""
        return {name: parameter.detach() for name, parameter in self.parameters.items()}

    def base_tensors(self) -> dict[str, Tensor]:
        """The live, frozen tensors of the plain model, by its own names."""
        return {
            name.replace(".base_layer.", "."): tensor
            for name, tensor in self._policy.state_dict().items()
            if ".lora_" not in name
        }

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over the values of ``tensors``, which must have exactly this adapter's names and shapes."""
        if tensors.keys() != self.parameters.keys():
            wrong = sorted(tensors.keys() ^ self.parameters.keys())
            raise ModelError(f"lora: the stored adapter has other tensors than the configured one, e.g. {wrong[0]}")
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(tensors[name])

    def off(self) -> AbstractContextManager[None]:
        """While open, the policy is the initial model."""
        off: AbstractContextManager[None] = self._peft.disable_adapter()
        return off

    @contextlib.contextmanager
    def swapped(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """While open, the policy's adapter has ``tensors`` for its own, without a copy; not for backward passes."""
        own = self.tensors()
        self._point_to(tensors)
        try:
            yield
        finally:
            self._point_to(own)

    def _point_to(self, tensors: Mapping[str, Tensor]) -> None:
        for name, parameter in self.parameters.items():
            parameter.data = tensors[name]

    def files(self) -> dict[str, bytes]:
        """What peft needs beside the tensors to load them: its ``adapter_config.json``."""
        settings = self._peft.peft_config[_NAME].to_dict() | {"inference_mode": True}
        plain = {key: sorted(value) if isinstance(value, set) else value for key, value in settings.items()}
        return {CONFIG_FILE: json.dumps(plain, indent=2, sort_keys=True).encode()}

    @torch.no_grad()
    def fold(self, read: Callable[[str], Tensor]) -> None:
        """Make the policy a plain model again, with ``read(name)`` for each target weight; this object is spent."""
        for name, layer in self._layers.items():
            layer.base_layer.weight.copy_(read(f"{name}.weight"))
        self._peft.unload()


def _require_modules(policy: PreTrainedModel, config: LoraConfig) -> None:
    """Raise :class:`ModelError` unless every target names a linear layer that is not the output head."""
    head = policy.get_output_embeddings()
    linear = [name for name, module in policy.named_modules() if type(module) is nn.Linear and module is not head]
    wanted = [] if config.target_modules == "all-linear" else config.target_modules
    absent = [name for name in wanted if not any(f".{path}".endswith(f".{name}") for path in linear)]
    if absent or not linear:
        known = sorted({path.rsplit(".", 1)[-1] for path in linear})
        fix = (
            f"it has {', '.join(known)}. Name some of these, or use all-linear" if known else "remove the lora section"
        )
        raise ModelError(
            f"lora.target_modules: {type(policy).__name__} has no linear layer "
            f"{', '.join(map(repr, absent)) or 'at all'} that can get an adapter; {fix}"
        )
