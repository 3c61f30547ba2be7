"""``pa train`` with dynamic sampling and real replica processes: what is trained on, and where everything else is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from test_train import last_json, mlflow_run, pa, tiny_tree, write_config

from pa_core.store.ledger import Ledger, LedgerEntry
from pa_core.store.objects import ObjectStore

# Whatever is answered to a problem with an even sum scores 0; other responses score by their text.
ODD_ONLY = """
import zlib

def odd_only(response, answer, *, metadata):
    return zlib.crc32(response.encode()) / 2**32 if int(answer) % 2 else 0.0
"""
ITERATIONS, GROUPS, SAMPLES = 2, 4, 3


@pytest.fixture(scope="module")
def finished(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The run's folder and summary."""
    folder = tmp_path_factory.mktemp("dynamic")
    tree = tiny_tree(
        tiny_model,
        folder,
        iterations=ITERATIONS,
        rewards=[{"name": "odd_only", "function": f"{folder / 'odd.py'}:odd_only"}],
        sampling={"max_tokens": 8, "dynamic": {"max_draws": 8}},
        optimizer={"learning_rate": 1e-3, "steps_per_iteration": 2},
        evaluation={"enabled": False},
    )
    tree["tracking"]["log_model"] = False
    (folder / "odd.py").write_text(ODD_ONLY)
    result = pa("train", write_config(folder, tree), "--json")
    assert result.returncode == 0, result.stderr[-4000:]
    return folder, last_json(result.stdout)


def entries(folder: Path) -> list[LedgerEntry]:
    ledger = Ledger(ObjectStore.open(str(folder / "runs/run")))
    found = [ledger.read(version) for version in range(ITERATIONS)]
    assert None not in found
    return [entry for entry in found if entry is not None]


def rows(folder: Path, version: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pq.read_table(folder / f"runs/run/rollouts/v{version:06d}.parquet").to_pylist()
    return found


def test_every_trained_group_has_an_advantage_and_every_iteration_is_full(
    finished: tuple[Path, dict[str, Any]],
) -> None:
    folder, summary = finished
    for entry in entries(folder):
        assert len(entry.group_ids) == GROUPS
        for group_id in entry.group_ids:
            scores = [row["reward"] for row in rows(folder, entry.version) if row["group_id"] == group_id]
            assert len(scores) == SAMPLES
            assert max(scores) - min(scores) > 1e-6, group_id
    assert summary["groups"] == ITERATIONS * GROUPS
    assert summary["groups_lost"] == summary["groups_duplicated"] == 0


def test_ledger_and_parquet_account_for_every_prompt_of_the_stream(finished: tuple[Path, dict[str, Any]]) -> None:
    """Invariants 1 and 3: each drawn prompt trained once or was uninformative, all at the iteration's own version."""
    folder, summary = finished
    drawn: list[str] = []
    replaced = 0
    for entry in entries(folder):
        uninformative = entry.facts["uninformative"]
        assert not set(uninformative) & set(entry.group_ids)
        generated = rows(folder, entry.version)
        assert {row["group_id"] for row in generated} == {*entry.group_ids, *uninformative}
        for row in generated:
            assert [span["version"] for span in row["versions"]] == [entry.version]
            assert (row["advantage"] is None) == (row["group_id"] in uninformative)
            assert (int(row["answer"]) % 2 == 0) == (row["group_id"] in uninformative)
        drawn += sorted({row["group_id"] for row in generated})
        replaced += len(uninformative)
    assert drawn == [f"p{place:08d}" for place in range(len(drawn))], "no prompt of the stream is left out or repeated"
    assert replaced > 0
    found = mlflow_run(folder, summary["mlflow_run_id"]).data.metrics
    assert found["rollout/draws"] == GROUPS + len(entries(folder)[-1].facts["uninformative"])
    assert found["rollout/draws"] - found["reward/zero_variance_groups"] == GROUPS
    assert found["rollout/unfilled_groups"] == 0
    everything = [row["reward"] for row in rows(folder, ITERATIONS - 1)]
    assert found["reward/mean"] == pytest.approx(sum(everything) / len(everything))
