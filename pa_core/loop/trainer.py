"""The paper's algorithm (Periodic Asynchrony, Algorithm 1), readable top to bottom in :meth:`Trainer._train`.

For every iteration t: the producer sends N prompts to the replicas that hold version t; the trainer consumes each
scored group as it finishes and accumulates gradient; only when all N groups are consumed does it step, publish
version t+1, and let the next iteration begin.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from pa_core.errors import Stopped
from pa_core.loop import evaluation
from pa_core.loop.iteration import rollout_metrics
from pa_core.loop.learner import Learner
from pa_core.loop.progress import ProgressState
from pa_core.loop.record import Recorder
from pa_core.loop.run import Run
from pa_core.loop.schedule import deliveries, mini_batches
from pa_core.loop.services import Services
from pa_core.loop.signals import StopSignals
from pa_core.records import Group, Prompt
from pa_core.rollout.process import ReplicaSet
from pa_core.tracking.summary import RunSummary

log = logging.getLogger(__name__)


class Trainer:
    """One training run in this process, from the first evaluation to the summary."""

    def __init__(
        self,
        run: Run,
        signals: StopSignals,
        show: Callable[[ProgressState], None],
        replicas: ReplicaSet | None = None,
    ) -> None:
        self.run_ = run
        self.config = run.config
        self.signals = signals
        self.services = Services(run, replicas)
        self.learner = Learner(self.config, self.services.model)
        self.recorder = Recorder(run, self.services, show)
        self.prompts: list[Prompt] = []

    def run(self) -> RunSummary:
        """Train to the end. Raises what stopped it, after the MLflow run got its final status."""
        with self.services, self.recorder:
            try:
                self._resume_or_publish()
                self.services.producer.start(self.config.engine.startup_timeout_s)
                return self._train()
            except Stopped as stop:
                raise Stopped(self._leave_resumable(str(stop))) from None

    def _train(self) -> RunSummary:
        first, last = self.learner.version, self.config.iterations
        self._evaluate("before")
        if first < last:
            self._begin(first)
        for t in range(first, last):
            groups = self._consume(t)
            with self.signals.uninterrupted():
                self._step_and_publish()
            if t + 1 < last:
                self._begin(t + 1)
            self._record(t, groups)
        self._evaluate("after")
        return self.recorder.finish(self.learner)

    def _begin(self, t: int) -> None:
        """Open iteration t: groups already in the store are reused, the other prompts go to the producer."""
        self.prompts = self.services.stream.take(self.config.prompts_per_iteration)
        stored = self.services.buffer.restore(t, [prompt.id for prompt in self.prompts])
        missing = [prompt for prompt in self.prompts if prompt.id not in stored]
        self.recorder.begin(t, groups=len(self.prompts))
        self.services.producer.begin(t, missing, self.config.sampling, self.config.group_size)

    def _consume(self, t: int) -> list[Group]:
        """Accumulate the gradient of iteration t's groups, in whatever order they finish."""
        batches = mini_batches(self.prompts, self.config.optimizer.steps_per_iteration)
        consumed: list[Group] = []
        current = 0
        self.learner.begin_iteration()
        arrivals = deliveries(
            self.services.buffer, self.config.schedule, t, batches, self.services.patience_s, self.services.timeline
        )
        for number, groups in arrivals:
            if number != current:
                self.learner.step()
                current = number
            self.learner.accumulate(groups)
            consumed += groups
            self.recorder.consumed(len(consumed))
        self.services.rewards.check(consumed)
        return consumed

    def _step_and_publish(self) -> None:
        """The step from version t to t+1, made visible in the store: the one moment both sides change policy."""
        self.learner.step()
        self.learner.advance()
        self.services.publish(self.learner.version, self.learner.weights())
        self.services.cursor = self.services.stream.state()

    def _record(self, t: int, groups: list[Group]) -> None:
        """Book iteration t while the replicas already generate for t+1."""
        self.services.book(t, groups, self.learner.advantages)
        self.recorder.iteration(t, rollout_metrics(groups) | self.learner.metrics(), groups)
        if self.config.checkpoint.every and (t + 1) % self.config.checkpoint.every == 0:
            self.services.checkpoint(self.learner, self.recorder.state())

    def _evaluate(self, when: str) -> None:
        held_out = self.services.problems.held_out
        if not self.config.evaluation.enabled or not held_out:
            return
        found = evaluation.measure(self.config, self.services.producer, self.learner.version, held_out)
        self.recorder.accuracy(when, found)

    def _resume_or_publish(self) -> None: ...

    def _leave_resumable(self, reason: str) -> str: ...
