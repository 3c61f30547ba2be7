"""The local services: ``python -m flows.services up`` and ``down`` (``make up``, ``make down``).

``up`` starts a Prefect server, an MLflow server and the host of the deployments, waits until all three answer, and
prints their addresses. Before anything is served, runs that a crash of this machine left behind are ended. Everything
they write lies below ``.services/`` and beside ``mlflow.db``.
Ports: ``PREFECT_PORT`` (4200) and ``MLFLOW_PORT`` (5000).
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL, PREFECT_UI_URL, temporary_settings
from rich.console import Console

from flows import automations, reconcile
from flows.deployments import READY
from pa_core.errors import EngineError, UserError
from pa_core.processes import running_process
from pa_core.rollout.process import spawn

STATE = Path(".services")
TEMPORARY_VARIABLE = "PA_TEMPORARY_PREFECT"
"""Set while the Prefect server is one that ends with this process."""
START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 40.0
HOST = "127.0.0.1"


@dataclass(frozen=True)
class Service:
    """A started service, as remembered in ``.services/services.json``. ``started`` tells it from a later process."""

    name: str
    pid: int
    started: float
    address: str

    def process(self) -> psutil.Process | None:
        """The process, or None when it is gone."""
        return running_process(self.pid, self.started)


def port(variable: str, default: int) -> int:
    """A port from the environment. Raises :class:`UserError` when it is no number."""
    text = os.environ.get(variable) or str(default)
    if not text.isdecimal():
        raise UserError(f"{variable}={text!r} is not a port number")
    return int(text)


def prefect_address() -> str:
    """Where the local Prefect pages are, or will be."""
    return f"http://{HOST}:{port('PREFECT_PORT', 4200)}"


def flow_run_page(flow_run_id: str) -> str:
    """The flow run's page on the server of the settings, or on the one that ``make up`` starts.

    A temporary server of one foreground run is no address: its pages are gone with it.
    """
    temporary = os.environ.get(TEMPORARY_VARIABLE) is not None
    configured = None if temporary else PREFECT_UI_URL.value()
    return f"{configured or prefect_address()}/runs/flow-run/{flow_run_id}"


def mlflow_address() -> str:
    """Where the local MLflow pages are, or will be."""
    return f"http://{HOST}:{port('MLFLOW_PORT', 5000)}"


def running() -> list[Service]:
    """Services that ``up`` started and that still run."""
    file = STATE / "services.json"
    if not file.exists():
        return []
    services = [Service(**entry) for entry in json.loads(file.read_text())]
    return [service for service in services if service.process() is not None]


def running_prefect_api() -> str | None:
    """API address of the Prefect server that ``up`` started, when it runs."""
    return next((f"{one.address}/api" for one in running() if one.name == "prefect"), None)


def _remember(services: list[Service]) -> None:
    STATE.mkdir(exist_ok=True)
    (STATE / "services.json").write_text(json.dumps([asdict(service) for service in services], indent=2))


def _require_free(variable: str, default: int) -> None:
    number = port(variable, default)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, number))
        except OSError as error:
            raise UserError(
                f"port {number} cannot be used ({error.strerror}); choose another one: make up {variable}={number + 1}"
            ) from None


def _environment() -> dict[str, str]:
    return {
        **os.environ,
        "PREFECT_HOME": str(STATE.resolve()),
        "PREFECT_API_URL": f"{prefect_address()}/api",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "PA_MLFLOW_UI": mlflow_address(),
        "PYTHONUNBUFFERED": "1",
    }


def _log(name: str) -> Path:
    return STATE / "logs" / f"{name}.log"


def _start(name: str, address: str, *command: str) -> Service:
    _log(name).parent.mkdir(parents=True, exist_ok=True)
    with _log(name).open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", *command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=_environment(),
            start_new_session=True,
        )
    return Service(name, process.pid, psutil.Process(process.pid).create_time(), address)


def _get(url: str) -> str | None:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return str(answer.read().decode())
    except (urllib.error.URLError, TimeoutError, ConnectionError):
        return None


def _await(service: Service, ready: Callable[[], bool], console: Console) -> None:
    """Wait until ``ready``. Raises :class:`EngineError` with the end of the log when the service ends or stays mute."""
    began = time.monotonic()
    with console.status(f"starting {service.name} …"):
        while not ready():
            ended = service.process() is None
            if ended or time.monotonic() - began > START_TIMEOUT_S:
                tail = "\n".join(_log(service.name).read_text(errors="replace").splitlines()[-15:])
                why = "ended at start" if ended else f"did not answer within {START_TIMEOUT_S:.0f} s"
                raise EngineError(f"{service.name} {why}; the end of {_log(service.name)}:\n{tail}")
            time.sleep(0.3)
    console.print(f"  {service.name:<12} ready in {time.monotonic() - began:.0f} s   {service.address}")


@contextmanager
def temporary_prefect() -> Iterator[str]:
    """API address of a Prefect server on the project's database that ends with this process, however it ends."""
    console = Console(stderr=True)
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        address = f"http://{HOST}:{probe.getsockname()[1]}"
    server = (sys.executable, "-m", "prefect", "server", "start", "--host", HOST, "--port", address.rpartition(":")[2])
    guarded = (sys.executable, "-m", "pa_core.rollout.process", *server)
    process = spawn(guarded, _log("prefect"), _environment() | {"PREFECT_API_URL": f"{address}/api"})
    # At exit, and registered first, hence after Prefect has sent its last events and logs: it would wait for a server.
    atexit.register(process.stop, 5.0)
    try:
        service = Service("prefect", process.pid, psutil.Process(process.pid).create_time(), address)
        _await(service, lambda: _get(f"{address}/api/health") is not None, console)
        os.environ[TEMPORARY_VARIABLE] = address
        yield f"{address}/api"
    finally:
        os.environ.pop(TEMPORARY_VARIABLE, None)


def _deployments_ready(since: float) -> Callable[[], bool]:
    def ready() -> bool:
        log = _log("deployments")
        return log.exists() and log.stat().st_mtime >= since and READY in log.read_text()

    return ready


def up() -> None:
    """Start what does not run yet. Raises :class:`UserError` when a port is taken or a service does not come up."""
    console = Console(stderr=True)
    services = running()
    if {service.name for service in services} >= {"prefect", "mlflow", "deployments"}:
        console.print("already up; stop with: make down")
    else:
        down(quiet=True)
        services = []
        _require_free("PREFECT_PORT", 4200)
        _require_free("MLFLOW_PORT", 5000)
        try:
            _start_all(services, console)
        except BaseException:
            down(quiet=True)
            raise
    address = {service.name: service.address for service in services}
    console.print(
        f"\n  Start and watch runs    {address['prefect']}/deployments\n"
        f"  Compare runs            {address['mlflow']}\n"
        "  Stop                    make down\n"
    )


def _look_after_runs(prefect: str, console: Console) -> None:
    """See to the automations, and to runs that ended without anybody to say so; this server has none elsewhere."""
    with temporary_settings({PREFECT_API_URL: f"{prefect}/api"}):
        with get_client(sync_client=True) as client:
            automations.ensure(client)
        ended = reconcile.clean_up(local=True)
    for what, count in ended.items():
        if count:
            console.print(f"  {count} {what}, which a crash or a shutdown had left")


def _start_all(services: list[Service], console: Console) -> None:
    def add(service: Service, ready: Callable[[], bool]) -> None:
        services.append(service)
        _remember(services)
        waiting.append((service, ready))

    waiting: list[tuple[Service, Callable[[], bool]]] = []
    prefect, mlflow = prefect_address(), mlflow_address()
    server = ("prefect", "server", "start", "--host", HOST, "--port", prefect.rpartition(":")[2])
    add(_start("prefect", prefect, *server), lambda: _get(f"{prefect}/api/health") is not None)
    store = f"sqlite:///{Path('mlflow.db').resolve()}"
    pages = ("mlflow", "server", "--backend-store-uri", store, "--host", HOST, "--port", mlflow.rpartition(":")[2])
    add(
        _start(
            "mlflow", mlflow, *pages, "--artifacts-destination", str(Path("mlartifacts").resolve()), "--workers", "1"
        ),
        lambda: _get(f"{mlflow}/health") is not None,
    )
    for service, ready in waiting:
        _await(service, ready, console)
    _look_after_runs(prefect, console)
    began = time.time()
    host = _start("deployments", f"{prefect}/deployments", "flows.deployments")
    waiting.clear()
    add(host, _deployments_ready(began))
    _await(host, waiting[0][1], console)


def down(quiet: bool = False) -> None:
    """Stop the services, the host of the deployments first, so that running flows end in order."""
    console = Console(stderr=True, quiet=quiet)
    services = running()
    for service in reversed(services):
        process = service.process()
        if process is None:
            continue
        family = [process, *process.children(recursive=True)]
        with suppress(psutil.NoSuchProcess):
            process.terminate()
        _, alive = psutil.wait_procs(family, timeout=STOP_TIMEOUT_S)
        for one in alive:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        console.print(f"  {service.name} stopped")
    (STATE / "services.json").unlink(missing_ok=True)
    if not services:
        console.print("nothing is running")


def main(arguments: list[str]) -> int:
    """``up`` or ``down``."""
    commands = {"up": up, "down": down}
    if len(arguments) != 1 or arguments[0] not in commands:
        print("usage: python -m flows.services up|down", file=sys.stderr)
        return 2
    try:
        commands[arguments[0]]()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
