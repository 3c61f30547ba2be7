"""The services of infra/compose.yaml as plain processes, PostgreSQL included, and a run across trainer and replicas."""

from __future__ import annotations

import contextlib
import io
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pyarrow.parquet as parquet
import pytest
import yaml
from mlflow import MlflowClient
from s3 import S3Server, free_ports
from waiting import wait_for

from pa_core.errors import ConfigError
from pa_core.loop.run import Run, open_run
from pa_core.store.registry import ReplicaRegistry

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "infra/compose.yaml"
START_S = 300.0
RUN_S = 400.0
TERMINAL = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}
ITERATIONS = 8
PASSWORD = "of-this-test"

SLOW_REWARD = """
import time
from pathlib import Path

def patient(response, answer, *, metadata, gate):
    deadline = time.monotonic() + 8
    while not Path(gate).exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    return float(len(response) % 3)
"""
"""A reward that holds the run up until a file exists, so that somebody can join in the middle of it."""


def postgres_folder() -> Path:
    """Where PostgreSQL's programs are; Debian keeps most of them off the path."""
    found = [Path(program).resolve().parent for program in [shutil.which("initdb")] if program]
    found += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    if not found:
        pytest.skip("PostgreSQL is not installed (Debian's package postgresql)")
    return found[0]


@contextlib.contextmanager
def postgres(port: int) -> Iterator[None]:
    """A PostgreSQL server with the databases of infra/postgres; it refuses to run as root."""
    import psycopg

    programs = postgres_folder()
    user = pwd.getpwnam("postgres" if os.getuid() == 0 else pwd.getpwuid(os.getuid()).pw_name)
    folder = Path(tempfile.mkdtemp(prefix="pa-pg-"))  # pytest's own folders are closed to other users
    (folder / "password").write_text(PASSWORD)
    for path in (folder, folder / "password"):
        os.chown(path, user.pw_uid, user.pw_gid)
    other: dict[str, Any] = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []} if os.getuid() == 0 else {}
    init = ["initdb", "--no-sync", "--username=pa", "--auth=scram-sha-256", f"--pwfile={folder}/password", "-E", "UTF8"]
    serve = ["postgres", "-D", f"{folder}/data", "-p", str(port), "-k", str(folder), "-c", "fsync=off"]

    def answers() -> bool:
        with contextlib.suppress(psycopg.OperationalError):
            psycopg.connect(host="127.0.0.1", port=port, user="pa", password=PASSWORD, dbname="postgres").close()
            return True
        return False

    try:
        command = [str(programs / init[0]), *init[1:], "-D", f"{folder}/data"]
        subprocess.run(command, check=True, capture_output=True, cwd=folder, **other)
        with (folder / "log").open("wb") as log:
            server = subprocess.Popen(
                [str(programs / serve[0]), *serve[1:]], stdout=log, stderr=log, cwd=folder, **other
            )
        try:
            wait_for("PostgreSQL", answers, START_S)
            sql = ["psql", "-v", "ON_ERROR_STOP=1", "-h", "127.0.0.1", "-p", str(port), "-U", "pa", "-d", "postgres"]
            script = ROOT / "infra/postgres/databases.sql"
            env = os.environ | {"PGPASSWORD": PASSWORD}
            subprocess.run([*sql, "-f", str(script)], check=True, capture_output=True, env=env)
            yield
        finally:
            server.send_signal(signal.SIGINT)  # "fast shutdown": open connections do not hold it up
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(20)
            server.kill()
            server.wait()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@dataclass
class Stack:
    """Services of the compose file, started as processes with addresses of this machine in place of its own."""

    folder: Path
    values: Mapping[str, str]
    addresses: Mapping[str, str]
    extra: Mapping[str, str]
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def _filled(self) -> dict[str, Any]:
        text = COMPOSE.read_text()
        for name, value in self.values.items():
            text = text.replace(f"${{{name}:?see .env.example}}", value).replace(f"${{{name}}}", value)
        for name, value in self.addresses.items():
            text = text.replace(name, value)
        services: dict[str, Any] = yaml.safe_load(text)["services"]
        return services

    def start(self, name: str, **replaced: str) -> subprocess.Popen[bytes]:
        """Start one; ``replaced`` gives its ``--name`` options other values."""
        service = self._filled()[name]
        command = [str(part) for part in service["command"]]
        for option, value in replaced.items():
            if f"--{option}" in command:
                command[command.index(f"--{option}") + 1] = value
            else:
                (place,) = [index for index, part in enumerate(command) if part.startswith(f"--{option}=")]
                command[place] = f"--{option}={value}"
        env = {key: value for key, value in os.environ.items() if not key.startswith(("PREFECT_", "PA_", "MLFLOW_"))}
        env |= {key: str(value) for key, value in service["environment"].items()} | self.extra
        env |= {"PREFECT_WORKER_WEBSERVER_PORT": str(free_ports(1)[0])}
        program = shutil.which(command[0], path=env["PATH"])
        assert program is not None, command
        with (self.folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [program, *command[1:]], env=env, cwd=self.folder, stdout=log, stderr=log, start_new_session=True
            )
        self.processes[name] = process
        return process

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")[-4000:]

    def answers(self, name: str, url: str) -> Callable[[], bool]:
        def check() -> bool:
            assert self.processes[name].poll() is None, self.log(name)
            with contextlib.suppress(httpx.TransportError):
                return httpx.get(url, timeout=5).is_success
            return False

        return check

    def stop(self) -> None:
        for process in reversed(self.processes.values()):
            process.send_signal(signal.SIGTERM)
        for process in self.processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def tiny_config(model: Path, folder: Path) -> dict[str, Any]:
    reward = {"name": "patient", "function": str(folder / "slow.py") + ":patient"}
    return {
        "run_name": "across",
        "iterations": ITERATIONS,
        "prompts_per_iteration": 4,
        "group_size": 2,
        "model": {"path": str(model)},
        "data": {"name": "chain_sum", "options": {"min_terms": 2, "max_terms": 2, "size": 40}},
        "rewards": [reward | {"options": {"gate": str(folder / "gate")}}],
        "sampling": {"max_tokens": 4},
        "trainer": {"threads": 1},
        "engine": {"threads": 1, "concurrency": 1},
        "evaluation": {"enabled": False},
        "checkpoint": {"every": 0},
        "tracking": {"log_model": False},
    }


@pytest.fixture(scope="module")
def stack(
    tiny_model: Path, seaweedfs: S3Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Stack, dict[str, int]]]:
    pytest.importorskip("psycopg", reason="psycopg, of the extra `servers`, is not installed")
    folder = tmp_path_factory.mktemp("stack")
    (folder / "infra").symlink_to(ROOT / "infra")
    (folder / "slow.py").write_text(SLOW_REWARD)
    (folder / "tiny.yaml").write_text(yaml.safe_dump(tiny_config(tiny_model, folder)))
    ports = dict(zip(("postgres", "prefect", "mlflow"), free_ports(3), strict=True))
    values = {
        "POSTGRES_PASSWORD": PASSWORD,
        "AWS_ACCESS_KEY_ID": seaweedfs.key,
        "AWS_SECRET_ACCESS_KEY": seaweedfs.secret,
        "GRAFANA_PASSWORD": "unused",
        "PA_API_KEY": "shared-by-both-sides",
        "PA_CONFIG": str(folder / "tiny.yaml"),
        "PREFECT_PORT": str(ports["prefect"]),
        "MLFLOW_PORT": str(ports["mlflow"]),
    }
    addresses = {
        "postgres:5432": f"127.0.0.1:{ports['postgres']}",
        "http://seaweedfs:8333": seaweedfs.endpoint,
        "http://prefect:4200": f"http://127.0.0.1:{ports['prefect']}",
        "http://mlflow:5000": f"http://127.0.0.1:{ports['mlflow']}",
        "PA_REPLICA_HOST: auto": "PA_REPLICA_HOST: 127.0.0.2",
        "PA_METRICS_HOST: 0.0.0.0": "PA_METRICS_HOST: 127.0.0.1",
        "PA_METRICS_TARGETS: /targets": f"PA_METRICS_TARGETS: {folder}/targets",
    }
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    extra = {"PATH": path, "PREFECT_HOME": str(folder / "home"), "DO_NOT_TRACK": "1", "OMP_NUM_THREADS": "1"}
    services = Stack(folder, values, addresses, extra)
    with postgres(ports["postgres"]), seaweedfs.activated():
        try:
            services.start("prefect", host="127.0.0.1", port=str(ports["prefect"]))
            services.start("mlflow", host="127.0.0.1", port=str(ports["mlflow"]))
            health = f"http://127.0.0.1:{ports['prefect']}/api/health"
            wait_for("Prefect on PostgreSQL", services.answers("prefect", health), START_S)
            made = services.start("deployments")
            wait_for("MLflow", services.answers("mlflow", f"http://127.0.0.1:{ports['mlflow']}/health"), START_S)
            assert made.wait(START_S) == 0, services.log("deployments")
            services.start("trainer")
            services.start("inference", limit="2")
            yield services, ports
        finally:
            services.stop()


class Prefect:
    """What the test asks of the Prefect server."""

    def __init__(self, port: int) -> None:
        self.api = httpx.Client(base_url=f"http://127.0.0.1:{port}/api", timeout=30)

    def submit(self, deployment: str, **parameters: Any) -> str:
        found = self.api.get(f"/deployments/name/{deployment}").raise_for_status().json()
        made = self.api.post(f"/deployments/{found['id']}/create_flow_run", json={"parameters": parameters})
        return str(made.raise_for_status().json()["id"])

    def state(self, flow_run: str) -> dict[str, Any]:
        return dict(self.api.get(f"/flow_runs/{flow_run}").raise_for_status().json()["state"])

    def cancel(self, flow_run: str) -> None:
        state = {"state": {"type": "CANCELLING", "name": "Cancelling"}}
        self.api.post(f"/flow_runs/{flow_run}/set_state", json=state).raise_for_status()

    def ended(self, flow_run: str) -> dict[str, Any]:
        def check() -> dict[str, Any] | None:
            state = self.state(flow_run)
            return state if state["type"] in TERMINAL else None

        return dict(wait_for(f"end of flow run {flow_run}", check, RUN_S))

    def runs_of(self, deployment: str) -> list[str]:
        found = self.api.get(f"/deployments/name/{deployment}").raise_for_status().json()
        wanted = {"flow_runs": {"deployment_id": {"any_": [found["id"]]}}}
        return [one["id"] for one in self.api.post("/flow_runs/filter", json=wanted).raise_for_status().json()]


def test_a_run_completes_across_the_pools_while_one_replica_joins_and_another_is_cancelled(
    stack: tuple[Stack, dict[str, int]], seaweedfs: S3Server
) -> None:
    services, ports = stack
    prefect = Prefect(ports["prefect"])
    url = seaweedfs.url("runs/across")
    training = prefect.submit("trainer/trainer")

    def began() -> Run | None:
        assert prefect.state(training)["type"] not in TERMINAL, (prefect.state(training), services.log("trainer"))
        with contextlib.suppress(ConfigError):  # it is not prepared yet
            run = open_run(url)
            records = ReplicaRegistry(run.store).look(()).values()
            return run if any(record and record.version is not None for record in records) else None
        return None

    run: Run = wait_for("a run with the replica that the trainer asked for", began, RUN_S)
    serving = prefect.submit("replica/inference", run_url=url, replica_id="late")

    def joined() -> bool:
        assert prefect.state(training)["type"] not in TERMINAL, prefect.state(training)
        record = ReplicaRegistry(run.store).read("late")
        return record is not None and record.version is not None and record.url.startswith("http://127.0.0.2:")

    wait_for("a second replica in mid-run", joined, RUN_S)
    (asked,) = set(prefect.runs_of("replica/inference")) - {serving}
    prefect.cancel(asked)
    assert prefect.ended(asked)["type"] == "CANCELLED", services.log("inference")
    (services.folder / "gate").touch()

    state = prefect.ended(training)
    assert state["type"] == "COMPLETED", (state, services.log("trainer"))
    assert prefect.ended(serving)["message"] == "the run is finished", services.log("inference")
    tables = [run.store.read(f"rollouts/v{version:06d}.parquet") for version in range(ITERATIONS)]
    workers = {name for table in tables for name in parquet.read_table(io.BytesIO(table))["replica"].to_pylist()}
    assert workers == {f"x{asked.replace('-', '')[:12]}", "late"}

    mlflow = MlflowClient(tracking_uri=f"http://127.0.0.1:{ports['mlflow']}")
    record = mlflow.get_run(run.facts()["mlflow_run_id"])
    assert record.info.status == "FINISHED" and record.data.metrics["policy/version"] == ITERATIONS
    assert seaweedfs.client().list_objects_v2(Bucket="runs", Prefix="mlflow/")["KeyCount"] > 0
    assert rows(ports["postgres"], "prefect", "select count(*) from flow_run") >= 3
    assert rows(ports["postgres"], "mlflow", "select count(*) from runs") >= 1


def rows(port: int, database: str, query: str) -> int:
    import psycopg

    with psycopg.connect(host="127.0.0.1", port=port, user="pa", password=PASSWORD, dbname=database) as connection:
        (count,) = connection.execute(query).fetchone()  # type: ignore[misc]
    return int(count)
