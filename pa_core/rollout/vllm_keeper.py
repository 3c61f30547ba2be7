"""The keeper of one vLLM server: starts it, announces it while it is healthy, ends with it.

A small process beside the server, in this package's environment. The pool talks to the server itself; the keeper only
says in the store where it is, what it has loaded and that it lives. When the server dies the keeper ends with an
error, upon which whoever started the keeper may start another.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import multiprocessing
import os
import signal
import sys
import time
import uuid
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from pa_core.config import ModelConfig, TrainConfig
from pa_core.errors import EngineError, UserError
from pa_core.rollout.address import free_port, replica_host
from pa_core.rollout.client import PROBE_TIMEOUT_S
from pa_core.rollout.connect import open_session
from pa_core.rollout.process import ChildProcess, fair_threads, spawn, watch_parent
from pa_core.rollout.protocol import required_key
from pa_core.rollout.server import HEARTBEAT_S, read_run_config
from pa_core.rollout.vllm_client import VllmReplicaClient
from pa_core.rollout.vllm_command import Place, command, environment, vllm_python
from pa_core.store.objects import ObjectStore
from pa_core.store.registry import READY, Presence, ReplicaRecord, ReplicaRegistry

logger = logging.getLogger(__name__)

INDEX_VARIABLE = "PA_REPLICA_INDEX"
POLL_S = 0.25
STOP_GRACE_S = 4.0


def find_place(config: ModelConfig) -> Place:
    """Where the model is and what it runs on. Raises ModelError. Imports torch, so it is called in a process aside."""
    import torch

    from pa_core.model.loading import context_of, resolve_source

    source = resolve_source(config.path)
    return Place(source, context_of(source, config), not torch.accelerator.is_available())


def start_server(config: TrainConfig, place: Place, host: str, port: int, log_path: Path) -> ChildProcess:
    """Start vLLM under a guard, so that it never outlives this process. Raises ConfigError, EngineError."""
    index = int(os.environ.get(INDEX_VARIABLE, "0"))
    threads = config.engine.threads or fair_threads(config.engine.replicas)
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    line = command(config, vllm_python(config.engine.vllm), place, port, host)
    logger.info("starting vLLM (log: %s): %s", log_path, " ".join(line))
    # vLLM knows nothing of the guard, so a process of this package holds it.
    return spawn(
        [sys.executable, "-m", "pa_core.rollout.process", *line],
        log_path,
        environment(config, index, threads, cores),
    )


class Keeper:
    """Watches one server and speaks for it in the store."""

    def __init__(self, replica_id: str, registry: ReplicaRegistry, client: VllmReplicaClient, url: str) -> None:
        self._id = replica_id
        self._presence = Presence(registry, replica_id)
        self._client = client
        self._url = url
        self._incarnation = uuid.uuid4().hex
        self._ready = False
        self._version: int | None = None

    async def keep(self, server: ChildProcess, stop: asyncio.Event) -> None:
        """Announce the server until ``stop`` is set.

        Raises:
            EngineError: the server has ended by itself; the end of its log is in the message.
        """
        beat = asyncio.create_task(self._beat(server))
        try:
            while not stop.is_set():
                if (code := server.poll()) is not None:
                    raise EngineError(
                        f"vLLM of replica {self._id} ended with exit code {code}; the end of its log "
                        f"{server.log_path}:\n{server.tail(40)}"
                    )
                await asyncio.sleep(POLL_S)
        finally:
            beat.cancel()
            await asyncio.gather(beat, return_exceptions=True)
        # Only one that was asked to stop leaves; one whose server died must be seen to have died.
        await asyncio.to_thread(self._presence.withdraw)

    async def _beat(self, server: ChildProcess) -> None:
        """A heartbeat for every time the server answers; before its first answer, what it is busy with."""
        while True:
            try:
                if await self._client.alive(HEARTBEAT_S):
                    if not self._ready:
                        logger.info("replica %s is ready at %s", self._id, self._url)
                    self._ready = True
                    await self._announce(READY, await self._served_version())
                elif not self._ready:
                    await self._announce("starting", None, server.tail(1).strip()[:200])
            except UserError as error:
                logger.warning("heartbeat of replica %s failed: %s", self._id, error)
            await asyncio.sleep(HEARTBEAT_S)

    async def _served_version(self) -> int | None:
        """The version the server has, or had when it last said: while it loads it is alive but does not tell."""
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                self._version = await self._client.version()
        except TimeoutError:
            logger.debug("replica %s is busy", self._id)
        return self._version

    async def _announce(self, state: str, version: int | None, detail: str = "") -> None:
        record = ReplicaRecord(
            id=self._id,
            url=self._url,
            version=version,
            pid=os.getpid(),
            state=state,
            heartbeat=time.time(),
            engine="vllm",
            incarnation=self._incarnation,
            detail=detail,
        )
        await asyncio.to_thread(self._presence.announce, record)


async def _keep(store: ObjectStore, config: TrainConfig, replica_id: str, api_key: str, log_folder: Path) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as aside:
        place = await asyncio.get_running_loop().run_in_executor(aside, find_place, config.model)
    host = replica_host()
    port = free_port(host)
    url = f"http://{host}:{port}"
    server = start_server(config, place, host, port, log_folder / f"{replica_id}.vllm.log")
    try:
        async with open_session() as session:
            client = VllmReplicaClient(session, replica_id, url, api_key, store.url)
            await Keeper(replica_id, ReplicaRegistry(store), client, url).keep(server, stop)
    finally:
        await asyncio.to_thread(server.stop, STOP_GRACE_S)
        logger.info("replica %s has ended", replica_id)


def keep_replica(run_url: str, replica_id: str, log_folder: Path) -> None:
    """Keep one vLLM replica of the run at ``run_url`` until SIGTERM, SIGINT or the parent's death.

    Raises:
        ConfigError: no key in the environment, no readable run.json, or no environment of vLLM.
        EngineError: the server has ended by itself.
    """
    api_key = required_key()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    store = ObjectStore.open(run_url)
    asyncio.run(_keep(store, read_run_config(store), replica_id, api_key, log_folder))


def main() -> None:
    """``python -m pa_core.rollout.vllm_keeper --run-url URL --replica-id ID --log-folder FOLDER``."""
    watch_parent()
    parser = argparse.ArgumentParser(description="Keep one vLLM replica of a run.")
    parser.add_argument("--run-url", required=True, help="the run's folder in the store")
    parser.add_argument("--replica-id", required=True, help="name of the replica, for example r0")
    parser.add_argument("--log-folder", type=Path, default=Path("logs"), help="folder for vLLM's own log")
    arguments = parser.parse_args()
    try:
        keep_replica(arguments.run_url, arguments.replica_id, arguments.log_folder)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
