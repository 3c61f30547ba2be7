"""What the client makes of answers that a real vLLM server does not give on demand."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from pa_core.errors import EngineError
from pa_core.rollout.connect import open_session
from pa_core.rollout.protocol import GenerateRequest, VersionMismatch
from pa_core.rollout.vllm_client import VllmReplicaClient, group_seed

REQUEST = GenerateRequest("p0", np.array([1, 2, 3], np.int32), 2, 1.0, 4, 7, 5, stop_token_ids=(2,))


def choice(index: int, **changes: Any) -> dict[str, Any]:
    """One sound choice of two tokens."""
    fields: dict[str, Any] = {
        "index": index,
        "token_ids": [9, 2],
        "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -0.25}]},
        "finish_reason": "stop",
        "weight_versions": [{"version": "5", "start": 0, "end": 2}],
    }
    return fields | changes


class Fake:
    """A server that answers what it is told to and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.choices: list[dict[str, Any]] = [choice(1), choice(0)]
        self.failing: set[str] = set()
        self.loaded: Any = {"version": 5, "weights_sha256": "d5"}
        self.version = "4"

    async def handle(self, request: web.Request) -> web.Response:
        body = await request.json() if request.can_read_body else None
        self.asked.append((request.path, body))
        if request.path in self.failing:
            return web.json_response({"error": {"message": "Worker failed with error 'bad sha256'"}}, status=500)
        if request.path == "/finish_weight_update":
            self.version = body["weight_version"]
        answers = {
            "/inference/v1/generate": {"choices": self.choices},
            "/collective_rpc": {"results": [self.loaded, self.loaded]},
            "/weight_info": {"weight_version": self.version},
        }
        return web.json_response(answers.get(request.path, {}))


@asynccontextmanager
async def served(fake: Fake) -> AsyncIterator[VllmReplicaClient]:
    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", fake.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        async with open_session() as session:
            host, port = runner.addresses[0][:2]
            yield VllmReplicaClient(session, "r0", f"http://{host}:{port}", "key", "s3://bucket/run")
    finally:
        await runner.cleanup()


def generate(fake: Fake) -> Any:
    async def run() -> Any:
        async with served(fake) as client:
            return await client.generate(REQUEST)

    return asyncio.run(run())


def test_tokens_go_out_and_come_back_as_they_are() -> None:
    fake = Fake()
    answer = generate(fake)
    path, body = fake.asked[0]
    assert (path, body["token_ids"]) == ("/inference/v1/generate", [1, 2, 3])
    assert body["sampling_params"]["stop_token_ids"] == [2]
    assert body["sampling_params"]["seed"] == group_seed(REQUEST)
    assert [one.token_ids.tolist() for one in answer.generations] == [[9, 2], [9, 2]]
    assert answer.generations[0].logprobs.tolist() == [-0.5, -0.25]
    assert answer.generations[0].versions == ((5, 2),)
    assert answer.generations[0].routed_experts is None


def test_what_the_server_reports_of_experts_and_sampling_is_kept() -> None:
    experts = np.arange(8, dtype=np.uint8).reshape(4, 2, 1)
    file = io.BytesIO()
    np.save(file, experts)
    fake = Fake()
    extra = {"routed_experts": base64.b64encode(file.getvalue()).decode(), "sampling_mask": [[9, 8], [2]]}
    fake.choices = [choice(0, **extra), choice(1)]
    one = generate(fake).generations[0]
    assert np.array_equal(one.routed_experts, experts)
    assert [ids.tolist() for ids in one.sampling_mask] == [[9, 8], [2]]


@pytest.mark.parametrize(
    "spans",
    [
        [{"version": "4", "start": 0, "end": 2}],
        [{"version": "4", "start": 0, "end": 1}, {"version": "5", "start": 1, "end": 2}],
        [{"version": "5", "start": 0, "end": 1}],
        [{"version": "5", "start": 1, "end": 2}],
        [{"version": "default", "start": 0, "end": 2}],
        [],
        None,
    ],
)
def test_a_token_that_another_version_sampled_or_nobody_vouches_for_is_refused(spans: Any) -> None:
    """Invariant 1 at the engine's door."""
    fake = Fake()
    fake.choices = [choice(0), choice(1, weight_versions=spans)]
    with pytest.raises(VersionMismatch):
        generate(fake)


@pytest.mark.parametrize(
    "choices",
    [
        [choice(0)],
        [choice(0), choice(1, finish_reason="abort")],
        [choice(0), choice(1, logprobs={"content": [{"logprob": -0.5}]})],
        [choice(0), choice(1, logprobs=None)],
        [choice(0), {"index": 1}],
    ],
)
def test_an_answer_that_is_not_whole_is_an_error_that_names_the_replica(choices: list[dict[str, Any]]) -> None:
    fake = Fake()
    fake.choices = choices
    with pytest.raises(EngineError, match="r0"):
        generate(fake)


def load(fake: Fake) -> Any:
    async def run() -> Any:
        async with served(fake) as client:
            return await client.load(5, "d5")

    return asyncio.run(run())


def test_a_load_drains_first_names_the_version_last_and_returns_the_workers_own_digest() -> None:
    fake = Fake()
    assert load(fake) == "d5"
    assert [path for path, _ in fake.asked] == [
        "/pause",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/collective_rpc",
        "/resume",
        "/weight_info",
    ]
    update = {"store_url": "s3://bucket/run", "version": 5, "weights_sha256": "d5"}
    assert fake.asked[2][1] == {"update_info": update}


def test_a_failed_load_says_why_keeps_the_old_name_and_lets_the_server_go_on() -> None:
    fake = Fake()
    fake.failing = {"/update_weights"}
    with pytest.raises(EngineError, match=r"replica r0: /update_weights.*bad sha256"):
        load(fake)
    assert [path for path, _ in fake.asked][-1] == "/resume"
    assert fake.version == "4"


@pytest.mark.parametrize("loaded", [None, {"version": 4, "weights_sha256": "d4"}])
def test_a_server_whose_workers_do_not_have_the_version_has_not_loaded_it(loaded: Any) -> None:
    fake = Fake()
    fake.loaded = loaded
    with pytest.raises(EngineError, match="r0"):
        load(fake)


def test_groups_have_seeds_of_their_own_by_run_version_and_prompt() -> None:
    other = [
        GenerateRequest("p1", REQUEST.token_ids, 2, 1.0, 4, 7, 5),
        GenerateRequest("p0", REQUEST.token_ids, 2, 1.0, 4, 8, 5),
        GenerateRequest("p0", REQUEST.token_ids, 2, 1.0, 4, 7, 6),
    ]
    assert len({group_seed(REQUEST), *map(group_seed, other)}) == 4
    assert 0 <= group_seed(REQUEST) < 2**31
