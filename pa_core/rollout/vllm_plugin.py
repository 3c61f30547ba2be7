"""vLLM's door to this package: its general plugin, and what its workers tell about the weights they have.

Runs inside vLLM's environment. vLLM calls :func:`register` in each of its processes; the transfer engine itself is
imported only where one is created.
"""

from __future__ import annotations

from typing import Any

BACKEND = "fsspec"


def register() -> None:
    """Entry point of the group ``vllm.general_plugins``: make the backend ``fsspec`` known."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:  # a process may load its plugins twice
        WeightTransferEngineFactory.register_engine(BACKEND, "pa_core.rollout.vllm_transfer", "StoreWeightTransfer")


class LoadedWeights:
    """Worker extension (``--worker-extension-cls``): a worker's own word on which weights it has verified."""

    weight_transfer_engine: Any

    def loaded_weights(self) -> dict[str, Any] | None:
        """``{"version": …, "weights_sha256": …}`` of the last whole load, or None before it and after a torn one."""
        loaded: dict[str, Any] | None = getattr(self.weight_transfer_engine, "loaded", None)
        return loaded
