"""When a replica's flow run finds that its run needs it no more."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("prefect", reason="the flows extra is not installed")

from prefect.states import Crashed, Running

from flows import roles
from pa_core.config_files import parse_config
from pa_core.loop.run import Run, prepare_run

NOW = datetime.now(UTC).timestamp()


@pytest.fixture
def run(request: pytest.FixtureRequest) -> Run:
    return prepare_run(parse_config({"data": {"name": "chain_sum"}, "store": {"url": f"memory://{request.node.name}"}}))


def reason(run: Run, *moments: Any) -> str | None:
    """What is found out at the last of several moments."""
    end = roles.RunEnd(run, logging.getLogger("test"))
    found = None
    for prepare in moments:
        prepare()
        found = end.reason()
    return found


def trains(run: Run, started: float = NOW) -> None:
    run.store.publish("trainer.json", json.dumps({"started": started}).encode(), exclusive=False)


def test_a_run_goes_on_before_and_while_its_trainer_is_there(run: Run) -> None:
    assert reason(run, lambda: None) is None
    assert reason(run, lambda: None, lambda: trains(run)) is None


def test_a_run_has_ended_with_its_summary_or_when_its_trainer_has_stopped(run: Run) -> None:
    assert reason(run, lambda: trains(run), lambda: run.store.delete("trainer.json")) == "the trainer has stopped"
    assert reason(run, lambda: run.store.publish("summary.json", b"{}")) == "the run is finished"


@pytest.mark.parametrize(
    ("state", "started", "expected"),
    [
        (Running(), NOW - 60, None),
        (Crashed(), NOW - 60, "the trainer's flow run is Crashed"),
        (Crashed(), NOW + 60, None),
    ],
    ids=["it trains", "it was killed and left its mark", "it was killed and resumed since"],
)
def test_a_killed_trainer_is_known_to_prefect(
    run: Run, monkeypatch: pytest.MonkeyPatch, state: Any, started: float, expected: str | None
) -> None:
    @contextlib.contextmanager
    def client(sync_client: bool) -> Iterator[Any]:
        yield SimpleNamespace(read_flow_run=lambda id_: SimpleNamespace(state=state))

    monkeypatch.setattr(roles, "get_client", client)
    run.describe(trainer_flow_run="of-this-test")
    assert reason(run, lambda: trains(run, started)) == expected


def test_a_prefect_server_that_does_not_answer_ends_nothing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def client(sync_client: bool) -> Any:
        raise ConnectionError("away")

    monkeypatch.setattr(roles, "get_client", client)
    run.describe(trainer_flow_run="of-this-test")
    assert reason(run, lambda: trains(run)) is None


def test_the_trainer_role_needs_the_key_that_replicas_share(monkeypatch: pytest.MonkeyPatch) -> None:
    config = parse_config({"data": {"name": "chain_sum"}, "engine": {"replicas": 3}})
    monkeypatch.setenv("PA_API_KEY", "shared")
    assert roles.without_own_replicas(config).engine.replicas == 0
    monkeypatch.delenv("PA_API_KEY")
    with pytest.raises(roles.ConfigError, match="PA_API_KEY"):
        roles.without_own_replicas(config)
