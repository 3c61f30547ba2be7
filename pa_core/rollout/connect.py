"""From a replica's engine to the client that talks to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import aiohttp

from pa_core.errors import EngineError
from pa_core.rollout.client import HttpReplicaClient, ReplicaClient

if TYPE_CHECKING:
    from pa_core.rollout.fabric import FabricTransfer


KEEP_ALIVE_S = 2.0
"""Seconds that an idle connection is kept: fewer than any server (vLLM: 5), or a request could meet its closing."""


def open_session() -> aiohttp.ClientSession:
    """The one session for all replicas of a pool, without a total time-out: deadlines belong to the pool."""
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=5.0),
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
    )


class Connect(Protocol):
    """How a pool gets a client for a replica: :func:`connect`, or what a test puts in its place."""

    def __call__(
        self, session: aiohttp.ClientSession, store_url: str, replica_id: str, engine: str, url: str, api_key: str
    ) -> ReplicaClient:
        """A client for the replica at ``url``."""


def connect(
    session: aiohttp.ClientSession,
    store_url: str,
    replica_id: str,
    engine: str,
    url: str,
    api_key: str,
    *,
    fabric: FabricTransfer | None = None,
) -> ReplicaClient:
    """A client for the replica at ``url``; nothing is sent yet.

    Args:
        session: shared by all replicas, without a total time-out.
        store_url: the run's folder, from which the replica loads weights.
        engine: ``embedded`` or ``vllm``, as the replica's record says.
        api_key: the run's key.
        fabric: sends weights to vLLM replicas; without it they read them from the store.

    Raises:
        EngineError: the engine is unknown, so the replica was started by another release.
    """
    if engine == "embedded":
        return HttpReplicaClient(session, replica_id, url, api_key)
    if engine == "vllm":
        from pa_core.rollout.vllm_client import VllmReplicaClient

        return VllmReplicaClient(session, replica_id, url, api_key, store_url, fabric)
    raise EngineError(f"replica {replica_id} runs engine {engine!r}; this release knows embedded and vllm")
