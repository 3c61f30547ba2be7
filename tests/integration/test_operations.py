"""``make up`` as people use it: forms, pools, schedules, automations, and what a power failure leaves behind."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import psutil
import pytest
import yaml
from waiting import wait_for

from pa_core.rollout.address import free_port

pytest.importorskip("prefect", reason="the flows extra is not installed")

from mlflow import MlflowClient
from prefect.events.schemas.automations import AutomationCore

from flows.automations import CRASHED, UNSERVED, wanted

ROOT = Path(__file__).parents[2]
UP_S = 900.0
RUN_S = 600.0
ENDLESS = ["iterations=100000", "prompts_per_iteration=8", "group_size=4", "sampling.max_tokens=64"]
SOON_S = 10
"""The server refuses less."""


@dataclass
class Station:
    """Services in a folder of their own, and what the tests ask of them."""

    folder: Path
    api: httpx.Client
    env: dict[str, str]

    @property
    def mlflow(self) -> MlflowClient:
        return MlflowClient(f"sqlite:///{self.folder}/mlflow.db")

    def services(self, command: str) -> str:
        """``python -m flows.services COMMAND``."""
        done = subprocess.run(
            [sys.executable, "-m", "flows.services", command],
            cwd=self.folder,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=UP_S,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stderr

    def post(self, path: str, body: Any, method: str = "POST") -> httpx.Response:
        """The answer; asked again while SQLite is locked, as Prefect's own client does."""

        def answer() -> httpx.Response | None:
            reply = self.api.request(method, path, json=body)
            return None if reply.status_code >= 500 else reply

        return wait_for(path, answer, 60, httpx.TransportError).raise_for_status()

    def deployment(self, name: str) -> dict[str, Any]:
        found = self.post("/deployments/filter", {"deployments": {"name": {"any_": [name]}}})
        return dict(found.json()[0])

    def submit(self, name: str, parameters: dict[str, Any] | None = None) -> str:
        path = f"/deployments/{self.deployment(name)['id']}/create_flow_run"
        return str(self.post(path, {"parameters": parameters or {}}).json()["id"])

    def state(self, flow_run: str) -> dict[str, Any]:
        return dict(self.api.get(f"/flow_runs/{flow_run}").json()["state"])

    def reaches(self, flow_run: str, *names: str) -> dict[str, Any]:
        """The flow run's state once it has one of these names or types."""

        def check() -> dict[str, Any] | None:
            state = self.state(flow_run)
            return state if {state["name"], state["type"]} & set(names) else None

        return dict(wait_for(f"flow run {names}", check, RUN_S, httpx.TransportError))

    def artifacts(self, flow_run: str) -> dict[str, Any]:
        found = self.post("/artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [flow_run]}}})
        return {one["key"]: one["data"] for one in found.json()}

    def switch(self, deployment: str, active: bool) -> None:
        """Switch a deployment's only schedule, as the UI does."""
        found = self.deployment(deployment)
        (schedule,) = found["schedules"]
        self.post(f"/deployments/{found['id']}/schedules/{schedule['id']}", {"active": active}, "PATCH")

    def is_on(self, deployment: str) -> bool:
        (schedule,) = self.deployment(deployment)["schedules"]
        return bool(schedule["active"])

    def mlflow_run(self, flow_run: str) -> Any:
        """The MLflow run of a flow run, once it is linked."""
        link = wait_for(
            "a link to MLflow", lambda: self.artifacts(flow_run).get("mlflow-run"), RUN_S, httpx.TransportError
        )
        return self.mlflow.get_run(link.partition("](")[2].rstrip(")").rpartition("/")[2])

    def processes(self) -> list[psutil.Process]:
        """Every process of the services and of the runs that they host."""
        found = []
        for service in json.loads((self.folder / ".services/services.json").read_text()):
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(service["pid"])
                found += [process, *process.children(recursive=True)]
        return found


def write_deployments(folder: Path, model: Path) -> None:
    """The shipped deployments, an endless tiny run, and a schedule that is on."""
    config = {
        "iterations": 2,
        "prompts_per_iteration": 2,
        "group_size": 2,
        "model": {"path": str(model)},
        "data": {"name": "chain_sum", "options": {"min_terms": 2, "max_terms": 2, "size": 20}},
        "sampling": {"max_tokens": 4},
        "trainer": {"threads": 1},
        "engine": {"threads": 1},
        "evaluation": {"enabled": False},
        "tracking": {"log_model": False},
    }
    (folder / "tiny.yaml").write_text(yaml.safe_dump(config))
    shipped = yaml.safe_load((ROOT / "prefect.yaml").read_text())
    endless: dict[str, Any] = {
        "name": "endless",
        "entrypoint": "flows.train.train",
        "build": [{"flows.deployments.read_config": {"id": "it", "path": "tiny.yaml", "overrides": ENDLESS}}],
        "parameters": {"config": "{{ it.config }}"},
        "work_pool": {"name": "cpu"},
    }
    yearly = {"slug": "yearly", "cron": "0 0 1 1 *", "timezone": "UTC", "active": True}
    shipped["deployments"] += [endless, endless | {"name": "yearly", "schedules": [yearly]}]
    (folder / "prefect.yaml").write_text(yaml.safe_dump(shipped))
    (folder / "configs").symlink_to(ROOT / "configs")
    shutil.copy(ROOT / "prefect.toml", folder)


@pytest.fixture(scope="module")
def station(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Station]:
    folder = tmp_path_factory.mktemp("station")
    write_deployments(folder, tiny_model)
    ports = {"PREFECT_PORT": str(free_port()), "MLFLOW_PORT": str(free_port())}
    env = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    env |= {**ports, "OMP_NUM_THREADS": "1"}
    with httpx.Client(base_url=f"http://127.0.0.1:{ports['PREFECT_PORT']}/api", timeout=30) as api:
        station = Station(folder, api, env)
        try:
            station.services("up")
            yield station
        finally:
            station.services("down")


@pytest.fixture(scope="module")
def measured(station: Station) -> str:
    """A benchmark that is on its way, or over."""
    shape = {"group_size": 2, "prompt": 8, "response": 4, "repeats": 1, "threads": 1}
    model = station.folder / "tiny.yaml"
    path = yaml.safe_load(model.read_text())["model"]["path"]
    return station.submit("benchmark", {"settings": {"benchmark": "mfu", "model": path, "device": "cpu", **shape}})


@pytest.fixture(scope="module")
def training(station: Station, measured: str) -> str:
    """A run that trains without end, once it is linked to its MLflow run."""
    flow_run = station.submit("endless")
    station.mlflow_run(flow_run)
    return flow_run


def sections(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "the flow's parameters", schema["properties"]
    for name, section in schema.get("definitions", {}).items():
        if "properties" in section:
            yield name, section["properties"]


def test_the_server_has_every_deployment_with_a_form_in_order_and_explained(station: Station, measured: str) -> None:
    listed = yaml.safe_load((station.folder / "prefect.yaml").read_text())["deployments"]
    for name in [one["name"] for one in listed]:
        schema = station.deployment(name)["parameter_openapi_schema"]
        for section, fields in sections(schema):
            positions = sorted(field["position"] for field in fields.values())
            assert positions == list(range(len(fields))), (name, section)
            if section != "the flow's parameters":
                unexplained = [key for key, field in fields.items() if not field.get("description")]
                assert not unexplained, (name, section, unexplained)
    order = sorted(schema["definitions"]["TrainConfig"]["properties"].items(), key=lambda item: item[1]["position"])
    assert [key for key, _ in order][:4] == ["run_name", "seed", "iterations", "prompts_per_iteration"]


def test_a_benchmark_shows_its_figures_and_logs_them(station: Station, measured: str) -> None:
    state = station.reaches(measured, "COMPLETED", "FAILED", "CRASHED")
    assert state["type"] == "COMPLETED", state
    artifacts = station.artifacts(measured)
    assert artifacts["progress"] == 100.0
    assert "| dtypes/float32/" in artifacts["benchmark-mfu"]
    run = station.mlflow_run(measured)
    assert (run.info.status, run.data.tags["benchmark"]) == ("FINISHED", "mfu")
    assert run.data.tags["prefect.flow_run_id"] == measured


def shortened(automation: AutomationCore, flow_run: str) -> dict[str, Any]:
    """An automation of ours for one flow run alone, and after seconds instead of minutes."""
    tree = automation.model_dump(mode="json")
    tree["name"] += f" ({flow_run})"
    tree["trigger"] |= {"within": SOON_S, "match": {"prefect.resource.id": [f"prefect.flow-run.{flow_run}"]}}
    return tree


@pytest.mark.parametrize(
    ("name", "before", "event", "after"),
    [(CRASHED, "RUNNING", "heartbeat", "Crashed"), (UNSERVED, "SCHEDULED", "Late", "Unserved")],
)
def test_a_run_that_falls_silent_gets_a_state_that_says_so(
    station: Station, name: str, before: str, event: str, after: str
) -> None:
    flow = station.post("/flows/", {"name": "silent"}).json()
    far = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    state = {"type": before, "state_details": {"scheduled_time": far} if before == "SCHEDULED" else {}}
    flow_run = str(station.post("/flow_runs/", {"flow_id": flow["id"], "state": state}).json()["id"])
    ours = next(one for one in wanted() if one.name == name)
    station.post("/automations/", shortened(ours, flow_run))
    heard = {
        "occurred": datetime.now(UTC).isoformat(),
        "event": f"prefect.flow-run.{event}",
        "resource": {"prefect.resource.id": f"prefect.flow-run.{flow_run}"},
        "id": str(uuid4()),
    }
    station.post("/events", [heard])
    reached = station.reaches(flow_run, after)
    assert reached["message"] == ours.actions[0].message


@pytest.fixture(scope="module")
def waiting(station: Station, training: str) -> str:
    """A run of another deployment of the same pool."""
    return station.submit("yearly")


def test_a_second_run_of_the_pool_waits_for_the_first(station: Station, waiting: str) -> None:
    assert station.reaches(waiting, "AwaitingConcurrencySlot", "RUNNING")["name"] == "AwaitingConcurrencySlot"
    limit = station.api.get("/v2/concurrency_limits/cpu").json()
    assert (limit["limit"], limit["active_slots"]) == (1, 1)


@pytest.fixture(scope="module")
def after_power_failure(station: Station, training: str, waiting: str) -> Station:
    """Everything was killed while one run trained and another one waited; then ``up`` again."""
    station.reaches(waiting, "AwaitingConcurrencySlot")
    station.switch("nightly", True)
    station.switch("yearly", False)
    for process in station.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)
    station.services("up")
    return station


def test_what_a_power_failure_left_running_is_ended(after_power_failure: Station, training: str) -> None:
    state = after_power_failure.state(training)
    assert (state["type"], "gone" in state["message"]) == ("CRASHED", True)
    assert after_power_failure.mlflow_run(training).info.status == "KILLED"


def test_the_slot_of_a_dead_run_is_free_again(after_power_failure: Station, waiting: str) -> None:
    assert after_power_failure.reaches(waiting, "RUNNING", "FAILED", "CRASHED")["type"] == "RUNNING"


def test_schedules_stay_as_they_were_switched(after_power_failure: Station) -> None:
    station = after_power_failure
    assert (station.is_on("nightly"), station.is_on("yearly"), station.is_on("benchmark")) == (True, False, False)


def test_the_automations_are_there_once(after_power_failure: Station) -> None:
    known = after_power_failure.post("/automations/filter", {"sort": "NAME_ASC"}).json()
    names = [one["name"] for one in known]
    assert (names.count(CRASHED), names.count(UNSERVED)) == (1, 1)
