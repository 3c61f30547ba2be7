"""An HTTP proxy in front of a real server, which misbehaves on demand."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Literal

import aiohttp
from aiohttp import web
from yarl import URL

Kind = Literal["busy", "error", "bad_gateway", "conflict", "reset", "stall", "truncate", "lose_reply"]
_ANSWERS = {
    "busy": (503, "SlowDown"),
    "error": (500, "InternalError"),
    "bad_gateway": (502, None),
    "conflict": (409, "ConditionalRequestConflict"),
}
_NOT_FORWARDED = {"expect", "connection", "transfer-encoding", "content-length"}


@dataclass
class Fault:
    """What happens to the next ``left`` requests that ``applies`` to (method, path with query)."""

    kind: Kind
    left: int
    applies: Callable[[str, str], bool]


class FaultProxy:
    """Forwards everything to ``target``, but for the faults that were asked for. Use it in a ``with`` block.

    The Host header is passed on as it came, because S3 signatures cover it.

    Attributes:
        endpoint: where it listens.
        seen: (method, path with query) of every request, in order.
    """

    def __init__(self, target: str) -> None:
        self._target = target
        self._faults: list[Fault] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self.endpoint = ""
        self.seen: list[tuple[str, str]] = []

    def inject(self, kind: Kind, times: int = 1, method: str = "", path: str = "") -> None:
        """Let the next ``times`` requests of this method whose path and query contain ``path`` fail."""
        self._faults.append(Fault(kind, times, lambda verb, target: method in ("", verb) and path in target))

    def heal(self) -> None:
        """Drop the faults that are left, and what was seen."""
        self._faults.clear()
        self.seen.clear()

    def __enter__(self) -> FaultProxy:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(30)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)

    async def _start(self) -> None:
        self._ended = asyncio.Event()
        self._session = aiohttp.ClientSession(auto_decompress=False)
        application = web.Application(client_max_size=1 << 30)
        application.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        port = self._runner.addresses[0][1]
        self.endpoint = f"http://127.0.0.1:{port}"

    async def _stop(self) -> None:
        self._ended.set()
        await self._runner.cleanup()
        await self._session.close()

    def _next_fault(self, request: web.Request) -> Kind | None:
        self.seen.append((request.method, request.raw_path))
        for fault in self._faults:
            if fault.left > 0 and fault.applies(request.method, request.raw_path):
                fault.left -= 1
                return fault.kind
        return None

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        fault = self._next_fault(request)
        if fault in _ANSWERS:
            status, code = _ANSWERS[fault]
            text = f"<Error><Code>{code}</Code><Message>{code}, says the proxy</Message></Error>" if code else "<html>"
            return web.Response(status=status, text=text, content_type="application/xml" if code else "text/html")
        if fault == "stall":
            await self._ended.wait()
        if fault in ("reset", "stall"):
            return self._cut(request)
        return await self._forward(request, body, fault)

    async def _forward(self, request: web.Request, body: bytes, fault: Kind | None) -> web.StreamResponse:
        headers = [(name, value) for name, value in request.headers.items() if name.lower() not in _NOT_FORWARDED]
        url = URL(self._target + request.raw_path, encoded=True)
        async with self._session.request(
            request.method, url, headers=headers, data=body, allow_redirects=False, skip_auto_headers=["Content-Type"]
        ) as answer:
            content = await answer.read()
            if fault == "lose_reply":
                return self._cut(request)
            response = web.StreamResponse(status=answer.status)
            for name, value in answer.headers.items():
                if name.lower() not in ("connection", "transfer-encoding", "content-length", "server", "date"):
                    response.headers.add(name, value)
            length = answer.headers.get("Content-Length", str(len(content)))
            response.content_length = int(length)
        # A client that has lost its patience is gone by now.
        with contextlib.suppress(ConnectionResetError):
            await response.prepare(request)
            if request.method != "HEAD":
                await response.write(content[: len(content) // 2] if fault == "truncate" else content)
            if fault == "truncate":
                return self._cut(request, response)
            await response.write_eof()
        return response

    def _cut(self, request: web.Request, response: web.StreamResponse | None = None) -> web.StreamResponse:
        """End the connection in the middle of things."""
        if request.transport is not None:
            request.transport.close() if response is not None else request.transport.abort()
        return response or web.Response()
