"""How the processes of a run that trains on several devices find each other.

``pa train`` is the first process itself and starts the others on its host, under the same guard as replicas: none
outlives it. Where ``RANK`` is set, torchrun or another launcher has started all of them, on one or several hosts, and
each takes its place.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from pa_core.config import ParallelConfig, TrainConfig
from pa_core.config_files import parse_config
from pa_core.errors import ConfigError, TrainingError
from pa_core.loop.learner import Learner
from pa_core.loop.ranks import Ranks
from pa_core.loop.run import Run
from pa_core.loop.signals import StopSignals
from pa_core.model.parallel import Layout, training_device
from pa_core.rollout.process import ChildProcess, spawn, trainer_threads
from pa_core.rollout.supervisor import exit_phrase

log = logging.getLogger(__name__)

STARTUP = timedelta(minutes=10)
_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "npu": "cpu:gloo,npu:hccl"}
_CONFIG_KEY = "config"
_STOP_S = 5.0


class Fellows:
    """The other training processes that this one has started; none where a launcher did."""

    def __init__(self) -> None:
        self.processes: dict[int, ChildProcess] = {}

    def failure(self) -> str | None:
        """Who died and how, with the end of its log; None while all of them run."""
        for number, process in self.processes.items():
            code = process.poll()
            if code is not None:
                tail = process.tail() or "(nothing)"
                return f"training process {number} ended ({exit_phrase(code)}); its log ({process.log_path}):\n{tail}"
        return None

    def start(self, run: Run, port: int) -> None:
        """Start one process per device but the first."""
        count = run.config.parallel.processes
        for number in range(1, count):
            env = {
                "RANK": str(number),
                "LOCAL_RANK": str(number),
                "WORLD_SIZE": str(count),
                "LOCAL_WORLD_SIZE": str(count),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "PYTHONUNBUFFERED": "1",
            }
            command = [sys.executable, "-m", "pa_core.cli", "train", "--run-url", run.url]
            self.processes[number] = spawn(command, run.log_folder / f"rank{number}.log", env)

    def kill(self) -> None:
        """End them at once."""
        for process in self.processes.values():
            process.signal(signal.SIGKILL)  # they leave the ordinary signals to the first process

    def stop(self, *, at_once: bool) -> None:
        """Wait for them to end, and end those that do not."""
        deadline = time.monotonic() + (0 if at_once else _STOP_S)
        while any(process.poll() is None for process in self.processes.values()) and time.monotonic() < deadline:
            time.sleep(0.05)
        self.kill()
        for process in self.processes.values():
            process.stop(0)


@contextmanager
def joined(run: Run, signals: StopSignals) -> Iterator[tuple[Layout, Ranks | None]]:
    """In the first process: its layout and its channel to the others, which end with the block.

    Raises:
        ConfigError: a launcher has started another number of processes than the config says.
        TrainingError: another process ended before it could take its place.
    """
    config = run.config
    _require_world(config.parallel)
    if config.parallel.processes == 1:
        yield Layout(training_device(config.trainer.device)), None
        return
    fellows = Fellows()
    ranks: Ranks | None = None
    done = False
    try:
        with _loopback():
            store = _rendezvous(run, fellows)
            store.set(_CONFIG_KEY, config.model_dump_json())
            layout = join(config, store, 0, fellows.failure)
            ranks = Ranks(config.parallel.timeout_s, signals, fellows.failure, fellows.kill)
        yield layout, ranks
        done = True
    finally:
        if ranks is not None:
            ranks.close()
        fellows.stop(at_once=not done)
        if done:
            dist.destroy_process_group()


def follow() -> None:
    """In the other processes: take part until the first one is done. Progress and results are its business."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the first process ends this one when it has saved its state
    logging.getLogger("pa_core").setLevel(logging.WARNING)
    store, number, _ = next(dist.rendezvous("env://", timeout=STARTUP))
    config = parse_config(json.loads(store.get(_CONFIG_KEY)))
    layout = join(config, store, number)
    ranks = Ranks(config.parallel.timeout_s)
    torch.set_num_threads(trainer_threads(config))
    torch.manual_seed(config.seed)
    take_part(config, layout, ranks)
    dist.destroy_process_group()


def take_part(config: TrainConfig, layout: Layout, ranks: Ranks) -> None:
    """Make this process's learner when the first one makes its own, and repeat that one's calls until it is done.

    Raises:
        TrainingError: the first process is gone, or another one.
    """
    try:
        if ranks.receive() is not None:
            ranks.follow(Learner(config, None, layout, ranks))
    except RuntimeError as error:
        raise ranks.explained("waiting for the first process", error) from error


def _require_world(parallel: ParallelConfig) -> None:
    world = int(os.environ.get("WORLD_SIZE") or 1)
    if "RANK" in os.environ and world != parallel.processes:
        raise ConfigError(
            f"parallel.fsdp={parallel.fsdp} x parallel.tp={parallel.tp} = {parallel.processes} processes, and the "
            f"launcher has started WORLD_SIZE={world}; make them equal"
        )


@contextmanager
def _loopback() -> Iterator[None]:
    """While open, processes on this host meet on its loopback device, where nobody else can reach them."""
    variable = "GLOO_SOCKET_IFNAME"
    if "RANK" in os.environ or variable in os.environ or sys.platform != "linux":
        yield
        return
    os.environ[variable] = "lo"
    try:
        yield
    finally:
        del os.environ[variable]


def _rendezvous(run: Run, fellows: Fellows) -> dist.Store:
    """A store that every process reaches; where no launcher has started them, they are started now."""
    if "RANK" in os.environ:
        store: dist.Store = next(dist.rendezvous("env://", timeout=STARTUP))[0]
        return store
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    own = dist.TCPStore(
        "127.0.0.1",
        port,
        run.config.parallel.processes,
        is_master=True,
        timeout=STARTUP,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    fellows.start(run, port)
    return own


def join(
    config: TrainConfig, store: dist.Store, number: int, failure: Callable[[], str | None] = lambda: None
) -> Layout:
    """Become part of the process group once all are there, and lay out the mesh.

    Raises:
        ConfigError: this host has no device for this process.
        TrainingError: another process did not come up.
    """
    parallel = config.parallel
    device = training_device(config.trainer.device)
    store.set(f"here/{number}", "1")
    deadline = time.monotonic() + STARTUP.total_seconds()
    for other in range(parallel.processes):
        while not store.check([f"here/{other}"]):
            if (cause := failure()) is not None:
                raise TrainingError(cause)
            if time.monotonic() > deadline:
                raise TrainingError(f"training process {other} did not come up within {STARTUP.total_seconds():g} s")
            time.sleep(0.1)
    dist.init_process_group(
        _BACKENDS[device.type],
        store=dist.PrefixStore("group", store),
        rank=number,
        world_size=parallel.processes,
        timeout=timedelta(seconds=parallel.timeout_s),
    )
    mesh = init_device_mesh(device.type, (parallel.fsdp, parallel.tp), mesh_dim_names=("fsdp", "tp"))
    if number == 0:
        log.info("training on %d processes (fsdp %d x tp %d), %s", parallel.processes, *mesh.shape, device.type)
    return Layout(device, mesh)
