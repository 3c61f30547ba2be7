"""Results in a run's store: ``evaluations/v000012.json`` and, one row per sample, ``evaluations/v000012.parquet``.

Those of the run's own held-out problems lie there; those of another set of problems one folder deeper, by its name.
The table has the columns of ``rollouts/v000012.parquet`` (:mod:`pa_core.store.group_codec`) and three more: ``value``
(the evaluation metric, null when unscored), ``right`` and ``extracted`` (what the response votes for, null when no
answer can be read).
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet

from pa_core.config import TrainConfig
from pa_core.errors import StoreError
from pa_core.evaluation.answers import answer_extractor
from pa_core.evaluation.result import EvaluationResult
from pa_core.evaluation.scores import judge
from pa_core.records import Group
from pa_core.store.group_codec import to_table
from pa_core.store.objects import ObjectStore
from pa_core.store.versions import version_name, version_of

FOLDER = "evaluations"
SHOWN = ("version", "prompt", "answer", "response", "value", "right", "extracted", "unscored", "finish_reason")


def sample_table(config: TrainConfig, groups: Sequence[Group]) -> pa.Table:
    """One row per sample, in the columns of the module's text."""
    judged = [one for problem in judge(groups, config.evaluation_metric, answer_extractor(config)) for one in problem]
    rights = [None if one.value is None else one.right for one in judged]
    table = to_table(groups)
    table = table.append_column("value", pa.array([one.value for one in judged], pa.float64()))
    table = table.append_column("right", pa.array(rights, pa.bool_()))
    return table.append_column("extracted", pa.array([one.answer for one in judged], pa.string()))


def shown_rows(table: pa.Table, limit: int | None = None) -> list[dict[str, Any]]:
    """Rows for people: the columns that are read, with the response's length, at most ``limit`` of them."""
    part = table if limit is None else table.slice(0, limit)
    lengths = [len(tokens) for tokens in part.column("token_ids")]
    rows: list[dict[str, Any]] = part.select(list(SHOWN)).to_pylist()
    return [row | {"tokens": length} for row, length in zip(rows, lengths, strict=True)]


class EvaluationStore:
    """The results of a run.

    Args:
        store: the run's store.
        name: the set of problems; None for the run's own held-out ones.
    """

    def __init__(self, store: ObjectStore, name: str | None = None) -> None:
        self._store = store.child(FOLDER if name is None else f"{FOLDER}/{name}")

    def write(self, result: EvaluationResult, table: pa.Table) -> str:
        """Keep a result, replacing an earlier one of the version; the table comes first. Returns the table's URL."""
        sink = io.BytesIO()
        parquet.write_table(table, sink, compression="zstd")
        key = f"{version_name(result.version)}.parquet"
        self._store.publish(key, sink.getvalue(), exclusive=False, durable=False)
        data = result.model_dump_json(indent=2).encode()
        self._store.publish(f"{version_name(result.version)}.json", data, exclusive=False, durable=False)
        return f"{self._store.url}/{key}"

    def read(self, version: int) -> EvaluationResult | None:
        """The result of a version, or None while there is none."""
        data = self._store.find(f"{version_name(version)}.json")
        if data is None:
            return None
        try:
            return EvaluationResult.model_validate_json(data)
        except ValueError as error:
            raise StoreError(f"store {self._store.url}: {version_name(version)}.json is no result: {error}") from None

    def table(self, version: int) -> pa.Table:
        """The samples of a version that has a result."""
        return parquet.read_table(io.BytesIO(self._store.read(f"{version_name(version)}.parquet")))

    def forget_after(self, version: int) -> None:
        """Remove the results of versions later than ``version``, on every set: those versions will be made anew."""
        for key in self._store.list():
            if version_of(key.rpartition("/")[2]) > version:
                self._store.delete(key)
