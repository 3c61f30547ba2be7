"""LoRA end to end: ``pa train`` with adapters on the embedded engine, and adapter versions on a real vLLM server."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_train import artifact, last_json, mlflow_run, pa, tiny_tree, write_config
from transformers import AutoModelForCausalLM
from vllm_servers import started, vllm_tree

from pa_core.config import LoraConfig
from pa_core.config_files import parse_config
from pa_core.errors import EngineError
from pa_core.loop.run import open_run
from pa_core.model.loading import load_policy
from pa_core.rollout.connect import open_session
from pa_core.rollout.protocol import GenerateRequest
from pa_core.rollout.server import build_engine
from pa_core.rollout.vllm_client import VllmReplicaClient
from pa_core.store.objects import ObjectStore
from pa_core.store.policy import AdapterTable
from pa_core.store.versions import version_name
from pa_core.store.weights import WeightStore

LORA = {"rank": 4, "alpha": 8, "target_modules": ["q_proj", "v_proj", "up_proj"]}


def lora_tree(model: Path, folder: Path, **changes: Any) -> dict[str, Any]:
    optimizer = {"learning_rate": 3e-2, "steps_per_iteration": 2}
    return tiny_tree(model, folder, lora=LORA, optimizer=optimizer, store={"url": str(folder / "runs")}) | changes


@pytest.fixture(scope="module")
def finished(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Folder and summary of a finished run, all of whose versions are kept."""
    folder = tmp_path_factory.mktemp("lora")
    tree = lora_tree(tiny_model, folder)
    tree["store"]["keep_versions"] = 10
    result = pa("train", write_config(folder, tree), "--json")
    assert result.returncode == 0, result.stderr[-4000:]
    return folder, last_json(result.stdout)


def weights_of(folder: Path) -> WeightStore:
    return WeightStore(ObjectStore.open(str(folder / "runs/run")))


def test_every_version_is_an_adapter_of_the_unchanged_initial_model(
    finished: tuple[Path, dict[str, Any]], tiny_model: Path
) -> None:
    folder, summary = finished
    weights = weights_of(folder)
    initial = AutoModelForCausalLM.from_pretrained(tiny_model).state_dict()
    base = weights.base.load(0)
    assert base.keys() == initial.keys()
    assert all(torch.equal(base[name], initial[name]) for name in initial)
    targets = {f"{module}.weight" for module in LORA["target_modules"]}  # type: ignore[attr-defined]
    for version in range(4):
        manifest = weights.require(version)
        assert manifest.adapter is not None
        assert manifest.adapter.base_sha256 == weights.base.require(0).weights_sha256
        assert {".".join(name.split(".")[-2:]) for name in manifest.adapter.pairs} == targets
        assert all("lora_" in name for name in manifest.table.entries)
        stored = sum(path.stat().st_size for path in (folder / "runs/run/weights" / version_name(version)).iterdir())
        assert stored < 0.2 * sum(file.size for file in weights.base.require(0).shards)
    assert weights.require(3).weights_sha256 == summary["weights_sha256"]
    first, last = weights.load(0), weights.load(3)
    assert all(not tensor.any() for name, tensor in first.items() if "lora_B" in name)
    assert all(tensor.any() for tensor in last.values())


def test_replica_and_trainer_agree_and_the_reference_is_the_initial_policy(
    finished: tuple[Path, dict[str, Any]],
) -> None:
    from mlflow import MlflowClient

    folder, summary = finished
    run = mlflow_run(folder, summary["mlflow_run_id"])
    history = MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}").get_metric_history
    kl = {metric.step: metric.value for metric in history(run.info.run_id, "train/kl")}
    mismatch = [metric.value for metric in history(run.info.run_id, "train/logprob_mismatch_mean")]
    assert len(kl) == len(mismatch) == 3
    # The first iteration's second step already trains a policy that has moved, hence no exact 0.
    assert 0 <= kl[0] < kl[2]
    assert all(np.isfinite(value) for value in (*kl.values(), *mismatch, summary["reward_first"]))
    assert run.data.metrics["train/ratio"] != 1.0


def test_the_final_model_is_whole_and_the_one_that_replicas_had(finished: tuple[Path, dict[str, Any]]) -> None:
    folder, summary = finished
    saved = artifact(mlflow_run(folder, summary["mlflow_run_id"]), "model")
    model = AutoModelForCausalLM.from_pretrained(saved)
    names = set(model.state_dict())
    served = AutoModelForCausalLM.from_pretrained(saved)
    weights_of(folder).load_into(3, served)
    assert names == set(weights_of(folder).base.require(0).table.entries) | {
        "lm_head.weight",
        "model.embed_tokens.weight",
    }
    assert all(torch.equal(tensor, served.state_dict()[name]) for name, tensor in model.state_dict().items())


def test_a_replica_answers_as_the_merged_model_does_whatever_it_had_before(
    finished: tuple[Path, dict[str, Any]], tiny_model: Path
) -> None:
    folder, _ = finished
    run = open_run(str(folder / "runs/run"))
    weights = weights_of(folder)
    engine = build_engine(run.store, run.config, "r9")
    answers = {}
    try:
        for version in (3, 0, 2, 3):
            assert engine.load(version) == weights.require(version).weights_sha256
            merged = AutoModelForCausalLM.from_pretrained(tiny_model).eval()
            weights.load_into(version, merged)
            request = GenerateRequest(
                group_id="g",
                token_ids=np.arange(20, 32, dtype=np.int32),
                version=version,
                samples=1,
                temperature=0.0,
                max_tokens=12,
                seed=0,
                stop_token_ids=(),
            )
            answers[version] = engine.submit(request).result(60).generations[0].token_ids.tolist()
            ids = torch.arange(20, 32).unsqueeze(0)
            merged.generation_config.eos_token_id = None
            expected = merged.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12, use_cache=True
            )
            assert answers[version] == expected[0, 12:].tolist()
    finally:
        engine.close()
    assert answers[3] != answers[0]


def test_eval_measures_an_adapter_version_again(finished: tuple[Path, dict[str, Any]]) -> None:
    folder, summary = finished
    result = pa("eval", folder / "runs/run", "--json")
    assert result.returncode == 0, result.stderr[-2000:]
    found = last_json(result.stdout)
    assert (found["version"], found["accuracy"]) == (3, pytest.approx(summary["eval_after"]))


def test_a_run_with_one_step_has_no_divergence_at_first_and_goes_on_after_a_stop(
    tiny_model: Path, tmp_path: Path
) -> None:
    """The first iteration's KL is exactly 0, the checkpoint holds the adapter's optimizer, and a resumed run ends."""
    tree = lora_tree(tiny_model, tmp_path, iterations=2, evaluation={"enabled": False}, checkpoint={"every": 1})
    tree["optimizer"] = {"learning_rate": 1e-2}
    result = pa("train", write_config(tmp_path, tree), "--json")
    assert result.returncode == 0, result.stderr[-3000:]
    from mlflow import MlflowClient

    history = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}").get_metric_history
    run_id = last_json(result.stdout)["mlflow_run_id"]
    assert next(metric.value for metric in history(run_id, "train/kl")) == pytest.approx(0, abs=1e-9)
    assert max(metric.value for metric in history(run_id, "train/logprob_mismatch_max")) < 1e-4
    (optimizer,) = (tmp_path / "runs/run/checkpoints/v000002").glob("*.safetensors")
    assert b"lora_A" in optimizer.read_bytes() and b"base_layer" not in optimizer.read_bytes()

    weights = weights_of(tmp_path)
    before = weights.require(2).weights_sha256
    base = [path.stat().st_mtime_ns for path in (tmp_path / "runs/run/weights/base/v000000").iterdir()]
    (tmp_path / "runs/run/summary.json").unlink()
    facts = json.loads((tmp_path / "runs/run/run.json").read_text())
    facts["config"]["iterations"] = 3
    (tmp_path / "runs/run/run.json").write_text(json.dumps(facts))
    result = pa("train", "--resume", tmp_path / "runs/run", "--json")
    assert result.returncode == 0, result.stderr[-3000:]
    assert last_json(result.stdout)["iterations"] == 3
    assert weights.require(2).weights_sha256 == before
    assert weights.require(3).adapter == weights.require(2).adapter
    assert base == [path.stat().st_mtime_ns for path in (tmp_path / "runs/run/weights/base/v000000").iterdir()]


def test_a_target_that_the_model_lacks_ends_the_run_as_bad_input(tiny_model: Path, tmp_path: Path) -> None:
    tree = lora_tree(tiny_model, tmp_path, lora={"target_modules": ["query"]})
    result = pa("train", write_config(tmp_path, tree))
    assert result.returncode == 2, result.stderr[-2000:]
    assert "lora.target_modules" in result.stderr and "q_proj" in result.stderr and "Traceback" not in result.stderr


def publish_adapters(weights: WeightStore, model: Any) -> None:
    """The base, the untrained adapter as version 0, and two versions that change the model's answers."""
    from pa_core.model.adapters import Adapter

    adapter = Adapter(model, LoraConfig(**LORA), seed=0)
    base = adapter.base_tensors()
    table = AdapterTable(weights.base.publish(0, base).weights_sha256, adapter.scaling, adapter.pairs)
    weights.publish(0, adapter.tensors(), adapter.files(), table)
    for version in (1, 2):
        generator = torch.Generator().manual_seed(version)
        tensors = dict(adapter.tensors())
        for name, (a, b) in adapter.pairs.items():
            right = torch.randn(tensors[b].shape, generator=generator)
            tensors[b] = right * (0.1 * base[name].std() / (adapter.scaling * (right @ tensors[a]).std()))
        weights.publish(version, tensors, adapter.files(), table)


def test_vllm_answers_as_the_merged_model_after_every_adapter_load(vllm_environment: str, tmp_path: Path) -> None:
    config = parse_config(vllm_tree(str(tmp_path)))
    policy = load_policy(config.model)
    chat = [{"role": "user", "content": "Name a colour."}]
    prompt = np.asarray(
        policy.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False), dtype=np.int32
    )

    def request(version: int) -> GenerateRequest:
        return GenerateRequest(
            group_id="g",
            token_ids=prompt,
            version=version,
            samples=1,
            temperature=0.0,
            max_tokens=24,
            seed=0,
            stop_token_ids=policy.eos_token_ids,
        )

    def greedy(weights: WeightStore, version: int) -> list[int]:
        merged = AutoModelForCausalLM.from_pretrained(policy.source, dtype=torch.float32).eval()
        weights.load_into(version, merged)
        ids = torch.tensor([prompt.tolist()])
        out = merged.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24)
        return [int(token) for token in out[0, len(prompt) :]]

    with started(config) as (run, replicas, records):
        weights = WeightStore(run.store)
        publish_adapters(weights, policy.model)
        expected = {version: greedy(weights, version) for version in (0, 1, 2)}
        assert len({tuple(answer) for answer in expected.values()}) == 3
        shard = tmp_path / "run/weights" / version_name(2) / weights.require(2).shards[0].name
        whole = shard.read_bytes()

        async def test() -> None:
            async with open_session() as session:
                client = VllmReplicaClient(session, "r0", records["r0"].url, replicas.api_key, run.url)
                for version in (0, 1, 0, 2, 1):
                    digest = weights.require(version).weights_sha256
                    assert await client.load(version, digest) == digest
                    answer = await client.generate(request(version))
                    assert answer.generations[0].token_ids.tolist() == expected[version], version
                shard.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
                with pytest.raises(EngineError, match="sha256"):
                    await client.load(2, weights.require(2).weights_sha256)
                assert (await client.generate(request(1))).generations[0].token_ids.tolist() == expected[1]
                shard.write_bytes(whole)
                await client.load(2, weights.require(2).weights_sha256)
                assert (await client.generate(request(2))).generations[0].token_ids.tolist() == expected[2]

        asyncio.run(test())
