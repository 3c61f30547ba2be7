"""The shipped deployments and their forms."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("prefect", reason="the flows extra is not installed")

from prefect.utilities.callables import parameter_schema
from pydantic import TypeAdapter

from flows.artifacts import chart
from flows.benchmark import benchmark
from flows.deployments import Served, deployments, purpose
from flows.forms import FORMS, Benchmark, command_line
from flows.reconcile import tracking_uris
from flows.train import train
from pa_core.config_files import load_config
from pa_core.errors import ConfigError

ROOT = Path(__file__).parents[2]
NOT_DEPLOYED = {
    "overlap": "for `pa bench overlap`, which the deployment benchmark runs",
    "r1-distill-qwen-32b": "five nodes: torchrun starts it on each of them",
}


@pytest.fixture(scope="module")
def served() -> dict[str, Served]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        return {one.deployment.name: one for one in deployments(Path("prefect.yaml"))}


def test_every_shipped_config_is_a_deployment_with_its_purpose_and_values(served: dict[str, Served]) -> None:
    names = {file.stem for file in (ROOT / "configs").glob("*.yaml")}
    assert names - set(NOT_DEPLOYED) == names & set(served)
    for name in names & set(served):
        file = ROOT / "configs" / f"{name}.yaml"
        deployment = served[name].deployment
        assert deployment.parameters == {"config": load_config(file).model_dump(mode="json")}
        assert deployment.description == purpose(file.read_text())
        assert deployment.description, name


def test_the_nightly_run_trains_the_quickstart_into_an_experiment_of_its_own(served: dict[str, Served]) -> None:
    nightly = load_config(ROOT / "configs/quickstart.yaml", ["tracking.experiment=nightly"])
    assert served["nightly"].deployment.parameters == {"config": nightly.model_dump(mode="json")}


def test_every_deployment_is_described_tagged_and_waits_for_its_pool(served: dict[str, Served]) -> None:
    for name, one in served.items():
        assert one.deployment.description and one.deployment.tags, name
        assert one.pool is not None, name
    assert {one.pool for one in served.values() if "cpu" in one.deployment.tags} == {"cpu"}


def test_a_pools_limit_is_never_sent_as_none(served: dict[str, Served]) -> None:
    # The server would delete it, and with it the limit of all other deployments of the pool.
    assert all("concurrency_limit" not in one.deployment.model_fields_set for one in served.values())


def test_schedules_are_named_and_off_until_switched_on(served: dict[str, Served]) -> None:
    found = {
        schedule.slug: (schedule.active, schedule.schedule.cron, schedule.schedule.timezone)
        for one in served.values()
        for schedule in one.deployment.schedules or []
    }
    assert found["nightly"] == (False, "0 3 * * *", "UTC")
    assert found["weekly"] == (False, "0 5 * * 0", "UTC")
    assert not any(active for active, _, _ in found.values())


def test_a_schedule_without_slug_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "prefect.yaml"
    file.write_text(
        "deployments: [{name: a, entrypoint: flows.reconcile.reconcile, "
        "schedules: [{cron: '0 3 * * *', timezone: UTC, active: true}]}]"
    )
    with pytest.raises(ConfigError, match="'slug' is required"):
        deployments(file)


def sections(schema: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, section in schema.definitions.items():
        if "properties" in section:
            yield name, section["properties"]


def test_every_field_of_every_form_is_explained_and_in_the_order_of_its_source(served: dict[str, Served]) -> None:
    forms = {one.deployment.flow_name: one.deployment._parameter_openapi_schema for one in served.values()}
    assert {"train", "evaluate", "compare", "sweep", "benchmark", "retention"} <= set(forms)
    for flow, schema in forms.items():
        for name, fields in sections(schema):
            assert [field["position"] for field in fields.values()] == list(range(len(fields))), (flow, name)
            unexplained = [key for key, field in fields.items() if not field.get("description")]
            assert not unexplained, (flow, name, unexplained)


def test_choices_are_offered_as_choices() -> None:
    fields = dict(sections(parameter_schema(train)))
    assert fields["ModelConfig"]["attention"]["enum"] == ["auto", "shared_prompt", "per_sample"]
    assert "dr_grpo" in fields["AdvantageConfig"]["preset"]["enum"]
    offered = parameter_schema(benchmark).properties["settings"]["discriminator"]["mapping"]
    assert set(offered) == set(FORMS) >= {"overlap", "mfu", "shared-prompt"}


def test_a_filled_in_form_is_the_command_line_of_the_benchmark() -> None:
    def arguments(**values: Any) -> list[str]:
        return command_line(TypeAdapter(Benchmark).validate_python(values))

    assert arguments(benchmark="mfu", group_size=8, device="cpu") == [
        *("bench", "mfu", "--json", "--group-size", "8", "--device", "cpu", "--")
    ]
    assert arguments(benchmark="overlap", overrides=["seed=1", "iterations=2"]) == [
        *("bench", "overlap", "--json", "--", "configs/overlap.yaml", "seed=1", "iterations=2")
    ]


def test_tracking_stores_are_found_wherever_parameters_name_them() -> None:
    parameters = {
        "config": {"tracking": {"uri": "a"}},
        "runs": [{"tracking": {"uri": "b"}}],
        "s": {"tracking_uri": "c"},
    }
    assert set(tracking_uris(parameters)) == {"a", "b", "c"}


def test_the_reward_curve_is_as_high_as_its_values() -> None:
    rows = chart([0.0, 0.5, 1.0], height=4, width=3).splitlines()
    columns = [[row[9 + index] for row in rows[:4]] for index in range(3)]
    assert columns == [[" ", " ", " ", " "], [" ", " ", "█", "█"], ["█", "█", "█", "█"]]
