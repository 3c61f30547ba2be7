"""Weights over a fabric that trainer and vLLM share (NCCL, HCCL), by vLLM's packed engine and its trainer side.

Each replica forms a group of its own with the trainer: the gate stays one per replica, and a replica that joins or is
restarted touches no other. What is sent is the policy in the trainer's memory, so it may only be sent while that is
the version a replica asks for: the trainer withdraws it before every optimizer step and offers it anew afterwards.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from pa_core.errors import ConfigError, EngineError
from pa_core.rollout.config import EngineConfig

_TRAINER_SIDES = {
    "nccl": ("cuda", "vllm.distributed.weight_transfer.nccl_engine", "NCCLTrainerInitInfo"),
    "hccl": ("npu", "vllm_ascend.distributed.weight_transfer.hccl_engine", "HCCLTrainerInitInfo"),
}


class Sender(Protocol):
    """The trainer's end of one replica's group."""

    def send_weights(self) -> None:
        """Send every parameter and have the replica load them."""

    def shutdown(self) -> None:
        """Leave the group."""


class ControlPlane:
    """vLLM's weight-update routes with the run's key, as its trainer side wants them (``VLLMWeightSyncClient``)."""

    def __init__(self, url: str, api_key: str, timeout_s: float) -> None:
        self._url = url
        self._headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
        self._timeout_s = timeout_s

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Have the replica's workers join the group."""
        self._post("init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        """Open an update."""
        self._post("start_weight_update", {})

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Tell the workers what will be sent; returns when they have received it."""
        self._post("update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Close the update."""
        self._post("finish_weight_update", {"weight_version": weight_version})

    def _post(self, route: str, body: dict[str, Any]) -> None:
        request = urllib.request.Request(f"{self._url}/{route}", json.dumps(body).encode(), self._headers)
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s):
                return
        except urllib.error.HTTPError as error:
            raise EngineError(f"{self._url}/{route} failed with status {error.code}: {error.read(500)!r}") from error
        except OSError as error:
            raise EngineError(f"{self._url}/{route} failed: {error}") from error


class FabricTransfer:
    """Sends the policy in memory to one replica after the other.

    Args:
        config: which fabric, and how many workers a replica has.
        model: the policy that the optimizer changes in place.
        join: makes the trainer's end of a replica's group; default: vLLM's trainer side.

    Raises:
        ConfigError: this machine lacks the device or the package that the fabric needs.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: torch.nn.Module,
        join: Callable[[ControlPlane], Sender] | None = None,
    ) -> None:
        self._config = config
        self._model = model
        self._join = join or self._vllm_trainer_side()
        self._senders: dict[str, Sender] = {}
        self._sending = threading.Lock()
        self._version: int | None = None

    def offer(self, version: int) -> None:
        """From now on the policy in memory is ``version`` and may be sent."""
        with self._alone():
            self._version = version

    def withdraw(self) -> None:
        """Before the policy in memory changes: wait for a replica that is receiving, and send no more."""
        with self._alone():
            self._version = None

    def send(self, version: int, url: str, api_key: str) -> None:
        """Send the policy to the replica at ``url``; blocks until it has loaded it.

        Raises:
            EngineError: the policy in memory is not ``version`` (any more), or the transfer failed; the replica then
                joins anew at the next attempt.
        """
        with self._alone():
            if self._version != version:
                raise EngineError(
                    f"version {version} cannot be sent over {self._config.weight_transfer}: the trainer's memory has "
                    f"{'a policy that is about to change' if self._version is None else f'version {self._version}'}"
                )
            try:
                if url not in self._senders:
                    self._senders[url] = self._join(ControlPlane(url, api_key, self._config.request_timeout_s))
                self._senders[url].send_weights()
            except EngineError:
                self._drop(url)
                raise
            except Exception as error:  # whatever the fabric's library raises
                self._drop(url)
                raise EngineError(f"{self._config.weight_transfer} transfer to {url} failed: {error}") from error

    def close(self) -> None:
        """Leave every group."""
        with self._alone():
            for url in list(self._senders):
                self._drop(url)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """While open, nothing else sends. A fabric that hangs must not hang the trainer."""
        limit = self._config.request_timeout_s
        if not self._sending.acquire(timeout=limit):
            raise EngineError(
                f"a replica has been receiving weights over {self._config.weight_transfer} for longer than "
                f"engine.request_timeout_s={limit:g} s"
            )
        try:
            yield
        finally:
            self._sending.release()

    def _drop(self, url: str) -> None:
        sender = self._senders.pop(url, None)
        if sender is not None:
            sender.shutdown()

    def _vllm_trainer_side(self) -> Callable[[ControlPlane], Sender]:
        """vLLM's own trainer side for the configured fabric."""
        backend = self._config.weight_transfer
        device, module, name = _TRAINER_SIDES[backend]
        trained_on = next(self._model.parameters()).device.type
        if trained_on != device:
            raise ConfigError(
                f"engine.weight_transfer={backend} needs a policy that is trained on a {device} device, and this one "
                f"is trained on {trained_on}; use engine.weight_transfer=fsspec"
            )
        try:
            init_info = getattr(importlib.import_module(module), name)
            factory = importlib.import_module("vllm.distributed.weight_transfer.factory").WeightTransferTrainerFactory
            source = importlib.import_module("vllm.distributed.weight_transfer.base").ModuleSource
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"engine.weight_transfer={backend} needs vLLM's trainer side in the trainer's own environment, which "
                f"cannot be imported ({error}); install {module.partition('.')[0].replace('_', '-')} there, or use "
                "engine.weight_transfer=fsspec"
            ) from error

        def join(control: ControlPlane) -> Sender:
            info = init_info(
                master_address=socket.gethostbyname(socket.gethostname()),
                master_port=_free_port(),
                world_size=1 + self._config.vllm.tensor_parallel,
                rank=0,
            )
            sender: Sender = factory.trainer_init(info, client=control, source=source(self._model))
            return sender

        return join


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
