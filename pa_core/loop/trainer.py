"""The paper's algorithm (Periodic Asynchrony, arXiv 2511.18871), readable top to bottom in :meth:`Trainer._train`.

For every iteration t: the producer sends N prompts to the replicas that hold version t; the trainer consumes each
scored group as it finishes and accumulates gradient; only when all N groups are consumed does it step, publish
version t+1, and let the next iteration begin.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

from pa_core.data.stream import PromptStream
from pa_core.errors import Stopped
from pa_core.evaluation.store import EvaluationStore
from pa_core.loop import evaluation
from pa_core.loop.draws import Draws, Quota
from pa_core.loop.interval import IntervalEvaluation
from pa_core.loop.iteration import rollout_metrics
from pa_core.loop.learner import Learner
from pa_core.loop.progress import ProgressState
from pa_core.loop.ranks import Ranks
from pa_core.loop.record import Recorder
from pa_core.loop.run import Run
from pa_core.loop.schedule import Selection, between_steps, deliveries
from pa_core.loop.services import Services
from pa_core.loop.signals import StopSignals
from pa_core.model.parallel import Layout
from pa_core.rollout.process import ReplicaSet
from pa_core.store.checkpoints import CheckpointStore
from pa_core.store.ledger import Ledger
from pa_core.store.policy import AdapterTable, PolicyReader
from pa_core.tracking.exporter_server import Endpoint
from pa_core.tracking.summary import RunSummary
from pa_core.tracking.timeline import TRAIN

log = logging.getLogger(__name__)


class Trainer:
    """One training run in this process, from the first evaluation to the summary.

    Args:
        run: a prepared run; one with a checkpoint is continued.
        signals: how a stop from outside arrives.
        show: told of every change of progress.
        replicas: the replica processes, where this program started them.
        layout, ranks: this process's place among those that train together, of which it is the first.
    """

    def __init__(
        self,
        run: Run,
        signals: StopSignals,
        show: Callable[[ProgressState], None],
        replicas: ReplicaSet | None = None,
        layout: Layout | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.config = run.config
        self.signals = signals
        self.endpoint = Endpoint(run.config.metrics)  # first: a port that is taken should not cost a model
        self.services = Services(run, replicas)
        self.stream = PromptStream(self.services.problems.train, self.config.seed, self.config.data.shuffle)
        self.learner = Learner(self.config, self.services.model.model, layout, ranks)
        if ranks is not None:
            ranks.on_failure = self.services.producer.fail
        self.recorder = Recorder(self.services, show)
        self.checkpoints = CheckpointStore(run.store)
        self.ledger = Ledger(run.store)
        self.evaluations = EvaluationStore(run.store)
        self.interval = IntervalEvaluation(run, partial(self.recorder.warn, "evaluation_failure"))
        self.cursor: dict[str, Any] = self.stream.state()
        self.quota = Quota.of(run.config)
        self.selection: Selection
        self.weights_sha256 = ""
        self.adapter_table: AdapterTable | None = None
        self.version_files = self.services.model_files

    def run(self) -> RunSummary:
        """Train to the end. Raises what stopped it, after the MLflow run got its final status."""
        with self.services, self.endpoint.serving(self.services.metrics), self.recorder, self.interval:
            try:
                self._restore()
                self._publish_base()
                self._publish()
                if self.services.problems.held_out:
                    self.interval.start(self.learner.version, self.recorder.evaluated_versions)
                self.services.producer.start(self.config.engine.startup_timeout_s)
                return self._train()
            except Stopped as stop:
                self._save_on_stop()
                raise Stopped(f"{stop}; go on with: pa train --resume {self.services.run.url}") from None

    def _train(self) -> RunSummary:
        first, end = self.learner.version, self.config.iterations
        if first == 0:
            self._evaluate()
        if first < end:
            self._begin(first)
        for t in range(first, end):
            selection = self._consume(t)
            with self.signals.uninterrupted():
                self._step_and_publish(t)
            if t + 1 < end:
                self._begin(t + 1)
            self._book(t, selection)
        self._evaluate()
        for found in self.interval.rest(self.recorder.evaluating):
            self.recorder.evaluated(found.result, found.table)
        self._retain()
        self._fold()
        return self.recorder.finish(self.weights_sha256)

    def _begin(self, t: int) -> None:
        """Open iteration t: groups that the store already has are reused, the other prompts go to the producer."""
        draws = Draws(self.stream, self.quota)
        self.selection = Selection(self.quota, draws.prompts[0].index, self.config.optimizer.steps_per_iteration)
        self.recorder.begin()
        missing = draws.missing(partial(self.services.buffer.restore, t))
        self.services.producer.begin(t, missing, self.config.sampling, self.config.group_size, draws.replacement)

    def _consume(self, t: int) -> Selection:
        """Accumulate the gradient of iteration t's groups, in whatever order they finish."""
        selection = self.selection
        self.learner.begin_iteration()
        arrivals = deliveries(
            self.services.buffer,
            self.services.timeline,
            self.config.schedule,
            t,
            selection,
            self.services.patience_s,
        )
        for groups in between_steps(arrivals, partial(self._step, t)):
            self.signals.check()
            if groups:
                ids = [group.id for group in groups]
                with self.services.timeline.span("forward_backward", TRAIN, t, groups=ids):
                    self.learner.accumulate(groups)
            self.services.rewards.check(selection.arrived, expected=selection.most * self.config.group_size)
            self.recorder.consumed(len(selection.trained), len(selection.uninformative))
        if len(selection.trained) < self.quota.groups:
            log.warning(
                "iteration %d: only %d of %d groups are informative after sampling.dynamic.max_draws=%g times as many "
                "prompts; it goes on with those. If that is the rule, the problems are too easy or too hard: change "
                "data, or raise group_size or max_draws",
                t + 1,
                len(selection.trained),
                self.quota.groups,
                self.quota.draws / self.quota.groups,
            )
        return selection

    def _step_and_publish(self, t: int) -> None:
        """From version t to t+1, made visible in the store: the one moment at which the policy changes."""
        self._step(t)
        self.learner.advance()
        self._publish()
        self.cursor = self.stream.state()
        self.recorder.stepped(t)

    def _step(self, t: int) -> None:
        """One optimizer step; no replica may be receiving the policy meanwhile."""
        with self.services.timeline.span("step", TRAIN, t):
            if self.services.fabric is not None:
                self.services.fabric.withdraw()
            self.learner.step()

    def _publish_base(self) -> None:
        """With LoRA: store the weights that are not trained, once per run; versions hold the adapter from then on."""
        adapter = self.learner.adapter
        if adapter is not None:
            base = self.services.weights.base.publish(0, adapter.base_tensors(), self.services.model_files)
            self.adapter_table = AdapterTable(base.weights_sha256, adapter.scaling, adapter.pairs)
            self.version_files = adapter.files()

    def _publish(self) -> None:
        version = self.learner.version
        with self.services.timeline.span("publish", TRAIN, max(0, version - 1), version=version):
            manifest = self.services.weights.publish(
                version, self.learner.whole_weights(), self.version_files, self.adapter_table
            )
        self.weights_sha256 = manifest.weights_sha256
        if self.services.fabric is not None:
            self.services.fabric.offer(version)

    def _book(self, t: int, selection: Selection) -> None:
        """Record iteration t while the replicas already generate for t+1."""
        with self.services.timeline.span("log", TRAIN, t):
            uninformative = sorted(group.id for group in selection.uninformative)
            facts = {"uninformative": uninformative} if self.quota.dynamic else {}
            self.ledger.write(t, [group.id for group in selection.trained], facts)
            self.services.buffer.compact(t, selection.arrived, self.learner.advantages)
            metrics = rollout_metrics(selection.arrived, self.quota) | self.learner.metrics()
            self.recorder.iteration(t, metrics, selection.arrived, selection.trained, self.learner.advantages)
        for found in self.interval.collect():  # before the checkpoint, which knows what is recorded
            self.recorder.evaluated(found.result, found.table)
        if self.config.checkpoint.every and (t + 1) % self.config.checkpoint.every == 0:
            self._checkpoint()
        self._retain()

    def _retain(self) -> None:
        """Remove versions that nobody needs any more."""
        recent = range(self.learner.version - self.config.store.keep_versions + 1, self.learner.version + 1)
        self.services.weights.retain({*self.checkpoints.versions(), *self.interval.held(), *recent})

    def _fold(self) -> None:
        """Make the model in memory the whole final policy where it is not: with LoRA, or spread over processes."""
        if self.learner.ranks is not None:
            self.services.weights.load_into(self.learner.version, self.services.model.model)
        if self.learner.adapter is not None:
            with PolicyReader(self.services.weights).open(self.learner.version) as delivery:
                self.learner.adapter.fold(delivery.read)

    def _evaluate(self) -> None:
        held_out = self.services.problems.held_out
        if self.config.evaluation.enabled and held_out:
            version = self.learner.version

            def show(done: int, total: int) -> None:
                self.recorder.evaluating(version, f"({done}/{total})")

            found = evaluation.measure(self.config, self.services.producer, version, held_out, show)
            self.evaluations.write(found.result, found.table)
            self.recorder.evaluated(found.result, found.table)

    def _checkpoint(self) -> None:
        """Everything that is needed to go on from the current version, the iteration's groups aside."""
        version = self.learner.version
        with self.signals.uninterrupted(), self.services.timeline.span("checkpoint", TRAIN, version):
            state = {
                "steps": self.learner.steps,
                "cursor": self.cursor,
                "record": self.recorder.state(),
            }
            self.checkpoints.save(version, self.learner.save_optimizer, state)
            self.recorder.stored(self.checkpoints.retain(self.config.checkpoint.keep))

    def _restore(self) -> None:
        """Go on from the latest checkpoint, if there is one.

        What later versions left behind is removed: this process will not make the same weights bit for bit, so
        groups that those sampled are not on-policy any more. Groups of the checkpoint's own version are kept.
        """
        version = self.checkpoints.latest() or 0
        if version:
            found = self.checkpoints.load(version)
            state, files = found.state, [asdict(file) for file in found.files]
            self.learner.restore(self.services.run.url, version, found.url, found.folder, files, state["steps"])
            self.recorder.restore(state["record"])
            self.recorder.stored(self.checkpoints.versions())
            self.stream.restore(state["cursor"])
            self.cursor = state["cursor"]
            log.info("resuming at version %d", version)
        self.services.weights.forget_after(version)
        self.services.buffer.forget_after(version)
        self.ledger.forget_after(version)
        self.evaluations.forget_after(version)

    def _save_on_stop(self) -> None:
        """Leave a checkpoint of the last whole version behind, so that nothing of it is repeated."""
        if not self.config.checkpoint.every or self.learner.torn or self.learner.version == 0:
            return
        if self.learner.ranks is not None and self.learner.ranks.broken:
            return
        if self.checkpoints.latest() != self.learner.version:
            self._checkpoint()
