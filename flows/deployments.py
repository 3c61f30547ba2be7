"""Serves the deployments of ``prefect.yaml`` from one process: ``python -m flows.deployments [FILE]``.

Each flow run gets a process of its own. SIGTERM cancels running flows, which end their children.
"""

import sys
from pathlib import Path
from typing import Any

import yaml
from prefect import serve
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import ConcurrencyLimitConfig
from prefect.deployments.runner import RunnerDeployment
from prefect.exceptions import ObjectNotFound
from prefect.flows import load_flow_from_entrypoint
from prefect.schedules import Schedule
from prefect.types.entrypoint import EntrypointType
from prefect.utilities.importtools import import_object
from prefect.utilities.templating import apply_values

from pa_core.config_files import load_config
from pa_core.errors import ConfigError, UserError


def read_config(path: str, overrides: list[str] | None = None) -> dict[str, Any]:
    """A deployment step: the whole config tree of a file, defaults included, as ``config``.

    Raises :class:`ConfigError` when the file is no valid config, so that a bad default never reaches a form.
    """
    return {"config": load_config(path, overrides).model_dump(mode="json")}


def schedule(spec: dict[str, Any]) -> Schedule:
    """One schedule of ``prefect.yaml``; slug and ``active`` are required so that serving again changes nothing."""
    try:
        return Schedule(cron=spec["cron"], timezone=spec["timezone"], slug=spec["slug"], active=spec["active"])
    except KeyError as missing:
        raise ConfigError(f"prefect.yaml: schedule {spec}: {missing} is required") from None


def build(spec: dict[str, Any]) -> RunnerDeployment:
    """One deployment of ``prefect.yaml``, its build steps run and its placeholders filled."""
    outputs: dict[str, Any] = {}
    for step in spec.get("build") or []:
        ((function, inputs),) = step.items()
        arguments = {name: value for name, value in inputs.items() if name != "id"}
        outputs[inputs["id"]] = import_object(function)(**arguments)
    filled = apply_values({key: value for key, value in spec.items() if key != "build"}, outputs)
    deployment = load_flow_from_entrypoint(filled["entrypoint"]).to_deployment(
        name=filled["name"],
        description=filled.get("description"),
        parameters=filled.get("parameters"),
        tags=filled.get("tags"),
        schedules=[schedule(one) for one in filled.get("schedules") or []],
        concurrency_limit=ConcurrencyLimitConfig.model_validate(filled["concurrency_limit"]),
        entrypoint_type=EntrypointType.MODULE_PATH,
    )
    assert isinstance(deployment, RunnerDeployment)
    return deployment


def deployments(file: Path) -> list[RunnerDeployment]:
    """All deployments of a file. Raises :class:`ConfigError` when there is none."""
    if not file.is_file():
        raise ConfigError(f"{file} does not exist")
    specs = yaml.safe_load(file.read_text()).get("deployments") or []
    if not specs:
        raise ConfigError(f"{file}: no deployments")
    return [build(spec) for spec in specs]


def keep_switches(served: list[RunnerDeployment]) -> None:
    """Leave schedules that the server knows as somebody last switched them; ``active`` is for the first time."""
    with get_client(sync_client=True) as client:
        for deployment in served:
            try:
                known = client.read_deployment_by_name(deployment.full_name)
            except ObjectNotFound:
                continue
            switches = {schedule.slug: schedule.active for schedule in known.schedules}
            for schedule in deployment.schedules or []:
                schedule.active = switches.get(schedule.slug, schedule.active)


def main(arguments: list[str]) -> int:
    """Serve until stopped."""
    try:
        served = deployments(Path(arguments[0] if arguments else "prefect.yaml"))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    keep_switches(served)
    serve(*served)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
