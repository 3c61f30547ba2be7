"""Everything a run tells about itself: progress, MLflow, timeline, summary. It decides nothing."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

import pyarrow as pa
import torch

from pa_core import __version__
from pa_core.errors import Stopped
from pa_core.evaluation.result import EvaluationResult
from pa_core.evaluation.store import shown_rows
from pa_core.loop.iteration import most_telling, sample_rows
from pa_core.loop.progress import ProgressState, write_progress
from pa_core.loop.run import SUMMARY_KEY
from pa_core.loop.services import Services
from pa_core.records import Group
from pa_core.store.versions import version_name
from pa_core.tracking.chrome import Window, chrome_trace
from pa_core.tracking.mlflow_run import TrackedRun
from pa_core.tracking.picture import reward_curve, timeline_picture
from pa_core.tracking.summary import IterationRecord, RunSummary, summarise
from pa_core.tracking.timeline import IterationTimes, iteration_times

log = logging.getLogger(__name__)

PACKAGES = ("torch", "transformers", "mlflow", "fsspec", "pyarrow", "reasoning-gym", "math-verify", "peft")
PROGRESS_EVERY_S = 1.0
EVALUATION_ROWS = 200
"""Rows of the table of evaluated samples; the store has all of them."""
TRACED_ITERATIONS = 50
"""Iterations in trace and picture; the spans of all of them are below ``timeline/`` in the store."""


class Recorder:
    """The run's voice. Entered before training, left after it with whatever ended the run.

    Attributes:
        records: the finished iterations, those before a resume included.
    """

    def __init__(self, services: Services, show: Callable[[ProgressState], None]) -> None:
        self._services = services
        self._run = services.run
        self._config = services.run.config
        self._show = show
        self._progress = ProgressState(iterations=self._config.iterations, groups=self._config.prompts_per_iteration)
        self._shown_at = 0.0
        self._windows: list[Window] = []
        self._window_start = 0.0
        self._undelivered = 0
        self._started = time.time()
        self._accuracies: dict[int, float] = {}
        self.records: list[IterationRecord] = []

    def __enter__(self) -> Recorder:
        facts = self._run.facts()
        problems = self._services.problems
        fingerprints = {"data": problems.fingerprint, "model": self._services.model.fingerprint}
        if problems.held_out:
            fingerprints["evaluation"] = problems.fingerprint
        versions = {name: importlib.metadata.version(name) for name in PACKAGES} | {"pa": __version__}
        self._mlflow = TrackedRun.start(
            self._config,
            run_url=self._run.url,
            fingerprints=fingerprints,
            versions=versions,
            run_name=self._run.name,
            resume_run_id=facts.get("mlflow_run_id"),
        )
        self._run.describe(
            fingerprints=fingerprints,
            versions=versions,
            mlflow_run_id=self._mlflow.run_id,
            mlflow_experiment_id=self._mlflow.experiment_id,
            mlflow_uri=self._mlflow.uri,
        )
        self._progress.mlflow_run_id = self._mlflow.run_id
        self._tell("starting")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._mlflow.finish("FINISHED")
            self._tell("done")
            return
        killed = isinstance(error, (Stopped, KeyboardInterrupt))
        self._mlflow.set_tag("stopped_by", str(error) or type(error).__name__)
        if not killed:  # who is told to stop has little time; the pictures of some iterations ago are there
            self._pictures()
        self._mlflow.finish("KILLED" if killed else "FAILED")
        self._tell("stopped" if killed else "failed")

    def begin(self) -> None:
        """An iteration opens: its window of the timeline starts."""
        self._window_start = time.time()
        self._progress.groups_consumed = self._progress.groups_replaced = 0
        self._tell("training")

    def consumed(self, count: int, replaced: int = 0) -> None:
        """The trainer has consumed ``count`` groups of the iteration; ``replaced`` others were uninformative."""
        self._progress.groups_consumed = count
        self._progress.groups_replaced = replaced
        if time.time() - self._shown_at > PROGRESS_EVERY_S:
            self._tell("training")

    def stepped(self, t: int) -> None:
        """Version ``t + 1`` is published: iteration ``t``'s window ends."""
        self._windows = [*self._windows[-TRACED_ITERATIONS + 1 :], (t, self._window_start, time.time())]
        self._services.timeline.forget(before=self._windows[0][1])
        self._undelivered = self._services.buffer.undelivered(t)

    def iteration(
        self,
        t: int,
        metrics: dict[str, float],
        groups: Sequence[Group],
        trained: Sequence[Group],
        advantages: Mapping[str, Sequence[float]],
    ) -> None:
        """Log iteration ``t`` in one batch, with its times and, now and then, a table of rollouts and a traced group.

        Args:
            groups: all that were generated. trained: those that contributed to the update; tokens are theirs.
            advantages: one per sample, by id of the trained groups.
        """
        _, start, end = self._windows[-1]
        spans = self._services.timeline.spans(start, end)
        times = iteration_times(spans, start, end, self._services.replicas(spans))
        tokens = sum(len(sample) for group in trained for sample in group.samples)
        staleness = max(t - version for group in groups for sample in group.samples for version, _ in sample.versions)
        self.records.append(
            IterationRecord(
                iteration=t,
                reward=metrics.get("reward/mean"),
                times=times,
                tokens=tokens,
                groups=len(trained),
                groups_duplicated=self._services.buffer.duplicates_of(t),
                groups_lost=self._undelivered,
                max_staleness=staleness,
            )
        )
        self._services.metrics.iteration(self.records[-1], groups)
        metrics |= times.metrics() | {
            "perf/tokens": float(tokens),
            "perf/tokens_per_s": tokens / times.wall,
            "perf/tokens_per_s_per_device": tokens / times.wall / max(1, torch.cuda.device_count()),
            "perf/elapsed": time.time() - self._started,
            "policy/version": float(t + 1),
            "policy/staleness_max": float(staleness),
        }
        self._mlflow.log_iteration(t, metrics)
        if t % self._config.tracking.rollout_table_every == 0 or t + 1 == self._config.iterations:
            self._mlflow.log_table(sample_rows(groups, advantages), "rollouts", t)
            if trained:
                telling = most_telling(trained, advantages)
                self._mlflow.log_trace(telling, advantages[telling.id], spans)
            self._pictures()
        self._store_spans(t, [span.to_dict() for span in spans])
        self._estimate(t, metrics.get("reward/mean"))
        self._log_line(t, metrics, times)

    def _log_line(self, t: int, metrics: Mapping[str, float], times: IterationTimes) -> None:
        log.info(
            "iteration %d/%d: reward %.3f, length %.1f, grad norm %.2f, wall %.1f s "
            "(generate %.1f, train %.1f, sync %.1f), overlap %.2f, %.0f tokens/s, ETA %s",
            t + 1,
            self._config.iterations,
            metrics.get("reward/mean", float("nan")),
            metrics["rollout/response_length"],
            metrics["train/grad_norm"],
            times.wall,
            times.t_generate,
            times.t_train,
            times.t_sync,
            times.overlap,
            metrics["perf/tokens_per_s"],
            self._progress.eta,
        )

    def evaluated(self, found: EvaluationResult, samples: pa.Table) -> None:
        """How a version did on the held-out problems, with the samples of :mod:`pa_core.evaluation.store`."""
        self._accuracies[found.version] = found.accuracy
        self._progress.accuracy = found.accuracy
        self._services.metrics.accuracy(found.accuracy)
        self._mlflow.log_iteration(found.version, found.metrics())
        self._mlflow.log_dict(found.model_dump(mode="json"), f"evaluation/step_{found.version:06d}.json")
        self._mlflow.log_table(shown_rows(samples, EVALUATION_ROWS), "evaluation", found.version)
        log.info(
            "held-out accuracy of version %d: %.3f ± %.3f on %d problems (%s)",
            found.version,
            found.accuracy,
            found.ci95,
            found.problems,
            found.metric,
        )

    def evaluating(self, version: int, detail: str = "") -> None:
        """The trainer waits for the evaluation of ``version``."""
        if time.time() - self._shown_at > PROGRESS_EVERY_S:
            self._tell("evaluating", f"version {version} {detail}".strip())

    @property
    def evaluated_versions(self) -> set[int]:
        """Versions whose held-out accuracy is recorded."""
        return set(self._accuracies)

    def warn(self, name: str, message: str) -> None:
        """Note on the MLflow run what went wrong beside the training."""
        self._mlflow.set_tag(name, message)

    def stored(self, versions: Sequence[int]) -> None:
        """The versions that checkpoints keep: models to compare; the weights of others listed before are gone."""
        for version in self._mlflow.unlisted(versions):
            self._list_model(version)
        self._mlflow.keep_models(versions)

    def _list_model(self, version: int) -> None:
        weights = f"{self._run.url}/weights"
        params = {
            "base_model": self._config.model.path,
            "schedule": self._config.schedule.name,
            "weights": f"{weights}/{version_name(version)}",
            "weights_sha256": self._services.weights.require(version).weights_sha256,
        }
        if self._config.lora is not None:
            params["adapter_of"] = f"{weights}/base/{version_name(0)}"
        self._mlflow.add_model(version, params)

    def finish(self, weights_sha256: str) -> RunSummary:
        """Write the summary, the pictures and the final model."""
        self._tell("finishing")
        versions = sorted(self._accuracies)
        summary = summarise(
            self.records,
            run_id=self._run.name,
            run_url=self._run.url,
            mlflow_run_id=self._mlflow.run_id,
            schedule=self._config.schedule.name,
            engine=self._config.engine.kind,
            eval_before=self._accuracies.get(0),
            eval_after=self._accuracies[versions[-1]] if versions and versions[-1] > 0 else None,
            weights_sha256=weights_sha256,
        )
        self._run.store.publish(SUMMARY_KEY, summary.model_dump_json(indent=2).encode(), exclusive=False)
        self._mlflow.log_dict(summary.model_dump(mode="json"), "summary.json")
        self._pictures()
        for version in self._mlflow.unlisted([self._config.iterations]):
            self._list_model(version)
        if self._config.tracking.log_model:
            with tempfile.TemporaryDirectory(prefix="pa-model-") as folder:
                self._services.model.model.save_pretrained(folder)
                self._services.model.tokenizer.save_pretrained(folder)
                self._mlflow.log_model_dir(folder, version=self._config.iterations)
        return summary

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of the record."""
        return {
            "records": [record.model_dump(mode="json") for record in self.records],
            "accuracies": {str(version): value for version, value in self._accuracies.items()},
            "elapsed": time.time() - self._started,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue the record of a checkpoint."""
        self.records = [IterationRecord.model_validate(record) for record in state["records"]]
        self._accuracies = {int(version): value for version, value in state["accuracies"].items()}
        self._started -= state.get("elapsed", 0.0)
        self._progress.iteration = len(self.records)

    def _estimate(self, t: int, reward: float | None) -> None:
        recent = [record.times.wall for record in self.records[-10:]]
        self._progress.iteration = t + 1
        self._progress.reward = reward
        self._progress.eta_s = (self._config.iterations - t - 1) * sum(recent) / len(recent)

    def _tell(self, phase: str, detail: str = "") -> None:
        self._progress.phase, self._progress.detail = phase, detail
        self._services.metrics.phase(phase)
        self._progress.groups_in_flight = self._services.producer.in_flight
        self._shown_at = time.time()
        self._show(self._progress)
        write_progress(self._run.store, self._progress)

    def _store_spans(self, t: int, spans: list[dict[str, Any]]) -> None:
        self._run.store.publish(f"timeline/v{t:06d}.json", json.dumps(spans).encode(), exclusive=False, durable=False)

    def _pictures(self) -> None:
        """The timeline as picture and trace, and the reward curve; nothing before the first iteration."""
        if not self._windows:
            return
        spans = self._services.timeline.spans()
        self._mlflow.log_figure(timeline_picture(spans, self._windows, title=self._run.name), "timeline/timeline.png")
        self._mlflow.log_dict(chrome_trace(spans, self._windows), "timeline/trace.json")
        rewards = [(record.iteration, record.reward) for record in self.records if record.reward is not None]
        curve = reward_curve(
            rewards,
            sorted(self._accuracies.items()),
            metric=self._config.evaluation_metric,
            title=self._run.name,
        )
        self._mlflow.log_figure(curve, "reward_curve.png")
