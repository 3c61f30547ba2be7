"""Weights from the store straight into a vLLM worker: the weight-transfer backend ``fsspec``.

Runs inside a vLLM worker. Every file of a version is verified before the first tensor is touched, so a version that
is damaged leaves the worker with its old weights. Tensors are then mapped, not read, and handed to the model layer
by layer: beyond the files (in place on a local store, temporary copies otherwise) about one layer is held twice.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from pa_core.errors import StoreError
from pa_core.store.objects import ObjectStore
from pa_core.store.policy import Delivery, PolicyReader, layer_of
from pa_core.store.weights import WeightStore


@dataclass
class StoreInitInfo(WeightTransferInitInfo):
    """Nothing is set up in advance: the store is found by the URL that comes with every update."""


@dataclass
class StoreUpdateInfo(WeightTransferUpdateInfo):
    """Which weights to load.

    Attributes:
        store_url: the run's folder in the store.
        version: the published policy version.
        weights_sha256: digest that the version must have.
    """

    store_url: str
    version: int
    weights_sha256: str


class StoreWeightTransfer(WeightTransferEngine[StoreInitInfo, StoreUpdateInfo]):
    """Loads a published version in place.

    Attributes:
        loaded: ``{"version", "weights_sha256"}`` of the weights in memory; None before the first load and after one
            that broke off in the middle.
    """

    init_info_cls = StoreInitInfo
    update_info_cls = StoreUpdateInfo

    def __init__(
        self, config: WeightTransferConfig, vllm_config: Any, device: torch.device, model: torch.nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self.loaded: dict[str, Any] | None = None
        self._readers: dict[str, PolicyReader] = {}
        self._layers_by_name = False

    def init_transfer_engine(self, init_info: StoreInitInfo) -> None:
        """Nothing to set up."""

    def start_weight_update(self) -> None:
        """Touch nothing yet: a version that turns out damaged must leave the old one in place."""

    def finish_weight_update(self) -> None:
        """Nothing is left to do: :meth:`receive_weights` ends with whole weights or raises."""

    def shutdown(self) -> None:
        """Nothing is held between updates."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load a version; :class:`StoreUpdateInfo` has the keys of ``update_info``."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: StoreUpdateInfo) -> None:
        """Verify the version, then load it.

        Raises:
            StoreError: it is missing, damaged, has another digest, or does not cover the model. In the last case
                the weights are torn and :attr:`loaded` is None; in the others they are the old ones.
        """
        reader = self._reader(update_info.store_url)
        with _every_core(), reader.open(update_info.version, whole=not self._layers_by_name) as delivery:
            manifest = delivery.manifest
            if manifest.weights_sha256 != update_info.weights_sha256:
                raise StoreError(
                    f"version {manifest.version} has digest {manifest.weights_sha256}, not the expected "
                    f"{update_info.weights_sha256}"
                )
            self.loaded = None
            wanted = self._wanted(delivery)
            initialize_layerwise_reload(self.model)
            try:
                done = self.model.load_weights(_by_layer(delivery))
            finally:
                finalize_layerwise_reload(self.model, self.model_config)
            missing = wanted - (wanted if done is None else set(done))
            if missing:
                raise StoreError(
                    f"version {manifest.version} does not cover the model: {len(missing)} parameters were not loaded, "
                    f"among them {', '.join(sorted(missing)[:3])}"
                )
        self.loaded = {"version": manifest.version, "weights_sha256": manifest.weights_sha256}

    def _reader(self, store_url: str) -> PolicyReader:
        """The reader of a run, which remembers what this model has; only one run's can be right about that."""
        if store_url not in self._readers:
            self._readers = {store_url: PolicyReader(WeightStore(ObjectStore.open(store_url)), whole_layers=True)}
        return self._readers[store_url]

    def _wanted(self, delivery: Delivery) -> set[str]:
        """The model's parameters that a delivery has to load: all, or those of the layers it has.

        Also finds out whether vLLM gives the layers their published names; otherwise parameters of a layer cannot be
        told, and every delivery has to be whole.
        """
        parameters = {name: layer_of(name) for name, _ in self.model.named_parameters()}
        layers = {layer_of(name) for name in delivery.table.entries}
        if not delivery.whole:
            return {name for name, layer in parameters.items() if layer in layers}
        self._layers_by_name = layers - {None} <= set(parameters.values())
        return set(parameters)


@contextlib.contextmanager
def _every_core() -> Iterator[None]:
    """Let this thread, and those it starts, use all cores: nothing is generated meanwhile, and digests take time."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    bound = os.sched_getaffinity(0)
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    try:
        yield
    finally:
        os.sched_setaffinity(0, bound)


def _by_layer(delivery: Delivery) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors by their published names, in the order of the layers; tied ones under each of their names."""
    owners = {name: name for name in delivery.table.entries} | dict(delivery.table.tied)
    for name in sorted(owners, key=_natural):
        yield name, delivery.read(owners[name])


def _natural(name: str) -> list[tuple[int, str]]:
    """A sort key that puts layer 2 before layer 10."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)]
