"""What an embedded replica tells Prometheus about itself; vLLM servers have metrics of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from pa_core.rollout.protocol import GenerateResponse

OUTCOMES = ("answered", "failed")
GROUP_SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)


class ReplicaMetrics:
    """Counters of one replica process, from its start.

    Args:
        version: the loaded policy version, or None; asked at every scrape, which then shows -1.
        in_flight: groups being generated; asked at every scrape.
    """

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, version: Callable[[], int | None], in_flight: Callable[[], int]) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "pa_engine_requests", "Groups asked for, by outcome.", ["outcome"], registry=self._registry
        )
        for outcome in OUTCOMES:
            self._requests.labels(outcome)
        self._tokens = Counter("pa_engine_generated_tokens", "Response tokens answered with.", registry=self._registry)
        self._seconds = Histogram(
            "pa_engine_request_seconds",
            "Time from the request for a group to its answer.",
            buckets=GROUP_SECONDS,
            registry=self._registry,
        )
        loaded = Gauge("pa_engine_loaded_version", "Loaded policy version; -1 for none.", registry=self._registry)
        loaded.set_function(lambda: -1 if (found := version()) is None else found)
        running = Gauge("pa_engine_requests_in_flight", "Groups being generated.", registry=self._registry)
        running.set_function(in_flight)

    @contextmanager
    def request(self) -> Iterator[Callable[[GenerateResponse], None]]:
        """Count a request, which counts as answered once what is yielded was called with the answer."""
        outcome = "failed"

        def answered(answer: GenerateResponse) -> None:
            nonlocal outcome
            outcome = "answered"
            self._tokens.inc(sum(len(generation.token_ids) for generation in answer.generations))

        try:
            with self._seconds.time():
                yield answered
        finally:
            self._requests.labels(outcome).inc()

    def text(self) -> bytes:
        """The answer to a scrape."""
        return generate_latest(self._registry)
