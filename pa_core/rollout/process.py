"""Child processes that end when they are told to, and that never outlive their parent.

A child runs in a session of its own and holds the read end of a pipe whose write end only its parent has. When the
parent is gone, however it went, the child reads end-of-file and kills its own process group. (``PR_SET_PDEATHSIG``
would fire when the spawning *thread* ends.) Imports neither torch nor aiohttp.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from pa_core.config import TrainConfig
from pa_core.errors import ConfigError, EngineError, UserError
from pa_core.processes import usable_cores
from pa_core.rollout.config import EngineConfig
from pa_core.rollout.protocol import API_KEY_VARIABLE
from pa_core.rollout.supervisor import Supervisor
from pa_core.rollout.vllm_command import check_environment
from pa_core.store.objects import ObjectStore
from pa_core.store.registry import ReplicaRegistry

GUARD_VARIABLE = "PA_GUARD_FD"
"""Environment variable with the number of the file descriptor that a child watches."""


LAUNCHER_VARIABLES = frozenset(
    {
        *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
        *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    }
)
"""Environment variables by which torchrun tells a process its place."""

INDEX_VARIABLE = "PA_REPLICA_INDEX"
"""Environment variable with the number of a vLLM replica among those of its run, which chooses its devices."""

PROGRAMS = {"embedded": "pa_core.rollout.server", "vllm": "pa_core.rollout.vllm_keeper"}
"""Module that serves a replica, by ``engine.kind``."""


def watch_parent(guard_fd: int | None = None) -> None:
    """In a child: from now on, die with the parent. Call it before slow imports.

    Args:
        guard_fd: read end of the guard pipe; default: the one named by ``PA_GUARD_FD``. Without either, the process
            was not started by :func:`spawn` and nothing is watched.
    """
    inherited = os.environ.pop(GUARD_VARIABLE, None)
    fd = int(inherited) if guard_fd is None and inherited is not None else guard_fd
    if fd is None:
        return
    os.set_inheritable(fd, False)

    def wait_for_end_of_file() -> None:
        while os.read(fd, 1):
            pass
        if os.getpgrp() == os.getpid():
            os.killpg(os.getpgrp(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait_for_end_of_file, name="parent-guard", daemon=True).start()


class ChildProcess:
    """A process started by :func:`spawn`."""

    def __init__(self, popen: subprocess.Popen[bytes], guard: int, log_path: Path) -> None:
        self._popen = popen
        self._guard: int | None = guard
        self.log_path = log_path

    @property
    def pid(self) -> int:
        """Process id; also the id of its group and session."""
        return self._popen.pid

    def poll(self) -> int | None:
        """Exit code (negative: the signal that ended it), or None while it runs."""
        return self._popen.poll()

    def tail(self, lines: int = 15) -> str:
        """The last lines of its log."""
        try:
            with self.log_path.open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - 65536))
                text = log.read().decode(errors="replace")
        except OSError as error:
            return f"(no log: {error})"
        return "\n".join(text.splitlines()[-lines:])

    def signal(self, number: int) -> None:
        """Send a signal to the whole group, if any of it is left."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def stop(self, timeout: float = 15.0) -> int:
        """SIGTERM, wait at most ``timeout`` seconds, SIGKILL what is left of the group. Returns the exit code."""
        if self.poll() is None:
            self.signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._popen.wait(timeout)
        self.signal(signal.SIGKILL)
        code = self._popen.wait()
        if self._guard is not None:
            os.close(self._guard)
            self._guard = None
        return code


def spawn(command: Sequence[str], log_path: Path, env: Mapping[str, str] | None = None) -> ChildProcess:
    """Start a process in a session of its own, guarded against this process's death.

    Args:
        command: program and arguments; the program must call :func:`watch_parent` early.
        log_path: file that stdout and stderr are appended to; its folder is made.
        env: variables added to this process's environment.

    Raises:
        EngineError: the program cannot be started or the log cannot be written.
    """
    read_end, write_end = os.pipe()
    try:
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("ab") as log:
            popen = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**_inherited(), **(env or {}), GUARD_VARIABLE: str(read_end)},
                pass_fds=(read_end,),
                start_new_session=True,
            )
    except OSError as error:
        os.close(write_end)
        raise EngineError(f"cannot start {command[0]} with log {log_path}: {error}") from error
    finally:
        os.close(read_end)
    return ChildProcess(popen, write_end, log_path)


def _inherited() -> dict[str, str]:
    """This process's environment without its place among processes that train together: no child has that place."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in LAUNCHER_VARIABLES and not name.startswith("TORCHELASTIC_")
    }


def stop_all(processes: Sequence[ChildProcess], timeout: float = 15.0) -> None:
    """Stop several processes within one ``timeout`` seconds for all of them."""
    deadline = time.monotonic() + timeout
    for process in processes:
        if process.poll() is None:
            process.signal(signal.SIGTERM)
    for process in processes:
        process.stop(max(0.0, deadline - time.monotonic()))


def fair_threads(replicas: int) -> int:
    """CPU threads for each replica when ``replicas`` of them and a trainer share this machine's cores."""
    return max(1, usable_cores() // (replicas + 1))


def trainer_threads(config: TrainConfig) -> int:
    """CPU threads of each process that trains: as configured, or a fair share of its machine's cores."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE") or config.parallel.processes)
    return config.trainer.threads or fair_threads(config.engine.replicas + here - 1)


def require_shared_key(config: EngineConfig) -> None:
    """Raise :class:`ConfigError` when a run without replicas of its own has no key that others could join it with."""
    if not config.replicas and not config.urls and not os.environ.get(API_KEY_VARIABLE):
        raise ConfigError(
            f"engine.replicas=0 leaves generation to replicas that others start, and {API_KEY_VARIABLE}, the key that "
            "they and the trainer share, is not set; set it to one of your own for both, or raise engine.replicas"
        )


class ReplicaSet:
    """The replica processes of a run on this machine: started, looked after, and stopped together.

    Args:
        run_url: the run's folder in the store.
        config: which engine, how many replicas, with how many threads, and how often one is started again.
        log_dir: local folder for ``<replica id>.log``.
        command: program that serves; ``--run-url URL --replica-id ID`` are appended. Default: that of ``config.kind``.
        ids: their names; default: ``r0`` upwards, ``config.replicas`` of them.

    The key of the run is made here, unless the environment has one that other replicas are to share, and reaches the
    replicas by environment only.

    Attributes:
        ids: their names.
        registry: where the replicas announce themselves.
        processes: the current process of each replica; see :class:`Supervisor`.
    """

    def __init__(
        self,
        run_url: str,
        config: EngineConfig,
        log_dir: Path,
        command: Sequence[str] | None = None,
        ids: Sequence[str] | None = None,
    ) -> None:
        self.ids = [f"r{index}" for index in range(config.replicas)] if ids is None else list(ids)
        self.api_key = os.environ.get(API_KEY_VARIABLE) or secrets.token_urlsafe(32)
        self._run_url = run_url
        self.config = config
        self._log_dir = log_dir
        self._command = list(command or (sys.executable, "-m", PROGRAMS[config.kind]))
        self.registry = ReplicaRegistry(ObjectStore.open(run_url))
        self.processes = Supervisor(self._spawn, config, self.registry)

    def start(self) -> Supervisor:
        """Start every replica; returns at once.

        Raises:
            ConfigError: vLLM's environment is not there, or nobody can join the run.
            EngineError: one cannot be started at all.
            StoreError: what an earlier life of the run left in the registry cannot be removed.
        """
        if not self.ids:
            require_shared_key(self.config)
        elif self.config.kind == "vllm":
            check_environment(self.config.vllm)
        try:
            for replica_id in self.ids:
                self.registry.withdraw(replica_id)
            self.processes.begin(self.ids)
        except UserError:
            self.stop()
            raise
        return self.processes

    def _spawn(self, replica_id: str) -> ChildProcess:
        threads = str(self.config.threads or fair_threads(self.config.replicas))
        env = {
            API_KEY_VARIABLE: self.api_key,
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONUNBUFFERED": "1",
        }
        if self.config.kind == "vllm":
            env[INDEX_VARIABLE] = str(self.ids.index(replica_id))
        command = [*self._command, "--run-url", self._run_url, "--replica-id", replica_id]
        if self.config.kind == "vllm":
            command += ["--log-folder", str(self._log_dir)]
        return spawn(command, self._log_dir / f"{replica_id}.log", env)

    def stop(self, timeout: float = 15.0) -> None:
        """End all replicas within about ``timeout`` seconds. May be called twice."""
        stop_all(self.processes.end(), timeout)

    def __enter__(self) -> ReplicaSet:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()


if __name__ == "__main__":
    # python -m pa_core.rollout.process COMMAND …: under the guard, a program that knows nothing of it.
    watch_parent()
    sys.exit(subprocess.call(sys.argv[1:]))
