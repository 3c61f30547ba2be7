"""The middleware in front of vLLM, called as an ASGI application."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any

import pytest

from pa_core.errors import ConfigError
from pa_core.rollout.vllm_guard import RunGuard

KEY = "the-run's-key"


class Behind:
    """The application behind the guard: answers 200, once it may."""

    def __init__(self) -> None:
        self.reached: list[str] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.reached.append(scope.get("path", scope["type"]))
        await self.may_answer.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})


async def ask(guard: RunGuard, path: str, key: str | None = KEY, kind: str = "http") -> list[MutableMapping[str, Any]]:
    """What the guard sends back for one request."""
    sent: list[MutableMapping[str, Any]] = []

    async def receive() -> MutableMapping[str, Any]:
        raise AssertionError("nothing is read")

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    headers = [] if key is None else [(b"authorization", f"Bearer {key}".encode())]
    await guard({"type": kind, "path": path, "headers": headers}, receive, send)
    return sent


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PA_API_KEY", KEY)


@pytest.mark.parametrize("key", [None, "", "wrong", KEY + " "])
@pytest.mark.parametrize(
    "path",
    ["/inference/v1/generate", "/update_weights", "/pause", "/collective_rpc", "/v1/models", "/docs", "/", "//health"],
)
def test_nothing_but_liveness_and_metrics_is_reached_without_the_key(path: str, key: str | None) -> None:
    async def test() -> None:
        behind = Behind()
        sent = await ask(RunGuard(behind), path, key)
        assert sent[0]["status"] == 401
        assert not behind.reached

    asyncio.run(test())


@pytest.mark.parametrize("path", ["/health", "/metrics"])
def test_liveness_and_metrics_need_no_key(path: str) -> None:
    async def test() -> None:
        assert (await ask(RunGuard(Behind()), path, None))[0]["status"] == 200

    asyncio.run(test())


def test_a_websocket_without_the_key_is_closed_and_lifespan_passes() -> None:
    async def test() -> None:
        behind = Behind()
        guard = RunGuard(behind)
        assert (await ask(guard, "/v1/realtime", None, "websocket"))[0]["type"] == "websocket.close"
        assert not behind.reached
        await ask(guard, "", None, "lifespan")
        assert behind.reached

    asyncio.run(test())


def test_weights_cannot_change_while_a_group_is_generated_and_can_afterwards() -> None:
    async def test() -> None:
        behind = Behind()
        guard = RunGuard(behind)
        behind.may_answer.clear()
        group = asyncio.create_task(ask(guard, "/inference/v1/generate"))
        await asyncio.sleep(0)
        for path in ("/start_weight_update", "/update_weights", "/finish_weight_update"):
            refused = await ask(guard, path)
            assert refused[0]["status"] == 409
            assert b"1 groups are in flight" in refused[1]["body"]
        behind.may_answer.set()
        assert (await group)[0]["status"] == 200
        assert (await ask(guard, "/update_weights"))[0]["status"] == 200

    asyncio.run(test())


def test_a_group_whose_caller_went_away_does_not_block_the_weights() -> None:
    async def test() -> None:
        behind = Behind()
        guard = RunGuard(behind)
        behind.may_answer.clear()
        group = asyncio.create_task(ask(guard, "/inference/v1/generate"))
        await asyncio.sleep(0)
        group.cancel()
        await asyncio.gather(group, return_exceptions=True)
        behind.may_answer.set()
        assert (await ask(guard, "/update_weights"))[0]["status"] == 200

    asyncio.run(test())


def test_a_server_without_a_key_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PA_API_KEY")
    with pytest.raises(ConfigError, match="PA_API_KEY"):
        RunGuard(Behind())
