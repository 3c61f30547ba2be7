"""What may be removed of finished runs."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import torch

from pa_core.loop.progress import ProgressState, write_progress
from pa_core.loop.retention import PARTS, dispensable, finished_runs, remove
from pa_core.store.objects import ObjectStore
from pa_core.store.weights import WeightStore

LATER = datetime.now(UTC) + timedelta(days=1)


@pytest.fixture
def root(tmp_path: Path) -> str:
    for name, finished in (("done", True), ("stopped", False)):
        store = ObjectStore.open(str(tmp_path / name))
        store.publish("run.json", json.dumps({"created": "20200101-000000"}).encode())
        for version in (0, 1, 2):
            WeightStore(store).publish(version, {"w": torch.full((2,), float(version))})
            store.publish(f"rollouts/v{version:06d}.parquet", b"samples")
        store.publish("checkpoints/v000002/state.json", b"{}")
        if finished:
            store.publish("summary.json", b"{}")
    return str(tmp_path)


def test_only_finished_runs_lose_something_and_keep_their_last_version(root: str) -> None:
    (run,) = finished_runs(root, LATER)
    assert run.name == "done"
    found = dispensable(run, PARTS)
    assert found["rollouts"] == [f"rollouts/v00000{version}.parquet" for version in (0, 1, 2)]
    assert {key.split("/")[1] for key in found["weights"]} == {"v000000", "v000001"}
    remove(run, [key for keys in found.values() for key in keys])
    assert torch.equal(WeightStore(run.store).load(2)["w"], torch.full((2,), 2.0))
    assert WeightStore(run.store).manifest(1) is None
    assert run.store.exists("summary.json")
    assert dispensable(run, PARTS) == {}


def test_only_the_parts_that_were_named_are_found(root: str) -> None:
    (run,) = finished_runs(root, LATER)
    assert list(dispensable(run, ["checkpoints"])) == ["checkpoints"]


def test_a_run_is_as_old_as_its_last_sign(root: str) -> None:
    long_ago = datetime(2021, 1, 1, tzinfo=UTC)
    assert [run.name for run in finished_runs(root, long_ago)] == ["done"]
    write_progress(ObjectStore.open(f"{root}/done"), ProgressState())
    assert not list(finished_runs(root, long_ago))
