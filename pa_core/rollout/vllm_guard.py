"""Who may talk to a vLLM server, and when its weights may change: an ASGI middleware that vLLM loads by name.

vLLM's own ``--api-key`` leaves every route outside ``/v1`` and ``/inference`` open, the ones that change weights among
them, and puts the key into the process list. This guard wants the run's key, from the environment, for everything but
liveness and metrics.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from pa_core.rollout.protocol import required_key

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN_PATHS = frozenset({"/health", "/metrics"})
GENERATE_PATH = "/inference/v1/generate"
WEIGHT_PATHS = frozenset({"/start_weight_update", "/update_weights", "/finish_weight_update"})


class RunGuard:
    """Refuses callers without the run's key, and weight updates while a group is being generated.

    Raises:
        ConfigError: the environment holds no key.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._expected = f"Bearer {required_key()}".encode()
        self._generating = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path not in OPEN_PATHS and not hmac.compare_digest(_authorization(scope), self._expected):
            await _refuse(scope, send, 401, "missing or wrong API key")
        elif path in WEIGHT_PATHS and self._generating:
            await _refuse(scope, send, 409, f"{self._generating} groups are in flight: the weights may not change now")
        elif path == GENERATE_PATH:
            self._generating += 1
            try:
                await self._app(scope, receive, send)
            finally:
                self._generating -= 1
        else:
            await self._app(scope, receive, send)


def _authorization(scope: Scope) -> bytes:
    return next((bytes(value) for name, value in scope.get("headers", ()) if name == b"authorization"), b"")


async def _refuse(scope: Scope, send: Send, status: int, message: str) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008, "reason": message})
        return
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps({"error": message}).encode()})
