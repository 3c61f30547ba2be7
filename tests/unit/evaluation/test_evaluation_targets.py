"""What a request means: which run, which version, which problems, asked in which words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pa_core.config_files import parse_config
from pa_core.errors import ConfigError
from pa_core.evaluation.request import EvaluationRequest
from pa_core.loop.evaluation_target import Target, find_target
from pa_core.loop.interval import IntervalEvaluation
from pa_core.loop.run import Run, prepare_run
from pa_core.store.weights import WeightStore


def prepared(folder: Path, **changes: Any) -> Run:
    tree = {
        "run_name": "run",
        "model": {"path": str(folder / "absent")},
        "data": {"name": "chain_sum", "held_out": 0.2, "system_prompt": "Be brief."},
        "rewards": [{"name": "number"}],
        "store": {"url": str(folder / "runs")},
    }
    return prepare_run(parse_config(tree | changes))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run with versions 2 and 3."""
    run = prepared(tmp_path)
    for version in (2, 3):
        WeightStore(run.store).publish(version, {"w": torch.full((2,), float(version))})
    return run


def found(target: str, *overrides: str, **request: Any) -> Target:
    return find_target(EvaluationRequest(target=target, overrides=list(overrides), **request))


def test_a_run_is_evaluated_at_its_latest_version_on_its_own_held_out_problems(run: Run) -> None:
    target = found(run.url)
    assert (target.version, target.name, target.fresh) == (None, None, False), "the latest"
    assert target.run.config == run.config


def test_another_measure_of_the_held_out_problems_has_a_name_of_its_own(run: Run) -> None:
    assert found(run.url, "engine.threads=1").name is None
    target = found(run.url, "evaluation.samples=4", "evaluation.temperature=0.7")
    assert target.name == "held_out-k4-t0.7"
    assert target.run.config.evaluation.samples == 4


def test_a_checkpoint_is_the_version_in_its_path(run: Run) -> None:
    assert found(f"{run.url}/checkpoints/v000002").version == 2
    assert found(f"{run.url}/checkpoints/v000002/", version=2).version == 2
    with pytest.raises(ConfigError, match=r"is version 2, and --version says 3"):
        found(f"{run.url}/checkpoints/v000002", version=3)


def test_a_named_set_is_read_with_its_columns_and_asked_in_the_runs_words(run: Run) -> None:
    target = found(run.url, "data.path=test.jsonl", problems="gsm8k")
    data = target.run.config.evaluation.data
    assert data is not None
    assert (data.path, data.prompt_column, data.answer_pattern) == ("test.jsonl", "question", r"####\s*(.+)")
    assert (data.system_prompt, data.prompt_template) == ("Be brief.", "{prompt}")
    assert target.run.config.evaluation_metric == "math"
    assert target.run.config.evaluation.limit is None
    assert target.name == "gsm8k"


def test_problems_of_ones_own_keep_the_runs_rewards_and_take_the_name_of_their_file(run: Run) -> None:
    target = found(run.url, "data.prompt_column=q", problems="own", path="sets/hard ones.jsonl")
    assert target.name == "hard-ones"
    assert target.run.config.evaluation.data is not None
    assert target.run.config.evaluation.data.prompt_column == "q"
    assert target.run.config.evaluation_metric == "number"
    assert found(run.url, "evaluation.limit=5", problems="own", path="a.jsonl").run.config.evaluation.limit == 5


def test_a_model_becomes_a_run_of_its_own_with_room_to_reason(tmp_path: Path) -> None:
    target = found("owner/model", f"store.url={tmp_path}", problems="aime24", path="aime.jsonl")
    assert (target.version, target.fresh) == (0, True)
    assert target.run.name.startswith("eval-model-")
    assert target.run.config.model.path == "owner/model"
    assert target.run.config.sampling.max_tokens == 8192
    assert "\\boxed{}" in target.run.config.evaluation.data.prompt_template  # type: ignore[union-attr]
    assert json.loads((tmp_path / target.run.name / "run.json").read_text())["name"] == target.run.name


@pytest.mark.parametrize(
    ("target", "request_", "message"),
    [
        ("runs/typo", {}, r"there is no run at runs/typo: run.json is missing. .*data.path=FILE"),
        ("owner/model", {"problems": "mawps"}, "mawps needs its problems: data.path=FILE"),
        ("owner/model", {"path": "a.jsonl", "problems": "own", "version": 3}, "is no run, so it has no version 3"),
        ("wheel://package/file.gguf", {}, "say which problems to evaluate it on"),
    ],
)
def test_what_is_missing_is_named_with_its_fix(target: str, request_: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        found(target, **request_)


def test_a_version_that_is_not_there_is_named_with_the_latest(run: Run) -> None:
    with pytest.raises(ConfigError, match=r"version 1 is not published, or not kept any more \(latest: 3\)"):
        found(run.url, version=1)


def test_due_versions_are_held_until_the_evaluator_has_died_which_is_told(tmp_path: Path) -> None:
    run = prepared(tmp_path, iterations=7, evaluation={"every": 2})
    told: list[str] = []
    with IntervalEvaluation(run, told.append) as interval:
        interval.start(0, {0, 2})
        assert interval.held() == {4, 6}
        awaited: list[int] = []
        assert list(interval.rest(awaited.append)) == []  # its model does not exist, so it ends with an error
        assert interval.held() == set()
    (message,) = told
    assert "training goes on; versions without: 4, 6" in message
    assert "absent" in message
