"""The HTTP endpoint of a run's metrics: ``/metrics`` for Prometheus, ``/health`` for people and liveness probes."""

from __future__ import annotations

import json
import logging
import platform
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from pa_core.config import MetricsConfig
from pa_core.errors import ConfigError
from pa_core.tracking.exporter import RunMetrics
from pa_core.tracking.exporter_targets import announced

log = logging.getLogger(__name__)

EVERYWHERE = ("", "0.0.0.0", "::")

Wsgi = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class _Handler(WSGIRequestHandler):
    """Scrapes are not worth a line in the log each, and one that breaks off is no error of training."""

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


class _Server(ThreadingWSGIServer):
    """A thread per request, so that a slow reader holds up nobody."""

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore a connection that its client broke."""


class _Server6(_Server):
    address_family = socket.AF_INET6


class Endpoint:
    """A bound port, which answers from :meth:`serving` on. With ``metrics.port=null`` it does nothing.

    Raises:
        ConfigError: the address cannot be listened on.
    """

    def __init__(self, config: MetricsConfig) -> None:
        self._config = config
        self._server: _Server | None = None
        if config.port is None:
            return
        kind = _Server6 if ":" in config.host else _Server
        try:
            self._server = make_server(config.host, config.port, _not_yet, kind, _Handler)
        except OSError as error:
            raise ConfigError(
                f"metrics.port={config.port} on metrics.host={config.host} cannot be listened on "
                f"({error.strerror or error}); set metrics.port=0 for a free one, or metrics.port=null for no metrics"
            ) from None

    @property
    def address(self) -> str | None:
        """``host:port`` under which others find it; None when there is none."""
        if self._server is None:
            return None
        host = platform.node() if self._config.host in EVERYWHERE else self._config.host
        return f"[{host}]:{self._server.server_port}" if ":" in host else f"{host}:{self._server.server_port}"

    @contextmanager
    def serving(self, metrics: RunMetrics) -> Iterator[str | None]:
        """Answer, and be announced in ``metrics.targets``, within the block. Yields :attr:`address`."""
        server, address = self._server, self.address
        if server is None or address is None:
            yield None
            return
        server.set_app(_application(metrics))
        threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
        with ExitStack() as stack:
            stack.callback(server.server_close)
            stack.callback(server.shutdown)
            log.info("metrics: http://%s/metrics, and /health", address)
            if self._config.targets is not None:
                stack.enter_context(announced(self._config.targets, address, metrics))
            yield address


def _not_yet(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    start_response("503 Service Unavailable", [])
    return [b""]


def _application(metrics: RunMetrics) -> Wsgi:
    scrape = make_wsgi_app(metrics.registry)

    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ["PATH_INFO"] == "/metrics":
            answer: Iterable[bytes] = scrape(environ, start_response)
            return answer
        if environ["PATH_INFO"] == "/health":
            start_response("200 OK", [("Content-Type", "application/json")])
            return [json.dumps(metrics.health()).encode()]
        start_response("404 Not Found", [("Content-Type", "text/plain")])
        return [b"/metrics or /health\n"]

    return application
