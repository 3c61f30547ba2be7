"""What Prometheus reads of a running training: counters, gauges and histograms in a registry of the run's own.

Trainer, producer and replica pool share one process, so they share one endpoint. Spans and iterations are noted as
they end; what changes between them is asked for at the moment of a scrape. Nothing here may slow or stop training: a
failure is logged once and leaves a gap in a chart.

Names have the prefix ``pa_`` and base units. Counters begin at 0 with every process, also when a run is resumed.
"""

from __future__ import annotations

import functools
import logging
import time
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Concatenate, ParamSpec

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pa_core.config import TrainConfig
from pa_core.records import Group
from pa_core.tracking.summary import IterationRecord
from pa_core.tracking.timeline import TRAIN, TRAIN_NAMES, Span

log = logging.getLogger(__name__)

UNSCORED_CAUSES = ("error", "timeout", "none", "nan")
SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500)
STALENESS = (0, 1, 2, 4, 8)

P = ParamSpec("P")


@dataclass(frozen=True)
class ReplicaNow:
    """A replica at the moment of a scrape.

    Attributes:
        ready: it serves and has loaded a version.
        in_flight: groups sent to it and not yet answered.
        url: where it serves; None when it does not.
        engine: what serves there.
    """

    ready: bool
    in_flight: int = 0
    url: str | None = None
    engine: str = ""


@dataclass(frozen=True)
class Live:
    """The pipeline at the moment of a scrape; totals count from the start of the process.

    Attributes:
        open_groups: groups under way by state: queued, generating, scoring, buffered.
        groups: groups so far by what became of them: scored, duplicated, stale.
        tokens_generated: response tokens received from replicas, those of evaluations included.
        restarts: times that a replica which had died came back.
        retries: attempts at a group that failed, after which it was sent again.
        hedges: groups sent to a second replica too; ``hedges_won`` of them it answered first.
    """

    open_groups: Mapping[str, int]
    groups: Mapping[str, int]
    tokens_generated: int
    restarts: int
    retries: int
    hedges: int
    hedges_won: int
    replicas: Mapping[str, ReplicaNow] = field(default_factory=dict)


def _best_effort(method: Callable[Concatenate[RunMetrics, P], None]) -> Callable[Concatenate[RunMetrics, P], None]:
    """Have a failing ``method`` cost a figure, not the run."""

    @functools.wraps(method)
    def call(self: RunMetrics, *arguments: P.args, **keywords: P.kwargs) -> None:
        try:
            method(self, *arguments, **keywords)
        except Exception:
            self.failed(method.__name__)

    return call


class RunMetrics(Collector):
    """The metrics of one run in this process. All methods may be called from any thread.

    Args:
        run: the run's name.
        live: asked at every scrape.

    Attributes:
        registry: what an endpoint serves.
    """

    def __init__(self, run: str, config: TrainConfig, live: Callable[[], Live]) -> None:
        self.run = run
        self.live = live
        self.registry = CollectorRegistry()
        self._failed: set[str] = set()
        self._phase = "starting"
        self._groups: Tally[str] = Tally()
        self._loaded: dict[str, int] = {}
        self._reward: float | None = None
        self._accuracy: float | None = None
        self._overlap: float | None = None
        self._version: int | None = None
        self._last_step: float | None = None
        self._began = time.time()
        self._info = {
            "schedule": config.schedule.name,
            "engine": config.engine.kind,
            "model": config.model.path,
        }
        self._make_progress(config.iterations)
        self._make_times()
        self._make_samples([reward.name for reward in config.rewards])
        ProcessCollector(namespace="pa_trainer", registry=self.registry)
        self.registry.register(self)

    def _make_progress(self, iterations: int) -> None:
        target = Gauge("pa_iterations_target", "Iterations that the run shall have.", registry=self.registry)
        target.set(iterations)
        self._iterations = Counter("pa_iterations", "Iterations trained.", registry=self.registry)
        self._tokens = Counter("pa_tokens_trained", "Response tokens trained on.", registry=self.registry)

    def _make_times(self) -> None:
        def seconds(name: str, what: str, *labels: str) -> Counter:
            return Counter(f"pa_{name}_seconds", what, labels, registry=self.registry)

        def durations(name: str, what: str, *labels: str) -> Histogram:
            return Histogram(f"pa_{name}_seconds", what, labels, buckets=SECONDS, registry=self.registry)

        self._trainer = seconds("trainer", "What the trainer's time went into, as it passes.", "activity")
        for name in TRAIN_NAMES:
            self._trainer.labels(name)
        self._wall = seconds("wall", "Length of the iterations.")
        self._generate = seconds("generate", "Time in which a replica generated, mean over replicas.")
        self._train = seconds("train", "Time in which the trainer computed gradients or stepped.")
        self._sync = seconds("sync", "Time to publish new weights and load them on the first replica.")
        self._idle = seconds("idle", "Time that a side of the pipeline waited.", "side")
        for side in ("trainer", "replicas"):
            self._idle.labels(side)
        self._publish = durations("weight_publish", "Time to publish a policy version.")
        self._load = durations("weight_load", "Time until a replica had loaded a policy version.", "replica")
        self._group = durations("group_generate", "Time in which a replica generated a group.", "replica")
        self._score = durations("group_score", "Time in which a group was scored.")

    def _make_samples(self, rewards: Sequence[str]) -> None:
        self._samples = Counter("pa_samples", "Samples of finished iterations.", registry=self.registry)
        self._unscored = Counter(
            "pa_samples_unscored",
            "Samples of finished iterations without a score.",
            ["reward", "cause"],
            registry=self.registry,
        )
        for reward in rewards:
            for cause in UNSCORED_CAUSES:
                self._unscored.labels(reward, cause)
        self._staleness = Histogram(
            "pa_staleness_versions",
            "Policy version of the trainer - the oldest one that sampled a token, of each sample; 0 is on-policy.",
            buckets=STALENESS,
            registry=self.registry,
        )

    # -- noted as it happens

    @_best_effort
    def span(self, span: Span) -> None:
        """Something has ended: its duration, and what it changed."""
        if span.lane == TRAIN:
            self._trainer.labels(span.name).inc(span.duration)
        if span.name == "step":
            self._last_step = span.end
        elif span.name == "publish":
            self._publish.observe(span.duration)
            self._version = span.attrs["version"]
        elif span.name == "load":
            self._load.labels(span.lane).observe(span.duration)
            self._loaded[span.lane] = span.iteration
        elif span.name == "generate":
            self._group.labels(span.lane).observe(span.duration)
        elif span.name == "score":
            self._score.observe(span.duration)

    @_best_effort
    def iteration(self, record: IterationRecord, groups: Sequence[Group]) -> None:
        """An iteration is over; ``groups`` are all that were generated for it."""
        times = record.times
        self._iterations.inc()
        self._tokens.inc(record.tokens)
        self._wall.inc(times.wall)
        self._generate.inc(times.t_generate)
        self._train.inc(times.t_train)
        self._sync.inc(times.t_sync)
        for side, shares in (("trainer", times.train), ("replicas", times.generate)):
            self._idle.labels(side).inc(max(0.0, shares.idle))  # what is left over may be a rounding below 0
        self._reward, self._overlap = record.reward, times.overlap
        self._groups += Tally(trained=record.groups, uninformative=len(groups) - record.groups, lost=record.groups_lost)
        for sample in (sample for group in groups for sample in group.samples):
            self._samples.inc()
            oldest = min((version for version, _ in sample.versions), default=record.iteration)
            self._staleness.observe(record.iteration - oldest)
            if sample.unscored is not None:
                cause, _, reward = sample.unscored.partition(":")
                self._unscored.labels(reward, cause).inc()

    @_best_effort
    def accuracy(self, value: float) -> None:
        """Held-out accuracy was measured."""
        self._accuracy = value

    @_best_effort
    def phase(self, phase: str) -> None:
        """The run is starting, training, finishing, …"""
        self._phase = phase

    def failed(self, what: str) -> None:
        """Log that a figure could not be taken, the first time. Called where the exception is handled."""
        if what not in self._failed:
            self._failed.add(what)
            log.warning("metrics: %s failed; training goes on without these figures", what, exc_info=True)

    # -- asked for by a scrape

    def collect(self) -> Iterator[Metric]:
        """What is only known at the moment of a scrape."""
        yield _gauge("run_info", "The run; always 1.", {tuple(self._info.values()): 1}, *self._info)
        yield _gauge("run_phase", "What the run is doing; always 1.", {(self._phase,): 1}, "phase")
        for name, what, value in (
            ("policy_version", "Policy version published last.", self._version),
            (
                "trainer_last_step_timestamp_seconds",
                "When the last optimizer step ended; before the first, when the process began.",
                self._last_step or self._began,
            ),
            ("reward_mean", "Mean total reward of the last iteration.", self._reward),
            ("heldout_accuracy", "Held-out accuracy when it was last measured.", self._accuracy),
            ("overlap_ratio", "Share of the shorter side's work hidden behind the other's.", self._overlap),
        ):
            if value is not None:
                yield _gauge(name, what, {(): value})
        try:
            live = self.live()
        except Exception:
            self.failed("a look at the pipeline")
            return
        yield from self._live_families(live)

    def _live_families(self, live: Live) -> Iterator[Metric]:
        groups = {**live.groups, **{state: self._groups[state] for state in ("trained", "uninformative", "lost")}}
        yield _gauge("groups_open", "Groups under way.", _by_name(live.open_groups), "state")
        yield _counter("groups", "Groups by what became of them.", _by_name(groups), "state")
        for name, what, value in (
            ("tokens_generated", "Response tokens received from replicas.", live.tokens_generated),
            ("replica_restarts", "Times that a replica which had died came back.", live.restarts),
            ("group_retries", "Failed attempts at a group that was sent again.", live.retries),
            ("group_hedges", "Slow groups sent to a second replica too.", live.hedges),
            ("group_hedges_won", "Of those, groups that the second replica answered first.", live.hedges_won),
        ):
            yield _counter(name, what, {(): value})
        ready = {name: float(replica.ready) for name, replica in live.replicas.items()}
        in_flight = {name: replica.in_flight for name, replica in live.replicas.items()}
        loaded = {name: self._loaded[name] for name in live.replicas if name in self._loaded}
        yield _gauge("replica_ready", "1 for a replica that can generate.", _by_name(ready), "replica")
        yield _gauge("replica_in_flight", "Groups sent and not yet answered.", _by_name(in_flight), "replica")
        yield _gauge("replica_loaded_version", "Policy version loaded last.", _by_name(loaded), "replica")

    def health(self) -> dict[str, object]:
        """What ``/health`` answers."""
        replicas = self.live().replicas
        return {
            "run": self.run,
            "phase": self._phase,
            "version": self._version,
            "last_step": self._last_step,
            "replicas_ready": sum(replica.ready for replica in replicas.values()),
            "replicas": len(replicas),
        }


def _by_name(values: Mapping[str, float]) -> dict[tuple[str, ...], float]:
    return {(name,): value for name, value in values.items()}


def _gauge(name: str, what: str, values: Mapping[tuple[str, ...], float], *labels: str) -> Metric:
    return _filled(GaugeMetricFamily(f"pa_{name}", what, labels=labels), values.items())


def _counter(name: str, what: str, values: Mapping[tuple[str, ...], float], *labels: str) -> Metric:
    return _filled(CounterMetricFamily(f"pa_{name}", what, labels=labels), values.items())


def _filled(family: GaugeMetricFamily | CounterMetricFamily, values: Iterable[tuple[tuple[str, ...], float]]) -> Metric:
    for labels, value in values:
        family.add_metric(labels, value)
    return family
