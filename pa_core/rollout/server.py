"""The HTTP server of one replica: ``GET /health``, ``GET /metrics``, ``POST /generate``, ``POST /load``.

It binds to loopback or to ``PA_REPLICA_HOST``, answers only callers with the run's key, announces itself in the store
with a heartbeat, and withdraws when it ends. The engine computes in threads of its own, so the event loop stays
responsive.
"""

from __future__ import annotations

import argparse
import asyncio
import hmac
import json
import logging
import os
import secrets
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any

from aiohttp import web

from pa_core.config import TrainConfig
from pa_core.config_files import parse_config
from pa_core.errors import ConfigError, EngineError, UserError
from pa_core.rollout.address import replica_host
from pa_core.rollout.process import watch_parent
from pa_core.rollout.protocol import Engine, GenerateRequest, GenerateResponse, VersionMismatch, required_key
from pa_core.rollout.server_metrics import ReplicaMetrics
from pa_core.store.objects import ObjectStore
from pa_core.store.registry import READY, Presence, ReplicaRecord, ReplicaRegistry

logger = logging.getLogger(__name__)

HEARTBEAT_S = 2.0
"""Seconds between two announcements in the store."""

MAX_BODY_BYTES = 64 * 2**20

WEIGHTS_URL = "weights_url"
"""Key of run.json with the URL of the run whose versions are served, where they are not in the same folder."""
METRICS_PATH = "/metrics"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def _problem(status: int, message: str) -> web.Response:
    return web.json_response({"error": message}, status=status)


class ReplicaServer:
    """One replica: an engine behind HTTP.

    Args:
        replica_id: name in the store and in every answer.
        registry: where it announces itself.
        api_key: what callers must present as ``Authorization: Bearer <key>``.
    """

    def __init__(self, replica_id: str, registry: ReplicaRegistry, api_key: str) -> None:
        self._id = replica_id
        self._presence = Presence(registry, replica_id)
        self._api_key = api_key
        self._engine: Engine | None = None
        self._in_flight = 0
        self._digest: str | None = None
        self._url = ""
        self._runner: web.AppRunner | None = None
        self._incarnation = secrets.token_hex(8)
        self._metrics = ReplicaMetrics(self._version, lambda: self._in_flight)

    def attach(self, engine: Engine) -> None:
        """Start to serve with a loaded model."""
        self._engine = engine

    def application(self) -> web.Application:
        """The routes, behind the key."""
        app = web.Application(middlewares=[self._guard], client_max_size=MAX_BODY_BYTES)
        app.router.add_get("/health", self._health)
        app.router.add_get(METRICS_PATH, self._scrape)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/load", self._load)
        return app

    async def start(self) -> str:
        """Listen on a free port; returns the URL. Raises :class:`ConfigError` for a wrong ``PA_REPLICA_HOST``."""
        # handler_cancellation: a caller that went away frees its rows of the batch.
        self._runner = web.AppRunner(
            self.application(), handler_cancellation=True, access_log=None, shutdown_timeout=2.0
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, replica_host(), 0).start()
        host, port = self._runner.addresses[0][:2]
        self._url = f"http://{host}:{port}"
        return self._url

    async def stop(self) -> None:
        """Withdraw from the store, fail what is in flight, and close the connections."""
        # First: whoever gets an error from here on finds that the replica has left.
        try:
            await asyncio.to_thread(self._presence.withdraw)
        except UserError as error:
            logger.warning("replica %s could not withdraw: %s", self._id, error)
        if self._engine is not None:
            await asyncio.to_thread(self._engine.close)
        if self._runner is not None:
            await self._runner.cleanup()

    async def announce(self) -> None:
        """Write the replica's record once, unless it was withdrawn: url, state, version, heartbeat."""
        engine = self._engine
        version = None if engine is None else engine.version
        record = ReplicaRecord(
            id=self._id,
            url=self._url,
            version=version,
            weights_sha256=None if version is None else self._digest,
            heartbeat=time.time(),
            pid=os.getpid(),
            state="starting" if engine is None else READY,
            incarnation=self._incarnation,
            detail="loading the model" if engine is None else "",
        )
        await asyncio.to_thread(self._presence.announce, record)

    async def beat(self) -> None:
        """Announce for ever; a store that fails for a moment is reported and tried again."""
        while True:
            try:
                await self.announce()
            except UserError as error:
                logger.warning("heartbeat of replica %s failed: %s", self._id, error)
            await asyncio.sleep(HEARTBEAT_S)

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check the key, which metrics do without as vLLM's do; turn errors into JSON."""
        presented = request.headers.get("Authorization", "").encode()
        known = hmac.compare_digest(presented, f"Bearer {self._api_key}".encode())
        if not known and request.path != METRICS_PATH:
            return _problem(401, "missing or wrong API key")
        try:
            return await handler(request)
        except web.HTTPException as error:
            return _problem(error.status, error.reason)
        except VersionMismatch as error:
            return _problem(409, str(error))
        except UserError as error:
            return _problem(500, str(error))
        except Exception as error:
            logger.exception("%s %s failed", request.method, request.path)
            return _problem(500, f"{type(error).__name__}: {error}")

    def _version(self) -> int | None:
        return None if self._engine is None else self._engine.version

    def _ready(self) -> Engine:
        if self._engine is None:
            raise web.HTTPServiceUnavailable(reason=f"replica {self._id} is still loading its model")
        return self._engine

    async def _body(self, request: web.Request) -> dict[str, Any]:
        try:
            body = await request.json()
        except (json.JSONDecodeError, UnicodeDecodeError):
            raise web.HTTPBadRequest(reason="the body is not JSON") from None
        if not isinstance(body, dict):
            raise web.HTTPBadRequest(reason="the body is not a JSON object")
        return body

    async def _health(self, request: web.Request) -> web.Response:
        engine = self._engine
        return web.json_response(
            {
                "id": self._id,
                "state": "starting" if engine is None else "ready",
                "version": self._version(),
                "in_flight": self._in_flight,
            }
        )

    async def _scrape(self, request: web.Request) -> web.Response:
        return web.Response(body=self._metrics.text(), headers={"Content-Type": self._metrics.content_type})

    async def _generate(self, request: web.Request) -> web.Response:
        engine = self._ready()
        try:
            wanted = GenerateRequest.from_json(await self._body(request))
        except EngineError as error:
            return _problem(400, str(error))
        with self._metrics.request() as answered:
            future: Future[GenerateResponse] = engine.submit(wanted)
            self._in_flight += 1
            try:
                answer = await asyncio.wrap_future(future)
            finally:
                self._in_flight -= 1
            answered(answer)
        return web.json_response(answer.to_json())

    async def _load(self, request: web.Request) -> web.Response:
        engine = self._ready()
        version = (await self._body(request)).get("version")
        if not isinstance(version, int) or isinstance(version, bool) or version < 0:
            return _problem(400, f"version must be an integer from 0 on, got {version!r}")
        self._digest = digest = await asyncio.to_thread(engine.load, version)
        logger.info("replica %s has loaded version %s", self._id, version)
        return web.json_response({"version": version, "weights_sha256": digest})


def read_run_config(store: ObjectStore) -> TrainConfig:
    """The resolved config of a run. Raises :class:`ConfigError` where run.json is absent or is none."""
    if not store.exists("run.json"):
        raise ConfigError(f"{store.url}: run.json does not exist; is this the URL of a run?")
    try:
        tree = json.loads(store.read("run.json"))["config"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{store.url}/run.json has no readable config: {error}") from None
    return parse_config(tree)


def weights_store(store: ObjectStore) -> ObjectStore:
    """Where the policy versions are that a replica of this folder loads: here, or where run.json says."""
    return ObjectStore.open(json.loads(store.read("run.json")).get(WEIGHTS_URL) or store.url)


def build_engine(store: ObjectStore, config: TrainConfig, replica_id: str) -> Engine:
    """The engine that ``config.engine`` names, with its model loaded. Raises ModelError, StoreError."""
    from transformers.utils.logging import disable_progress_bar

    from pa_core.model.loading import load_policy
    from pa_core.rollout.embedded import EmbeddedEngine
    from pa_core.store.policy import PolicyReader
    from pa_core.store.weights import WeightStore

    # A log file is no terminal.
    disable_progress_bar()
    loaded = load_policy(config.model)
    reader = PolicyReader(WeightStore(weights_store(store)))
    targets = loaded.model.state_dict()

    def load_weights(version: int) -> str:
        return reader.load_into(version, targets).weights_sha256

    return EmbeddedEngine(
        loaded.model,
        loaded.eos_token_ids,
        load_weights,
        replica=replica_id,
        # The last bits of logits depend on what else is in the batch, and with them, now and then, a token.
        batch_groups=1 if config.deterministic else config.engine.batch_groups,
    )


async def _serve(store: ObjectStore, config: TrainConfig, replica_id: str, api_key: str) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    server = ReplicaServer(replica_id, ReplicaRegistry(store), api_key)
    url = await server.start()
    logger.info("replica %s listens on %s and loads %s", replica_id, url, config.model.path)
    beat = asyncio.create_task(server.beat())
    build = asyncio.create_task(asyncio.to_thread(build_engine, store, config, replica_id))
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({build, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if build.done():
            server.attach(build.result())
            await server.announce()
            logger.info("replica %s is ready", replica_id)
            await stopped
    finally:
        for task in (beat, stopped):
            task.cancel()
        await asyncio.gather(beat, stopped, return_exceptions=True)
        await server.stop()
        logger.info("replica %s has ended", replica_id)


def serve_replica(run_url: str, replica_id: str, guard_fd: int | None = None) -> None:
    """Serve one replica of the run at ``run_url`` until SIGTERM, SIGINT or the parent's death.

    Args:
        run_url: the run's folder in the store; its run.json holds the config.
        replica_id: name of the replica, for example ``r0``.
        guard_fd: end of a guard pipe to watch; default: the one that ``process.spawn`` passed, if any.

    Raises:
        ConfigError: no key in the environment, or no readable run.json.
        ModelError, StoreError: the model or the store cannot be read.
    """
    watch_parent(guard_fd)
    api_key = required_key()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    store = ObjectStore.open(run_url)
    asyncio.run(_serve(store, read_run_config(store), replica_id, api_key))


def main() -> None:
    """``python -m pa_core.rollout.server --run-url URL --replica-id ID``."""
    watch_parent()
    parser = argparse.ArgumentParser(description="Serve one replica of a run.")
    parser.add_argument("--run-url", required=True, help="the run's folder in the store")
    parser.add_argument("--replica-id", required=True, help="name of the replica, for example r0")
    arguments = parser.parse_args()
    try:
        serve_replica(arguments.run_url, arguments.replica_id)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        # A model that is still being read in a worker thread would hold up a normal exit.
        os._exit(error.exit_code)


if __name__ == "__main__":
    main()
