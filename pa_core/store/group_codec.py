"""Groups as Arrow tables, one row per sample: in a group's ``.arrow`` file and in an iteration's Parquet file.

Schema version 1, kept under ``pa.rollouts.schema`` in the file's metadata. The table is an interface: people open it
in pandas or DuckDB. Columns are only added within a version; a change of meaning raises it.

==================== ================================ ===============================================================
column               type                             meaning
==================== ================================ ===============================================================
version              int64                            policy version that sampled the group
group_id             string                           id of prompt and group
prompt_index         int64                            position in the prompt stream, from 0
sample_index         int32                            position in the group, from 0
prompt               string                           problem text as the data set has it
prompt_token_ids     list<int32>                      the chat-templated prompt as the policy saw it
answer               string                           gold answer
metadata             string                           JSON: what the data set knows besides
replica              string                           id of the replica that generated the group
generated_start      double                           start of generation, seconds since the epoch
generated_end        double                           end of generation, seconds since the epoch
token_ids            list<int32>                      the response's tokens
logprobs             list<float>                      their log-probabilities (nats) as sampled
versions             list<struct<version: int64,      spans of tokens by the policy version that sampled them
                     tokens: int32>>
loss_mask            list<uint8>                      1 where the policy chose the token
finish_reason        string                           ``stop`` or ``length``
response             string                           the decoded response
reward               double, null                     weighted total; null when unscored
rewards              map<string, double>              components by name
unscored             string, null                     why there is no reward
advantage            double, null                     group advantage used in training; null when the sample had none
routed_experts       list<list<list<int32>>>, null    experts of each token but the last, by layer; null unless reported
sampling_mask        list<list<int32>>, null          ids each token could be chosen from; null unless reported
==================== ================================ ===============================================================
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pa_core.errors import StoreError
from pa_core.records import Group, Prompt, Sample

SCHEMA_KEY = b"pa.rollouts.schema"
SCHEMA_VERSION = 1
SCHEMA = pa.schema(
    [
        ("version", pa.int64()),
        ("group_id", pa.string()),
        ("prompt_index", pa.int64()),
        ("sample_index", pa.int32()),
        ("prompt", pa.string()),
        ("prompt_token_ids", pa.list_(pa.int32())),
        ("answer", pa.string()),
        ("metadata", pa.string()),
        ("replica", pa.string()),
        ("generated_start", pa.float64()),
        ("generated_end", pa.float64()),
        ("token_ids", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float32())),
        ("versions", pa.list_(pa.struct([("version", pa.int64()), ("tokens", pa.int32())]))),
        ("loss_mask", pa.list_(pa.uint8())),
        ("finish_reason", pa.string()),
        ("response", pa.string()),
        ("reward", pa.float64()),
        ("rewards", pa.map_(pa.string(), pa.float64())),
        ("unscored", pa.string()),
        ("advantage", pa.float64()),
        ("routed_experts", pa.list_(pa.list_(pa.list_(pa.int32())))),
        ("sampling_mask", pa.list_(pa.list_(pa.int32()))),
    ],
    metadata={SCHEMA_KEY: str(SCHEMA_VERSION).encode()},
)


def to_table(groups: Sequence[Group], advantages: Mapping[str, Sequence[float | None]] | None = None) -> pa.Table:
    """One row per sample of ``groups``, in order; ``advantages`` by group id, one per sample."""
    rows = [
        _row(group, number, advantage)
        for group in groups
        for number, advantage in enumerate(_advantages(group, advantages or {}))
    ]
    columns = [pa.array([row[field.name] for row in rows], type=field.type) for field in SCHEMA]
    return pa.Table.from_arrays(columns, schema=SCHEMA)


def _advantages(group: Group, advantages: Mapping[str, Sequence[float | None]]) -> list[float | None]:
    """One per sample; null for a sample without a reward, whatever the estimator wrote in its place."""
    values = advantages.get(group.id, [None] * len(group.samples))
    return [
        None if sample.reward is None or value is None or math.isnan(value) else value
        for sample, value in zip(group.samples, values, strict=True)
    ]


def _row(group: Group, number: int, advantage: float | None) -> dict[str, Any]:
    prompt, sample = group.prompt, group.samples[number]
    return {
        "version": group.version,
        "group_id": prompt.id,
        "prompt_index": prompt.index,
        "sample_index": number,
        "prompt": prompt.text,
        "prompt_token_ids": prompt.token_ids,
        "answer": prompt.answer,
        "metadata": json.dumps(_plain(prompt.metadata), ensure_ascii=False),
        "replica": group.replica,
        "generated_start": group.generated_at[0],
        "generated_end": group.generated_at[1],
        "token_ids": sample.token_ids,
        "logprobs": sample.logprobs,
        "versions": [{"version": version, "tokens": tokens} for version, tokens in sample.versions],
        "loss_mask": sample.loss_mask,
        "finish_reason": sample.finish_reason,
        "response": sample.text,
        "reward": sample.reward,
        "rewards": list(sample.rewards.items()),
        "unscored": sample.unscored,
        "advantage": advantage,
        "routed_experts": None if sample.routed_experts is None else sample.routed_experts.tolist(),
        "sampling_mask": None if sample.sampling_mask is None else [ids.tolist() for ids in sample.sampling_mask],
    }


def from_table(table: pa.Table) -> list[Group]:
    """The groups of a table, in the order of their first rows. Raises :class:`StoreError` for another schema."""
    found = (table.schema.metadata or {}).get(SCHEMA_KEY, b"none").decode()
    if found != str(SCHEMA_VERSION):
        raise StoreError(f"rollouts have schema version {found}; this program reads version {SCHEMA_VERSION}")
    groups: dict[str, Group] = {}
    for number in range(table.num_rows):
        row = {name: table.column(name)[number] for name in table.column_names}
        group_id = row["group_id"].as_py()
        if group_id not in groups:
            groups[group_id] = _group(row)
        groups[group_id].samples.append(_sample(row))
    return list(groups.values())


def _group(row: Mapping[str, Any]) -> Group:
    prompt = Prompt(
        id=row["group_id"].as_py(),
        index=row["prompt_index"].as_py(),
        text=row["prompt"].as_py(),
        token_ids=_numbers(row["prompt_token_ids"]),
        answer=row["answer"].as_py(),
        metadata=json.loads(row["metadata"].as_py()),
    )
    span = (row["generated_start"].as_py(), row["generated_end"].as_py())
    return Group(prompt, [], row["version"].as_py(), row["replica"].as_py(), span)


def _sample(row: Mapping[str, Any]) -> Sample:
    # Columns that were added later are absent from older files.
    experts = row["routed_experts"].as_py() if "routed_experts" in row else None
    mask = row["sampling_mask"].as_py() if "sampling_mask" in row else None
    return Sample(
        token_ids=_numbers(row["token_ids"]),
        logprobs=_numbers(row["logprobs"]),
        versions=[(span["version"], span["tokens"]) for span in row["versions"].as_py()],
        loss_mask=_numbers(row["loss_mask"]),
        finish_reason=row["finish_reason"].as_py(),
        text=row["response"].as_py(),
        reward=row["reward"].as_py(),
        rewards=dict(row["rewards"].as_py()),
        unscored=row["unscored"].as_py(),
        routed_experts=None if experts is None else np.asarray(experts, dtype=np.int32),
        sampling_mask=None if mask is None else tuple(np.asarray(ids, dtype=np.int32) for ids in mask),
    )


def _numbers(cell: Any) -> NDArray[Any]:
    """A list cell as an array of its own: Arrow's memory is read-only, which torch does not accept."""
    return np.array(cell.values.to_numpy(zero_copy_only=False))


def _plain(value: Any) -> Any:
    """``value`` in JSON's terms; what those cannot express is kept as its text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, (np.ndarray, np.generic)):
        return _plain(value.tolist())
    if value is None or isinstance(value, (str, int, float)):
        return value
    return str(value)
