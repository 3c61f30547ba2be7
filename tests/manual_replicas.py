"""Replicas as real HTTP servers in this process, with engines that the test controls, and the pool before them."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future

import aiohttp
import numpy as np
import torch
from aiohttp import web

from pa_core.rollout.client import HttpReplicaClient, ReplicaClient
from pa_core.rollout.config import EngineConfig
from pa_core.rollout.pool import ReplicaPool
from pa_core.rollout.protocol import GenerateRequest, GenerateResponse, Generation, VersionMismatch
from pa_core.rollout.server import ReplicaServer
from pa_core.store.objects import ObjectStore
from pa_core.store.registry import ReplicaRegistry
from pa_core.store.weights import WeightStore

KEY = "secret"


class ManualEngine:
    """Answers a group when the test says so, or at once."""

    def __init__(self, name: str, weights: WeightStore, automatic: bool = True) -> None:
        self.name = name
        self.weights = weights
        self.automatic = automatic
        self.version: int | None = None
        self.pending: list[tuple[GenerateRequest, Future[GenerateResponse]]] = []
        self.served: list[str] = []
        self.may_load = threading.Event()
        self.may_load.set()
        self.digest: str | None = None
        self.failure: Exception | None = None
        self.wrong_version = 0

    def submit(self, request: GenerateRequest) -> Future[GenerateResponse]:
        if self.failure is not None:
            raise self.failure
        if request.version != self.version:
            raise VersionMismatch(f"{self.name} has loaded {self.version}")
        future: Future[GenerateResponse] = Future()
        self.pending.append((request, future))
        if self.automatic:
            self.answer()
        return future

    def answer(self) -> None:
        request, future = self.pending.pop(0)
        if not future.set_running_or_notify_cancel():
            return
        self.served.append(request.group_id)
        version = request.version + self.wrong_version
        one = Generation(np.array([1], np.int32), np.array([-0.5], np.float32), "stop", ((version, 1),))
        future.set_result(GenerateResponse(request.group_id, version, [one] * request.samples, 1.0, 2.0, self.name))

    def load(self, version: int) -> str:
        self.version = None
        assert self.may_load.wait(20)
        self._wait_until_idle()
        manifest = self.weights.manifest(version)
        assert manifest is not None
        self.version = version
        return self.digest or manifest.weights_sha256

    def _wait_until_idle(self) -> None:
        """As every engine does: a request that the pool gave up may still be on its way out."""
        deadline = time.monotonic() + 3
        while not all(future.done() for _, future in list(self.pending)):
            assert time.monotonic() < deadline, f"{self.name} is asked to load with requests in flight"
            time.sleep(0.01)

    def close(self) -> None:
        for _, future in self.pending:
            future.cancel()


class CutRegistry(ReplicaRegistry):
    """A registry that does not hear any more that a replica withdraws, once its line is cut."""

    cut = False

    def withdraw(self, replica_id: str) -> None:
        if not self.cut:
            super().withdraw(replica_id)


class House:
    """Replicas, their pool, and the store they share."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        self.engines: list[ManualEngine] = []
        self.servers: list[ReplicaServer] = []
        self.beats: list[asyncio.Task[None]] = []
        self.registries: list[CutRegistry] = []
        self.pool: ReplicaPool

    async def add(self, name: str, automatic: bool = True) -> ManualEngine:
        """One more replica, serving and announced."""
        registry = CutRegistry(self.store)
        server = ReplicaServer(name, registry, KEY)
        await server.start()
        engine = ManualEngine(name, WeightStore(self.store), automatic)
        server.attach(engine)
        self.registries.append(registry)
        self.servers.append(server)
        self.engines.append(engine)
        self.beats.append(asyncio.create_task(server.beat()))
        return engine

    async def leave(self, index: int) -> None:
        """A clean stop."""
        self.beats[index].cancel()
        await self.servers[index].stop()

    async def vanish(self, index: int) -> None:
        """End a server that leaves its record behind, as a crash would."""
        self.registries[index].cut = True
        await self.leave(index)

    def publish(self, *versions: int) -> None:
        for version in versions:
            WeightStore(self.store).publish(version, {"w": torch.full((2,), float(version))}, {})


async def mute(server: ReplicaServer) -> int:
    """Close a server's port while its process goes on; returns the port."""
    assert server._runner is not None
    port = int(server._runner.addresses[0][1])
    await server._runner.cleanup()
    return port


async def unmute(server: ReplicaServer, port: int) -> None:
    """Let a muted server listen again."""
    server._runner = web.AppRunner(server.application(), handler_cancellation=True)
    await server._runner.setup()
    await web.TCPSite(server._runner, "127.0.0.1", port).start()


def plain_client(
    session: aiohttp.ClientSession, store_url: str, replica_id: str, engine: str, url: str, api_key: str
) -> ReplicaClient:
    """The embedded engine's client, whatever a record or ``engine.urls`` say."""
    return HttpReplicaClient(session, replica_id, url, api_key)


@contextlib.asynccontextmanager
async def house(count: int = 2, automatic: bool = True, start: bool = True, **config: object) -> AsyncIterator[House]:
    store = ObjectStore.open(f"memory://pool-{time.monotonic_ns()}")
    place = House(store)
    for index in range(count):
        await place.add(f"r{index}", automatic)
    settings = EngineConfig.model_validate({"replicas": count, "batch_groups": 1, **config})
    ids = [f"r{index}" for index in range(settings.replicas)]
    place.pool = ReplicaPool(store, ids, KEY, settings, make_client=plain_client)
    place.publish(0, 1)
    try:
        if start:
            await place.pool.start()
        yield place
    finally:
        await place.pool.close()
        for index in range(len(place.servers)):
            await place.leave(index)


def group(name: str, version: int = 0) -> GenerateRequest:
    return GenerateRequest(name, np.array([1, 2, 3], np.int32), 2, 1.0, 4, 0, version)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(40):
            await test()

    asyncio.run(bounded())


async def until(condition: Callable[[], object], what: str) -> None:
    for _ in range(600):
        if condition():
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"timed out waiting until {what}")
