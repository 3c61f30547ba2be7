"""What a comparison or sweep is asked for, and what is refused before anything is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pa_core.config import TrainConfig
from pa_core.errors import ConfigError
from pa_core.loop.run import prepare_run
from pa_core.study.children import DEVICE_VARIABLES, Crew
from pa_core.study.compare import plan_comparison
from pa_core.study.config import CompareConfig, SweepConfig
from pa_core.study.plan import label, plan
from pa_core.study.sweep import choose_best, plan_sweep
from pa_core.study.terminal import grid, read_parameter, read_variant


def config(folder: Path, **changes: Any) -> TrainConfig:
    return TrainConfig.model_validate({"data": {"name": "chain_sum"}, "store": {"url": str(folder)}, **changes})


def sweep(**asked: Any) -> SweepConfig:
    return SweepConfig.model_validate({"metric": "reward/mean", **asked})


def test_a_grid_is_every_combination_and_listed_runs_follow_it() -> None:
    asked = sweep(
        parameters={"optimizer.learning_rate": [1e-6, "2e-6"], "seed": [0, 1]},
        runs=[{"seed": 0, "optimizer.learning_rate": 1e-6}, {"lora": {"rank": 2}}],
    )
    assert [variant.overrides for variant in asked.variants()] == [
        ["optimizer.learning_rate=1e-06", "seed=0"],
        ["optimizer.learning_rate=1e-06", "seed=1"],
        ["optimizer.learning_rate=2e-6", "seed=0"],
        ["optimizer.learning_rate=2e-6", "seed=1"],
        ["lora={rank: 2}"],
    ]


def test_values_typed_into_a_form_are_those_of_the_command_line(tmp_path: Path) -> None:
    typed = sweep(name="s", parameters=[{"key": "seed", "values": ["0", "1"]}, {"key": "lora", "values": ["null"]}])
    study = plan_sweep(config(tmp_path), typed, "x")
    assert [(child.name, child.config.seed) for child in study.children] == [
        ("seed-0.lora-null", 0),
        ("seed-1.lora-null", 1),
    ]
    assert typed.variants() == grid(["seed=0,1", "lora=null"], [], metric="reward/mean").variants()


def test_runs_are_validated_configs_with_names_and_folders_of_their_own(tmp_path: Path) -> None:
    study = plan_sweep(
        config(tmp_path), sweep(name="lr", parameters={"optimizer.learning_rate": [1e-5], "seed": [0, 3]}), "x"
    )
    assert [child.name for child in study.children] == ["learning_rate-1e-05.seed-0", "learning_rate-1e-05.seed-3"]
    last = study.children[1]
    assert (last.config.optimizer.learning_rate, last.config.seed) == (1e-5, 3)
    assert last.config.run_name == "lr.learning_rate-1e-05.seed-3"
    assert last.url == str(tmp_path / "lr" / "lr.learning_rate-1e-05.seed-3")
    assert not list(tmp_path.iterdir())


def test_a_comparison_is_of_sync_and_periodic_unless_others_are_named(tmp_path: Path) -> None:
    study = plan_comparison(config(tmp_path), CompareConfig(), "quickstart")
    assert [(child.name, child.config.schedule.stream) for child in study.children] == [
        ("sync", False),
        ("periodic", True),
    ]
    assert study.name.startswith("quickstart-compare-2")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"parameters": {"optimzer.learning_rate": [1]}}, "optimzer: unknown key; did you mean 'optimizer'"),
        ({"parameters": {"seed": [0, "many"]}}, "seed-many: seed: Input should be a valid integer"),
        ({"runs": [{"group_size": 1}]}, "group_size-1: group_size=1: .* raise group_size"),
        ({"runs": [{"run_name": "mine"}]}, "run_name is the same for all runs"),
        ({"parameters": {"seed": [0]}, "metric": "reward/mena/x"}, "metric='reward/mena/x' is logged by no run"),
        ({"parameters": {"seed": [0]}, "metric": "eval/accuracy"}, "evaluates nothing; set data.held_out"),
        ({"parameters": {"seed": [0]}, "name": "a/b"}, "name='a/b': use letters"),
        ({"runs": [{"name": "a", "overrides": []}, {"name": "a", "overrides": ["seed=1"]}]}, "two runs are called a"),
    ],
)
def test_what_cannot_be_trained_is_refused_by_name_and_leaves_nothing(
    tmp_path: Path, asked: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_sweep(config(tmp_path), sweep(**asked), "x")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({}, "nothing to sweep"),
        ({"parameters": [{"key": "seed", "values": ["0"]}, {"key": "seed", "values": ["1"]}]}, "seed is there twice"),
        ({"parameters": {"seed": [0]}, "concurrency": 3, "devices": ["0", "1"]}, "2 entries for concurrency=3"),
    ],
)
def test_a_sweep_that_asks_for_nothing_or_too_much_says_so(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sweep(**asked)


def test_a_name_is_the_same_for_the_same_overrides_and_another_for_others() -> None:
    assert label(["optimizer.learning_rate=1e-5", "seed=1"]) == "learning_rate-1e-5.seed-1"
    assert label(["data.system_prompt=a b"]) != label(["data.system_prompt=a/b"])
    assert label(["data.path=" + "x" * 200]) == label(["data.path=" + "x" * 200]) != label(["data.path=" + "x" * 201])
    assert label([]) == "unchanged"


def test_a_study_goes_on_under_its_name_but_not_with_other_settings(tmp_path: Path) -> None:
    asked = sweep(name="lr", parameters={"seed": [0, 1]})
    first = plan_sweep(config(tmp_path), asked, "x")
    prepare_run(first.children[0].config)

    again = plan_sweep(config(tmp_path, trainer={"threads": 1}), asked, "x")
    assert [child.going_on for child in again.children] == [("trainer.threads=1",), None]

    message = "seed-0 was trained with other settings: iterations is 100 there and 5 here. Choose another name"
    with pytest.raises(ConfigError, match=message):
        plan_sweep(config(tmp_path, iterations=5), asked, "x")


def test_a_name_that_is_taken_by_something_else_is_refused(tmp_path: Path) -> None:
    prepare_run(config(tmp_path, run_name="mine"))
    with pytest.raises(ConfigError, match="is a run; choose another name"):
        plan("sweep", "mine", "x", config(tmp_path), sweep(parameters={"seed": [0]}).variants())
    plan_sweep(config(tmp_path), sweep(name="lr", parameters={"seed": [0]}), "x").record("1234")
    with pytest.raises(ConfigError, match="is of a sweep, not of a compare"):
        plan_comparison(config(tmp_path), CompareConfig(name="lr"), "x")


def test_command_line_runs_and_axes() -> None:
    assert read_variant("slow: schedule.stream=false seed=1").model_dump() == {
        "name": "slow",
        "overrides": ["schedule.stream=false", "seed=1"],
    }
    assert read_variant("plain:").model_dump() == {"name": "plain", "overrides": []}
    assert read_variant("data.path=s3://b/x.jsonl").overrides == ["data.path=s3://b/x.jsonl"]
    assert read_variant("data.system_prompt='a b'").overrides == ["data.system_prompt=a b"]
    assert read_parameter("optimizer.learning_rate=1e-6,2e-6").values == ["1e-6", "2e-6"]
    assert read_parameter("optimizer.betas=[[0.9, 0.95], [0.9, 0.99]]").values == ["[0.9, 0.95]", "[0.9, 0.99]"]
    for wrong in ("seed", "=1", "seed="):
        with pytest.raises(ConfigError, match="expected KEY=V1,V2"):
            read_parameter(wrong)
    with pytest.raises(ConfigError, match="nothing to sweep"):
        grid([], [])
    with pytest.raises(ConfigError, match="mode=best: Input should be 'max' or 'min'"):
        grid(["seed=0"], [], mode="best")


def test_the_best_is_the_largest_or_smallest_and_never_nan() -> None:
    values = {"a": 0.5, "b": float("nan"), "c": 0.7, "d": 0.7}
    assert choose_best(values, "max") == "c"
    assert choose_best(values, "min") == "a"
    assert choose_best({"b": float("nan")}, "max") is None


class Ended:
    """A process that has ended, with what ``pa`` closes with."""

    pid = 1

    def __init__(self, log_path: Path, code: int, closing: str) -> None:
        self.log_path, self.code, self.closing = log_path, code, closing

    def poll(self) -> int:
        return self.code

    def stop(self, timeout: float) -> int:
        return self.code

    def tail(self, lines: int = 15) -> str:
        return self.closing


def test_each_run_at_a_time_sees_its_own_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, str]] = []

    def spawn(command: list[str], log: Path, env: dict[str, str]) -> Ended:
        seen.append({name: env[name] for name in DEVICE_VARIABLES})
        return Ended(log, 1, "")

    monkeypatch.setattr("pa_core.study.children.spawn", spawn)
    study = plan_sweep(config(tmp_path), sweep(name="d", parameters={"seed": [0, 1, 2]}), "x")
    with Crew(study, [], concurrency=2, devices=["0,1", "2,3"]) as crew:
        crew.train()
    assert [one["CUDA_VISIBLE_DEVICES"] for one in seen] == ["0,1", "2,3", "0,1"]


@pytest.mark.parametrize(
    ("code", "closing", "state", "error", "kept"),
    [
        (1, '{"error": "no such device", "exit_code": 1}', "failed", "no such device", True),
        (3, '{"error": "stopped by SIGTERM", "exit_code": 3}', "stopped", "stopped by SIGTERM", True),
        (-9, '{"error": "stopped by SIGTERM", "exit_code": 3}', "stopped", "stopped by SIGTERM", True),
        (-9, "half a line", "failed", "ended with -9; its last lines:\nhalf a line", True),
        (2, '{"error": "no such model", "exit_code": 2}', "failed", "no such model", False),
    ],
)
def test_how_a_run_ended_is_told_and_only_one_that_never_began_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, closing: str, state: str, error: str, kept: bool
) -> None:
    monkeypatch.setattr("pa_core.study.children.spawn", lambda command, log, env: Ended(log, code, closing))
    study = plan_sweep(config(tmp_path), sweep(name="d", runs=[{"seed": 1}, {"seed": 2}]), "x")
    with Crew(study, []) as crew:
        outcomes = crew.train()
    assert [(one.name, one.state, one.error) for one in outcomes] == [
        ("seed-1", state, error),
        ("seed-2", state, error),
    ]
    assert (tmp_path / "d/d.seed-1/run.json").exists() == kept
