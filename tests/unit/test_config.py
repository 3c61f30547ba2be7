"""Configuration: every error names the key, the value and the fix; the contracts import without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from pa_core.config import TrainConfig
from pa_core.config_files import load_config, parse_config
from pa_core.errors import ConfigError

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


def tree(**changes: Any) -> dict[str, Any]:
    return {"data": {"name": "chain_sum"}, **changes}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_config_is_valid_and_says_its_purpose(path: Path) -> None:
    load_config(path)
    assert path.read_text().startswith("# ")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"optimzer": {}}, "optimzer: unknown key; did you mean 'optimizer'?"),
        ({"optimizer": {"learning_rat": 1}}, "optimizer.learning_rat: unknown key; did you mean 'learning_rate'?"),
        ({"rewards": [{"name": "exact", "wieght": 2}]}, "rewards.0.wieght: unknown key; did you mean 'weight'?"),
        ({"iterations": "many"}, "iterations: .*got 'many'"),
        ({"sampling": {"temperature": -1}}, r"sampling.temperature: .*greater than 0.*got -1"),
        ({"group_size": 1}, "group_size=1: a group advantage needs at least 2 samples"),
        ({"data": {"path": "x.jsonl", "name": "chain_sum"}}, "exactly one of name .* and path"),
        ({"data": {"name": "chain_sum", "prompt_template": "no place"}}, r"must contain \{prompt\}"),
        ({"objective": {"advantage": "areal"}}, "schedule.stream=false or a group-level std"),
        ({"objective": {"advantage": "reinforce_pp"}}, "schedule.stream=false or a group-level std"),
        ({"objective": {"clip_low": 2}}, "objective.clip_low: .*less than or equal to 1.*got 2"),
        ({"objective": {"clip_dual": 1.1}}, "clip_dual=1.1 must exceed 1 .*clip_high=1.2"),
        ({"objective": {"loss": "cispo", "clip_dual": 3}}, "clip_dual has no meaning for objective.loss=cispo"),
        ({"objective": {"kl": {"estimator": "k1"}}}, "estimator=k1 in the loss .* use k2 or k3, or set"),
        ({"objective": {"kl": {"placement": "reward", "weighted": True}}}, "leave it out"),
        ({"objective": {"kl": {"placement": "reward"}}}, "objective.beta is 0; set objective.beta"),
        (
            {"objective": {"beta": 0.1, "kl": {"placement": "reward"}}, "sampling": {"dynamic": {}}},
            "set objective.kl.placement=loss or remove sampling.dynamic",
        ),
        (
            {"objective": {"loss": "reinforce"}, "optimizer": {"steps_per_iteration": 2}},
            r"steps_per_iteration=1 \(got 2\) or objective.loss=cispo",
        ),
        ({"optimizer": {"steps_per_iteration": 3}}, "must divide prompts_per_iteration=16"),
        ({"rewards": [{"name": "exact"}, {"name": "exact"}]}, "names must differ"),
        ({"rewards": [{"name": "mean", "function": "m:f"}]}, "names of the run's own reward metrics"),
        ({"evaluation": {"metric": "math"}}, "evaluation.metric='math' is not one of the rewards"),
        ({"schedule": {"max_staleness": 2}}, "schedule.max_staleness"),
        ({"sampling": {"dynamic": {"max_draws": float("inf")}}}, "sampling.dynamic.max_draws: .*finite"),
        ({"rewards": [{"name": "exact", "weight": float("nan")}]}, "rewards.0.weight: .*finite"),
        ({"optimizer": {"betas": [0.9, 1.0]}}, "optimizer.betas.1: .*less than 1"),
        ({"objective": {"loss": ["grpo"]}}, "objective.loss: "),
        ({"objective": {"advantage": {"preset": ["verl"]}}}, "objective.advantage.preset: "),
    ],
)
def test_a_wrong_config_is_refused_by_key(changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        parse_config(tree(**changes))


@pytest.mark.parametrize(
    ("objective", "resolved"),
    [
        ({}, ("token", 0.2, 0.2)),
        ({"loss": "gspo"}, ("sequence", 3e-4, 4e-4)),
        ({"loss": "cispo"}, ("token", 1.0, 4.0)),
        ({"loss": "reinforce", "advantage": "rloo"}, ("sequence_sum", 0.2, 0.2)),
        ({"loss": "gspo", "clip_low": None, "clip_high": 0.1, "loss_normalization": "token"}, ("token", 3e-4, 0.1)),
    ],
)
def test_a_loss_brings_what_it_was_published_with_and_keys_override(
    objective: dict[str, Any], resolved: tuple[str, float, float]
) -> None:
    config = parse_config(tree(objective=objective)).objective
    assert (config.loss_normalization, config.clip_low, config.clip_high) == resolved
    assert config.model_dump()["clip_low"] == resolved[1]  # what the run records
    assert type(config).model_validate(config.model_dump()) == config


def test_a_run_records_what_its_advantage_preset_means() -> None:
    recorded = parse_config(tree(objective={"advantage": {"preset": "nemo_rl", "eps": 1e-5}})).objective.model_dump()
    assert recorded["advantage"] == {"preset": "nemo_rl", "std": "unbiased", "baseline": "leave_one_out", "eps": 1e-5}


def test_kl_in_the_reward_is_k1_unless_said_otherwise() -> None:
    assert parse_config(tree(objective={"beta": 0.1, "kl": {"placement": "reward"}})).objective.kl.estimator == "k1"
    assert parse_config(tree(objective={"beta": 0.1})).objective.kl.estimator == "k3"


def test_batch_std_is_allowed_when_all_groups_are_there_first() -> None:
    config = parse_config(tree(objective={"advantage": "areal"}, schedule={"stream": False}))
    assert config.schedule.name == "sync"


def test_overrides_reach_sections_lists_and_numbers(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(tree(rewards=[{"name": "exact"}])))
    config = load_config(
        path, ["optimizer.learning_rate=1e-5", "rewards.0.weight=2", "schedule.stream=false", "objective.advantage=trl"]
    )
    assert config.optimizer.learning_rate == 1e-5
    assert config.rewards[0].weight == 2.0
    assert not config.schedule.stream
    assert config.objective.advantage.preset == "trl"


@pytest.mark.parametrize("override", ["seed", "=3", "rewards.7.weight=1", "seed.deeper=1"])
def test_a_malformed_override_is_quoted_back(tmp_path: Path, override: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(tree(seed=0, rewards=[{"name": "exact"}])))
    with pytest.raises(ConfigError, match="override"):
        load_config(path, [override])


@pytest.mark.parametrize(("content", "expected"), [("a: [", "not valid YAML"), ("- 1", "expected a mapping")])
def test_a_broken_file_is_named(tmp_path: Path, content: str, expected: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=f"broken.yaml: {expected}"):
        load_config(path)


def test_every_field_is_described_and_in_order_for_the_form() -> None:
    schema = TrainConfig.model_json_schema()
    sections = [schema, *schema["$defs"].values()]
    for section in sections:
        fields = section["properties"]
        assert [field["position"] for field in fields.values()] == list(range(len(fields)))
        assert all(field.get("description") for field in fields.values()), section["title"]


def test_contracts_import_without_torch_prefect_or_mlflow() -> None:
    code = (
        "import sys, pa_core.config, pa_core.records, pa_core.errors;"
        "print([name for name in ('torch', 'prefect', 'mlflow', 'transformers') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.strip() == "[]"
