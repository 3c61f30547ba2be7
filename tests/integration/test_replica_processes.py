"""Replicas as real processes on a tiny random model: gate, key, weight changes, and every way to die."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import aiohttp
import numpy as np
import psutil
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from pa_core.config_files import parse_config
from pa_core.errors import EngineError
from pa_core.rollout.config import EngineConfig
from pa_core.rollout.pool import ReplicaPool
from pa_core.rollout.process import ReplicaSet
from pa_core.rollout.protocol import GenerateRequest, GenerateResponse
from pa_core.store.objects import ObjectStore
from pa_core.store.registry import ReplicaRegistry
from pa_core.store.weights import WeightStore

VOCABULARY = 64


def make_model(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_model(0).save_pretrained(folder)
    words = {f"w{index}": index for index in range(2, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, **words}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    fast.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    fast.save_pretrained(folder)
    return folder


def make_run(folder: Path, model_path: str, **engine: float) -> tuple[ObjectStore, EngineConfig]:
    """A run's folder with run.json and version 0."""
    tree = {
        "model": {"path": model_path},
        "data": {"name": "chain_sum"},
        "engine": {"replicas": 2, "batch_groups": 2, "threads": 1, "request_timeout_s": 120, **engine},
    }
    config = parse_config(tree)
    store = ObjectStore.open(str(folder / "run"))
    store.publish("run.json", json.dumps({"name": "run", "config": config.model_dump(mode="json")}).encode())
    WeightStore(store).publish(0, make_model(0).state_dict(), {})
    return store, config.engine


class Replicas:
    """A run with its replica processes; every test makes a pool of its own."""

    def __init__(self, folder: Path, model_path: str, **engine: float) -> None:
        self.store, self.config = make_run(folder, model_path, **engine)
        self.processes = ReplicaSet(self.store.url, self.config, folder / "logs")
        self.processes.start()

    def pool(self, attached: bool = False) -> ReplicaPool:
        """A pool in the program that started the processes, or one in another program (``attached``)."""
        replicas = self.processes
        processes = None if attached else replicas.processes
        return ReplicaPool(self.store, replicas.ids, replicas.api_key, self.config, processes)

    def run(self, test: Callable[[ReplicaPool], Awaitable[None]], attached: bool = False) -> None:
        """Run a test on a started pool that has loaded version 0."""

        async def bounded() -> None:
            pool = self.pool(attached)
            try:
                async with asyncio.timeout(120):
                    await pool.start()
                    await pool.load(0)
                    await test(pool)
            finally:
                await pool.close()

        asyncio.run(bounded())


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Iterator[Replicas]:
    """Two replicas for tests that harm nobody."""
    replicas = Replicas(tmp_path_factory.mktemp("shared"), str(model_folder))
    yield replicas
    replicas.processes.stop()


@pytest.fixture
def mortal(tmp_path: Path, model_folder: Path) -> Iterator[Replicas]:
    """Two replicas for one test to kill; none is started again."""
    replicas = Replicas(tmp_path, str(model_folder), max_restarts=0)
    yield replicas
    replicas.processes.stop()


@pytest.fixture
def phoenix(tmp_path: Path, model_folder: Path) -> Iterator[Replicas]:
    """One replica that is started again once."""
    replicas = Replicas(tmp_path, str(model_folder), replicas=1, max_restarts=1, restart_delay_s=0.3)
    yield replicas
    replicas.processes.stop()


def group(name: str, version: int = 0, max_tokens: int = 8, temperature: float = 1.0) -> GenerateRequest:
    prompt = np.arange(2, 9, dtype=np.int32)
    return GenerateRequest(name, prompt, 4, temperature, max_tokens, 3, version)


def tokens_of(answer: GenerateResponse) -> list[list[int]]:
    return [generation.token_ids.tolist() for generation in answer.generations]


def greedy_truth(seed: int, length: int) -> list[int]:
    ids = torch.arange(2, 9)[None]
    mask = torch.ones_like(ids)
    row = make_model(seed).generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=length)[0, 7:].tolist()
    return row


async def until(condition: Callable[[], object], what: str, timeout_s: float = 30.0) -> float:
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < timeout_s, f"timed out waiting until {what}"
        await asyncio.sleep(0.02)
    return time.monotonic() - started


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_both_replicas_generate_and_agree_with_the_model_before_and_after_a_weight_change(shared: Replicas) -> None:
    async def test(pool: ReplicaPool) -> None:
        answers = await asyncio.gather(*(pool.generate(group(f"g{i}", temperature=0.0)) for i in range(8)))
        assert {answer.replica for answer in answers} == {"r0", "r1"}
        assert all(tokens == greedy_truth(0, 8) for answer in answers for tokens in tokens_of(answer))
        manifest = WeightStore(shared.store).publish(1, make_model(1).state_dict(), {})
        acks = await pool.load(1)
        assert {(ack.replica, ack.weights_sha256) for ack in acks} == {
            ("r0", manifest.weights_sha256),
            ("r1", manifest.weights_sha256),
        }
        answers = await asyncio.gather(*(pool.generate(group(f"g{i}", 1, temperature=0.0)) for i in range(8)))
        assert all(answer.version == 1 for answer in answers)
        truth = greedy_truth(1, 8)
        assert truth != greedy_truth(0, 8)
        assert all(tokens == truth for answer in answers for tokens in tokens_of(answer))
        with pytest.raises(
            EngineError, match=r"no living replica has policy version 0: replica r0 is ready with version 1"
        ):
            await pool.generate(group("old", 0))

    shared.run(test)


def test_a_replica_refuses_another_version_and_callers_without_the_key(shared: Replicas) -> None:
    async def test(pool: ReplicaPool) -> None:
        record = ReplicaRegistry(shared.store).read("r0")
        assert record is not None and record.url.startswith("http://127.0.0.1:")
        async with aiohttp.ClientSession() as session:
            for headers, status in (
                ({}, 401),
                ({"Authorization": "Bearer x"}, 401),
                ({"Authorization": f"Bearer {shared.processes.api_key}"}, 409),
            ):
                body = group("g0", version=5).to_json()
                async with session.post(record.url + "/generate", json=body, headers=headers) as response:
                    assert response.status == status, await response.text()

    shared.run(test)


def test_health_answers_while_a_replica_generates(shared: Replicas) -> None:
    async def test(pool: ReplicaPool) -> None:
        record = ReplicaRegistry(shared.store).read("r0")
        assert record is not None
        headers = {"Authorization": f"Bearer {shared.processes.api_key}"}
        tasks = [asyncio.create_task(pool.generate(group(f"g{i}", max_tokens=300))) for i in range(4)]
        await asyncio.sleep(0.1)
        async with aiohttp.ClientSession(headers=headers) as session:
            started = time.monotonic()
            async with session.get(record.url + "/health") as response:
                health = await response.json()
        assert time.monotonic() - started < 5
        assert health["in_flight"] == 2 and health["version"] == 0
        await asyncio.gather(*tasks)

    shared.run(test)


def test_a_damaged_version_is_refused_and_the_next_one_is_served(shared: Replicas) -> None:
    async def test(pool: ReplicaPool) -> None:
        weights = WeightStore(shared.store)
        manifest = weights.publish(7, make_model(7).state_dict(), {})
        name = manifest.shards[0].name
        key = f"weights/v000007/{name}"
        data = bytearray(shared.store.read(key))
        data[-1] ^= 1
        shared.store.publish(key, bytes(data), exclusive=False)
        with pytest.raises(EngineError, match=r"no replica has loaded policy version 7: .*sha256"):
            await pool.load(7)
        with pytest.raises(EngineError, match="no living replica has policy version 7"):
            await pool.generate(group("g0", 7))
        await pool.load(0)
        assert tokens_of(await pool.generate(group("g0", temperature=0.0)))[0] == greedy_truth(0, 8)

    shared.run(test)


def test_a_replica_that_anybody_starts_in_mid_run_gets_work_and_leaves_cleanly(shared: Replicas) -> None:
    async def test(pool: ReplicaPool) -> None:
        command = [sys.executable, "-m", "pa_core.cli", "serve", "--run-url", shared.store.url, "--replica-id", "r7"]
        environment = {**os.environ, "PA_API_KEY": shared.processes.api_key, "OMP_NUM_THREADS": "1"}
        guest = subprocess.Popen(command, env=environment)
        try:
            await until(lambda: pool.versions.get("r7") == 0, "it has joined and loaded the current version", 90)
            answers = await asyncio.gather(*(pool.generate(group(f"g{i}", temperature=0.0)) for i in range(9)))
            assert "r7" in {answer.replica for answer in answers}
            assert all(tokens == greedy_truth(0, 8) for answer in answers for tokens in tokens_of(answer))
            tasks = [asyncio.create_task(pool.generate(group(f"h{i}", max_tokens=300))) for i in range(5)]
            await until(lambda: pool.in_flight.get("r7"), "it works")
            guest.terminate()
            assert {answer.replica for answer in await asyncio.gather(*tasks)} <= {"r0", "r1", "r7"}
            await until(lambda: set(pool.versions) == {"r0", "r1"}, "it has left")
            assert pool.dead == {} and await asyncio.to_thread(guest.wait, 20) == 0
        finally:
            guest.kill()
            guest.wait()

    shared.run(test)


def test_stopping_withdraws_the_records_and_leaves_no_process(shared: Replicas) -> None:
    async def test(pool: ReplicaPool) -> None:
        task = asyncio.create_task(pool.generate(group("g0", max_tokens=3000)))
        await asyncio.sleep(0.3)
        await asyncio.to_thread(shared.processes.stop)
        (outcome,) = await asyncio.wait_for(asyncio.gather(task, return_exceptions=True), 5)
        assert isinstance(outcome, (GenerateResponse, EngineError)), "answered in time or failed, but not left hanging"

    shared.run(test)
    registry = ReplicaRegistry(shared.store)
    assert [registry.read(name) for name in shared.processes.ids] == [None, None]
    processes = shared.processes.processes.values()  # SIGTERM was enough, in mid-generation too: each says goodbye
    assert all(process.poll() is not None and "has ended" in process.tail() for process in processes)


def test_a_replica_killed_in_mid_generation_is_named_and_its_groups_are_answered_by_the_other(
    mortal: Replicas,
) -> None:
    async def test(pool: ReplicaPool) -> None:
        truth = [tokens_of(await pool.generate(group(f"g{i}", max_tokens=150))) for i in range(4)]
        tasks = [asyncio.create_task(pool.generate(group(f"g{i}", max_tokens=150))) for i in range(4)]
        await until(lambda: pool.in_flight == {"r0": 2, "r1": 2}, "both replicas work")
        await asyncio.sleep(0.05)
        os.kill(mortal.processes.processes["r1"].pid, signal.SIGKILL)
        assert await until(lambda: "r1" in pool.dead, "the death is noticed") < 10
        answers = await asyncio.gather(*tasks)
        assert [tokens_of(answer) for answer in answers] == truth, "a repeated group has the same random stream"
        assert "killed by SIGKILL" in pool.dead["r1"] and "replica r1 is ready" in pool.dead["r1"]
        assert pool.versions == {"r0": 0}
        last = asyncio.create_task(pool.generate(group("last", max_tokens=3000)))
        await asyncio.sleep(0.2)
        os.kill(mortal.processes.processes["r0"].pid, signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(
            EngineError, match=r"no replica is left: replica r0 is dead.*SIGKILL[^$]*replica r1 is dead"
        ):
            await last
        assert time.monotonic() - started < 10
        with pytest.raises(EngineError, match="no replica"):
            await pool.load(0)

    mortal.run(test)


def test_a_stopped_replica_is_noticed_by_its_heartbeat_while_a_request_hangs(mortal: Replicas) -> None:
    async def test(pool: ReplicaPool) -> None:
        tasks = [asyncio.create_task(pool.generate(group(f"g{i}", max_tokens=150))) for i in range(4)]
        await until(lambda: pool.in_flight == {"r0": 2, "r1": 2}, "both replicas work")
        process = mortal.processes.processes["r0"]
        os.kill(process.pid, signal.SIGSTOP)
        assert await until(lambda: "r0" in pool.dead, "the silence is noticed") < 10
        answers = await asyncio.gather(*tasks)
        assert {answer.replica for answer in answers} == {"r1"}
        assert "no heartbeat for" in pool.dead["r0"]
        await until(lambda: process.poll() is not None, "the stopped process is ended")

    mortal.run(test)


def test_when_the_parent_is_killed_no_replica_outlives_it(tmp_path: Path, model_folder: Path) -> None:
    store, _ = make_run(tmp_path, str(model_folder))
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom pa_core.rollout.config import EngineConfig\n"
        "from pa_core.rollout.process import ReplicaSet\n"
        "replicas = ReplicaSet(sys.argv[1], EngineConfig(replicas=2, threads=1), Path(sys.argv[2]))\n"
        "print(*(process.pid for process in replicas.start().values()), flush=True)\ntime.sleep(600)\n"
    )
    command = [sys.executable, "-c", code, store.url, str(tmp_path / "logs")]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    registry = ReplicaRegistry(store)

    def serving() -> bool:
        records = [registry.read(name) for name in ("r0", "r1")]
        return all(record is not None and record.state == "ready" for record in records)

    asyncio.run(until(serving, "both replicas serve", 90))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert asyncio.run(until(lambda: all(gone(pid) for pid in pids), "no orphan is left", 10)) < 5


def test_a_model_that_does_not_exist_is_named_at_once_with_exit_code_and_log(tmp_path: Path) -> None:
    replicas = Replicas(tmp_path, "/no/such/model")
    try:
        with pytest.raises(EngineError) as caught:
            asyncio.run(replicas.pool().start())
    finally:
        replicas.processes.stop()
    message = str(caught.value)
    assert "died at start (exit code 2)" in message
    assert "/no/such/model" in message and "model.path" in message
    assert "Traceback" not in message


@pytest.mark.parametrize("attached", [False, True])
def test_the_only_replica_is_killed_started_again_and_given_up_when_it_dies_once_more(
    phoenix: Replicas, attached: bool
) -> None:
    async def test(pool: ReplicaPool) -> None:
        WeightStore(phoenix.store).publish(1, make_model(1).state_dict(), {})
        await pool.load(1)
        truth = tokens_of(await pool.generate(group("g0", 1, max_tokens=150)))
        task = asyncio.create_task(pool.generate(group("g0", 1, max_tokens=150)))
        await until(lambda: pool.in_flight == {"r0": 1}, "it works")
        first = phoenix.processes.processes["r0"]
        os.kill(first.pid, signal.SIGKILL)
        answer = await task
        assert tokens_of(answer) == truth, "the new process loaded the version of the old one by itself"
        assert phoenix.processes.processes["r0"].pid != first.pid
        assert pool.versions == {"r0": 1} and pool.dead == {} and pool.restarts == 1
        os.kill(phoenix.processes.processes["r0"].pid, signal.SIGKILL)
        with pytest.raises(EngineError, match=r"no replica is left: replica r0 is dead: it died \(killed by SIGKILL\)"):
            await pool.generate(group("g1", 1))

    phoenix.run(test, attached)


def test_a_hung_replica_is_ended_and_started_again_although_another_program_noticed(phoenix: Replicas) -> None:
    async def test(pool: ReplicaPool) -> None:
        process = phoenix.processes.processes["r0"]
        os.kill(process.pid, signal.SIGSTOP)
        answer = await pool.generate(group("g0"))
        assert answer.version == 0 and pool.restarts == 1
        assert process.poll() == -signal.SIGKILL and phoenix.processes.processes.restarts == {"r0": 1}

    phoenix.run(test, attached=True)
