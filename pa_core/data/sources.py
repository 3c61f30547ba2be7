"""Rows of a data set: reasoning-gym tasks, JSONL and Parquet files behind any fsspec URL, hub data sets."""

from __future__ import annotations

import dataclasses
import difflib
import io
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import fsspec

from pa_core.config import DataConfig
from pa_core.data.answers import AnswerExtractor
from pa_core.errors import DataError

_COMPRESSED = {".gz", ".bz2", ".xz", ".zst"}
_HUB_OPTIONS = {"name", "revision", "data_dir", "data_files"}


@dataclasses.dataclass(frozen=True)
class Row:
    """One problem as the data set has it.

    Attributes:
        number: line or row number in the source, from 1.
        question: problem text.
        answer: canonical gold answer; empty only for reasoning-gym tasks that have no single right answer.
        metadata: the other columns, or what reasoning-gym knows of the problem.
    """

    number: int
    question: str
    answer: str
    metadata: dict[str, Any]


def source_name(config: DataConfig) -> str:
    """The source in the words of the configuration, for messages."""
    return f"data.name={config.name!r}" if config.name is not None else f"data.path={config.path!r}"


def read_rows(config: DataConfig, seed: int) -> list[Row]:
    """All rows of the configured source, at most ``config.limit``.

    Args:
        seed: seeds a reasoning-gym task whose options set no seed of their own.

    Raises:
        DataError: the source cannot be read or is empty, a column is missing, or a row has no usable answer.
    """
    rows = _task_rows(config, seed) if config.name is not None else _table_rows(config)
    result = list(itertools.islice(rows, config.limit))
    if not result:
        raise DataError(f"{source_name(config)} has no rows; training needs at least one problem")
    return result


def _nearest(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


def _task_rows(config: DataConfig, seed: int) -> Iterator[Row]:
    """Rows of a reasoning-gym task; its scorer finds all it needs again in the metadata."""
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    name = str(config.name)
    if name not in DATASETS:
        hint = _nearest(name, DATASETS) or f"; there are {len(DATASETS)}, for example chain_sum, gsm_symbolic"
        raise DataError(f"data.name={name!r} is not a reasoning-gym task{hint}")
    known = [field.name for field in dataclasses.fields(DATASETS[name][1])]
    for option in config.options:
        if option not in known:
            raise DataError(
                f"data.options.{option} is not an option of the task {name}{_nearest(option, known)} "
                f"(options: {', '.join(known)})"
            )
    try:
        dataset = reasoning_gym.create_dataset(name, **{"seed": seed, **config.options})
    except (AssertionError, TypeError, ValueError) as error:
        raise DataError(f"data.options={config.options} do not suit the task {name}: {error}") from error
    for number in range(1, len(dataset) + 1):
        entry = dataset[number - 1]
        task = {"name": name, "options": config.options, "question": entry["question"]}
        answer = "" if entry["answer"] is None else str(entry["answer"]).strip()
        yield Row(number, entry["question"], answer, {**entry["metadata"], "reasoning_gym": task})


def _table_rows(config: DataConfig) -> Iterator[Row]:
    """Rows of a table, with the configured columns as question and answer."""
    extract = AnswerExtractor(config.answer_pattern)
    source = source_name(config)
    for number, record in _records(config):
        for field in ("prompt_column", "answer_column"):
            column = getattr(config, field)
            if column not in record:
                raise DataError(
                    f"data.{field}={column!r}: row {number} of {source} has no such column"
                    f"{_nearest(column, record)} (columns: {', '.join(record) or 'none'})"
                )
        question = record[config.prompt_column]
        if not isinstance(question, str) or not question.strip():
            raise DataError(
                f"row {number} of {source}: data.prompt_column={config.prompt_column!r} must be text, got {question!r}"
            )
        try:
            answer = extract(record[config.answer_column])
        except ValueError as error:
            raise DataError(
                f"row {number} of {source}: the answer in data.answer_column={config.answer_column!r} is {error}"
            ) from None
        # With a pattern the column holds more than the answer (a worked solution), which a reward may want.
        dropped = {config.prompt_column} | ({config.answer_column} if config.answer_pattern is None else set())
        yield Row(number, question, answer, _plain({k: v for k, v in record.items() if k not in dropped}))


def _plain(record: dict[str, Any]) -> dict[str, Any]:
    """The record as JSON has it, so that any store can keep it; binary columns (pictures, sound) stay behind."""
    result: dict[str, Any] = json.loads(
        json.dumps({key: value for key, value in record.items() if not isinstance(value, bytes)}, default=str)
    )
    return result


def _records(config: DataConfig) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Numbered records of a file, URL, local data set folder or hub data set."""
    path = str(config.path)
    suffixes = [suffix.lower() for suffix in Path(path).suffixes]
    kind = next((suffix for suffix in reversed(suffixes) if suffix not in _COMPRESSED), "")
    if kind in {".jsonl", ".json", ".ndjson", ".parquet"}:
        if config.options:
            raise DataError(f"data.options={config.options} has no meaning for the file data.path={path!r}; remove it")
        return _file_records(path, kind)
    if "://" in path or Path(path).expanduser().is_file():
        raise DataError(f"data.path={path!r}: unknown kind of file; use .jsonl, .json or .parquet (.gz too)")
    if Path(path).expanduser().is_dir() or re.fullmatch(r"[\w.-]+(/[\w.-]+)?", path):
        return _hub_records(config, path)
    raise DataError(f"data.path={path!r} is neither a file that exists nor a hub data set id; check the path")


def _file_records(path: str, kind: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    url = path if "://" in path else str(Path(path).expanduser().resolve())
    try:
        with fsspec.open(url, "rb", compression="infer") as file:
            yield from _parquet_records(file) if kind == ".parquet" else _json_records(file, path)
    except DataError:
        raise
    except FileNotFoundError:
        raise DataError(f"data.path={path!r} does not exist; check the path or URL") from None
    except Exception as error:  # every fsspec protocol brings exception types of its own
        raise DataError(f"data.path={path!r} cannot be read: {type(error).__name__}: {error}") from error


def _parquet_records(file: IO[bytes]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    import pyarrow.parquet as parquet

    batches = parquet.ParquetFile(file).iter_batches()
    return enumerate(itertools.chain.from_iterable(batch.to_pylist() for batch in batches), start=1)


def _json_records(file: IO[bytes], path: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """One object per line, or one array of objects."""
    lines = enumerate(io.TextIOWrapper(file, encoding="utf-8-sig"), start=1)
    for number, line in lines:
        if not line.strip():
            continue
        if line.lstrip().startswith("["):
            text = line + "".join(rest for _, rest in lines)
            for index, item in enumerate(_parse(text, path, "the array"), start=1):
                yield index, _as_record(item, path, f"item {index}")
            return
        yield number, _as_record(_parse(line, path, f"line {number}"), path, f"line {number}")


def _parse(text: str, path: str, place: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"data.path={path!r}: {place} is not JSON: {error}") from None


def _as_record(item: Any, path: str, place: str) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise DataError(f"data.path={path!r}: {place} is not an object with columns, but {type(item).__name__}")
    return item


def _hub_records(config: DataConfig, path: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Rows of a hub data set, or of a local folder of data files. ``data.options`` go to ``load_dataset``."""
    import datasets

    for option in config.options:
        if option not in _HUB_OPTIONS:
            raise DataError(
                f"data.options.{option} is not an option of a hub data set (options: {', '.join(sorted(_HUB_OPTIONS))})"
            )
    folder = Path(path).expanduser()
    try:
        dataset = datasets.load_dataset(str(folder) if folder.is_dir() else path, split=config.split, **config.options)
    except Exception as error:  # network, missing set, missing split and missing configuration differ in type
        raise DataError(
            f"data.path={path!r} is not a local file, and loading it as a hub data set (data.split={config.split!r}, "
            f"data.options={config.options}) failed: {type(error).__name__}: {error}. "
            "Check the id and the network, or give a local .jsonl or .parquet file"
        ) from error
    return enumerate(dataset, start=1)
