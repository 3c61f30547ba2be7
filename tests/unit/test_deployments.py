"""The shipped deployments and their form."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("prefect", reason="the flows extra is not installed")

from prefect.utilities.callables import parameter_schema

from flows.artifacts import chart
from flows.deployments import deployments
from flows.train import train
from pa_core.config_files import load_config

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def served() -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        return {deployment.name: deployment for deployment in deployments(Path("prefect.yaml"))}


def test_both_deployments_run_the_quickstart_config(served: dict[str, Any]) -> None:
    quickstart = load_config(ROOT / "configs/quickstart.yaml")
    assert served["quickstart"].parameters == {"config": quickstart.model_dump(mode="json")}
    nightly = load_config(ROOT / "configs/quickstart.yaml", ["tracking.experiment=nightly"])
    assert served["nightly"].parameters == {"config": nightly.model_dump(mode="json")}


def test_a_second_run_of_a_deployment_waits_for_the_first(served: dict[str, Any]) -> None:
    for deployment in served.values():
        assert deployment.concurrency_limit == 1
        assert deployment.concurrency_options.collision_strategy.value == "ENQUEUE"


def test_the_nightly_schedule_is_named_and_off_until_switched_on(served: dict[str, Any]) -> None:
    (schedule,) = served["nightly"].schedules
    assert (schedule.slug, schedule.active) == ("nightly", False)
    assert (schedule.schedule.cron, schedule.schedule.timezone) == ("0 3 * * *", "UTC")
    assert not served["quickstart"].schedules


def sections(schema: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, section in schema.definitions.items():
        yield name, section["properties"]


def test_every_field_of_the_form_is_explained_and_in_the_order_of_the_config() -> None:
    for name, fields in sections(parameter_schema(train)):
        assert [field["position"] for field in fields.values()] == list(range(len(fields))), name
        unexplained = [key for key, field in fields.items() if not field.get("description")]
        assert not unexplained, (name, unexplained)


def test_choices_are_offered_as_choices() -> None:
    fields = dict(sections(parameter_schema(train)))
    assert fields["ModelConfig"]["attention"]["enum"] == ["auto", "shared_prompt", "per_sample"]
    assert "dr_grpo" in fields["AdvantageConfig"]["preset"]["enum"]


def test_the_reward_curve_is_as_high_as_its_values() -> None:
    rows = chart([0.0, 0.5, 1.0], height=4, width=3).splitlines()
    columns = [[row[9 + index] for row in rows[:4]] for index in range(3)]
    assert columns == [[" ", " ", " ", " "], [" ", " ", "█", "█"], ["█", "█", "█", "█"]]
