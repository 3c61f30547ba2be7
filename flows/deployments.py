"""Serves the deployments of ``prefect.yaml`` from one process: ``python -m flows.deployments [FILE]``.

Each flow run gets a process of its own. SIGTERM cancels running flows, which end their children.
"""

import asyncio
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from uuid import UUID

import yaml
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import ConcurrencyLimitConfig
from prefect.deployments.runner import RunnerDeployment
from prefect.exceptions import ObjectNotFound, TerminationSignal
from prefect.flows import load_flow_from_entrypoint
from prefect.runner import Runner
from prefect.schedules import Schedule
from prefect.types.entrypoint import EntrypointType
from prefect.utilities.importtools import import_object
from prefect.utilities.templating import apply_values

from flows import pools
from pa_core.config_files import load_config
from pa_core.errors import ConfigError, UserError

READY = "serving the deployments:"
"""Printed once the server knows them; ``make up`` waits for it."""


def read_config(path: str, overrides: list[str] | None = None) -> dict[str, Any]:
    """A deployment step: a config file's whole tree, defaults included, as ``config``; its first line as ``purpose``.

    Raises :class:`ConfigError` when the file is no valid config, so that a bad default never reaches a form.
    """
    config = load_config(path, overrides).model_dump(mode="json")
    return {"config": config, "purpose": purpose(Path(path).read_text())}


def purpose(text: str) -> str:
    """What a config file says it is for: the comment at its top."""
    lines = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.lstrip("# ").rstrip())
    return " ".join(lines)


def schedule(spec: dict[str, Any]) -> Schedule:
    """One schedule of ``prefect.yaml``; slug and ``active`` are required so that serving again changes nothing."""
    try:
        return Schedule(
            cron=spec["cron"],
            timezone=spec["timezone"],
            slug=spec["slug"],
            active=spec["active"],
            parameters=spec.get("parameters", {}),
        )
    except KeyError as missing:
        raise ConfigError(f"prefect.yaml: schedule {spec}: {missing} is required") from None


@dataclass(frozen=True)
class Served:
    """A deployment, and the pool whose devices it shares with others; None: it waits for nobody else's runs."""

    deployment: RunnerDeployment
    pool: str | None


def build(spec: dict[str, Any]) -> Served:
    """One deployment of ``prefect.yaml``, its build steps run and its placeholders filled."""
    outputs: dict[str, Any] = {}
    for step in spec.get("build") or []:
        ((function, inputs),) = step.items()
        arguments = {name: value for name, value in inputs.items() if name != "id"}
        outputs[inputs["id"]] = import_object(function)(**arguments)
    filled = apply_values({key: value for key, value in spec.items() if key != "build"}, outputs)
    own_limit = filled.get("concurrency_limit")
    deployment = load_flow_from_entrypoint(filled["entrypoint"]).to_deployment(
        name=filled["name"],
        description=filled.get("description"),
        parameters=filled.get("parameters"),
        tags=filled.get("tags"),
        schedules=[schedule(one) for one in filled.get("schedules") or []],
        concurrency_limit=None if own_limit is None else ConcurrencyLimitConfig.model_validate(own_limit),
        entrypoint_type=EntrypointType.MODULE_PATH,
    )
    assert isinstance(deployment, RunnerDeployment)
    if own_limit is None:
        # Unset, hence not sent: the server takes None for "delete the limit", that of the whole pool.
        deployment.model_fields_set.discard("concurrency_limit")
    return Served(deployment, None if own_limit else (filled.get("work_pool") or {}).get("name"))


def deployments(file: Path) -> list[Served]:
    """All deployments of a file. Raises :class:`ConfigError` when there is none."""
    if not file.is_file():
        raise ConfigError(f"{file} does not exist")
    specs = yaml.safe_load(file.read_text()).get("deployments") or []
    if not specs:
        raise ConfigError(f"{file}: no deployments")
    return [build(spec) for spec in specs]


def keep_switches(served: list[RunnerDeployment]) -> None:
    """Leave what the server knows as somebody last switched it; ``active`` of a schedule is for the first time."""
    with get_client(sync_client=True) as client:
        for deployment in served:
            try:
                known = client.read_deployment_by_name(deployment.full_name)
            except ObjectNotFound:
                continue
            deployment.paused = known.paused
            switches = {schedule.slug: schedule.active for schedule in known.schedules}
            for schedule in deployment.schedules or []:
                schedule.active = switches.get(schedule.slug, schedule.active)


def register(runner: Runner, served: list[Served]) -> None:
    """Make the deployments known to the server, with their switches as they are there and their pools' limits."""
    keep_switches([one.deployment for one in served])
    ids = [cast(UUID, runner.add_deployment(one.deployment)) for one in served]
    shared = {id_: one.pool for id_, one in zip(ids, served, strict=True) if one.pool is not None}
    with get_client(sync_client=True) as client:
        pools.share_devices(client, shared)


def main(arguments: list[str]) -> int:
    """Serve until stopped."""
    try:
        served = deployments(Path(arguments[0] if arguments else "prefect.yaml"))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    # Paused on shutdown, a deployment would come back paused, or a pause of somebody's would be lifted.
    runner = Runner(name="deployments", pause_on_shutdown=False, limit=None)
    register(runner, served)
    print(READY, ", ".join(one.deployment.full_name for one in served), flush=True)
    try:
        asyncio.run(runner.start())
    except (KeyboardInterrupt, TerminationSignal):
        print("stopped")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
