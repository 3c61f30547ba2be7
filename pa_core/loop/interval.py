"""Evaluation while training goes on: a process beside the trainer evaluates every n-th version with its own replica.

The two share nothing but the store. The trainer publishes versions, as ever, and keeps those that are due from being
removed; the evaluator (this module run as a program) evaluates them one by one and writes
``evaluations/v000012.json``; the trainer picks the results up between iterations. It waits for them only at the very
end. An evaluator that dies is reported, and training goes on without it.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Callable, Iterator, Set
from types import TracebackType

from pa_core.errors import EngineError, StoreError, UserError
from pa_core.evaluation.store import EvaluationStore
from pa_core.loop.evaluation import Evaluation
from pa_core.loop.run import Run, open_run
from pa_core.rollout.process import ChildProcess, spawn, watch_parent
from pa_core.rollout.supervisor import exit_phrase
from pa_core.store.weights import WeightStore

log = logging.getLogger(__name__)

POLL_S = 0.5
STOP_S = 5.0
TAG_LIMIT = 5000
"""Characters that every MLflow server takes for a tag."""


class IntervalEvaluation:
    """The trainer's side: starts the evaluator, holds versions for it, and collects what it finds.

    Nothing here raises: an evaluation that fails must not cost a training run.

    Args:
        on_failure: told why no more results will come.
    """

    def __init__(self, run: Run, on_failure: Callable[[str], None]) -> None:
        self._run = run
        self._on_failure = on_failure
        self._results = EvaluationStore(run.store)
        self._due: list[int] = []
        self._process: ChildProcess | None = None

    def start(self, current: int, evaluated: Set[int]) -> None:
        """Start the evaluator, if anything is due.

        Args:
            current: the version that training begins with; earlier ones are due only where they still exist.
            evaluated: versions whose results are known.
        """
        config = self._run.config
        if not config.evaluation.every:
            return
        weights = WeightStore(self._run.store)
        self._due = [
            version
            for version in range(config.evaluation.every, config.iterations, config.evaluation.every)
            if version not in evaluated and (version >= current or weights.manifest(version) is not None)
        ]
        if not self._due:
            return
        command = [sys.executable, "-m", "pa_core.loop.interval", "--run-url", self._run.url]
        try:
            self._process = spawn(
                [*command, "--versions", ",".join(map(str, self._due))],
                self._run.log_folder / "evaluator.log",
                {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"},
            )
        except EngineError as error:
            self._give_up(str(error))

    def held(self) -> set[int]:
        """Versions that must stay in the store, because they are still to be evaluated."""
        return set(self._due)

    def collect(self) -> list[Evaluation]:
        """Evaluations that have arrived since the last call, in the order of versions."""
        ended = None if self._process is None else self._process.poll()
        found = []
        try:
            # The evaluator goes through them in order, so the first that is missing ends the search.
            while self._due and (result := self._results.read(self._due[0])) is not None:
                found.append(Evaluation(result, self._results.table(self._due[0])))
                self._due.pop(0)
        except StoreError as error:
            log.warning("evaluation: its results cannot be read for now: %s", error)
            return found
        if self._due and ended is not None and self._process is not None:
            self._give_up(f"it ended ({exit_phrase(ended)}); the end of its log:\n{self._process.tail()}")
        return found

    def rest(self, show: Callable[[int], None]) -> Iterator[Evaluation]:
        """After the last iteration: evaluations still due, as they arrive; ``show`` is told which one is awaited."""
        while True:
            yield from self.collect()
            if not self._due:
                return
            show(self._due[0])
            time.sleep(POLL_S)

    def __enter__(self) -> IntervalEvaluation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.stop(STOP_S)

    def _give_up(self, cause: str) -> None:
        missed = ", ".join(map(str, self._due))
        message = f"evaluation during training is over, and training goes on; versions without: {missed}. {cause}"
        log.error("%s", message)
        self._on_failure(message[:TAG_LIMIT])
        self._due = []


def evaluate_versions(run_url: str, versions: list[int]) -> None:
    """The evaluator: evaluate each version once it is published, in order, and write its result into the store.

    Raises:
        UserError: the replica or the rewards failed, or a version is gone.
    """
    from pa_core.loop.evaluation_engine import EvaluationEngine, engine_beside_training

    run = open_run(run_url)
    results, weights = EvaluationStore(run.store), WeightStore(run.store)
    engine = EvaluationEngine(run, engine_beside_training(run.config), run.log_folder / "evaluator")
    with engine:
        for version in versions:
            if results.read(version) is not None:
                continue
            while weights.manifest(version) is None:
                time.sleep(POLL_S)
            evaluation = engine.evaluate(version)
            results.write(evaluation.result, evaluation.table)
            log.info("version %d: %s %.3f", version, evaluation.result.metric, evaluation.result.accuracy)


def main() -> None:
    """``python -m pa_core.loop.interval --run-url URL --versions 10,20,30``."""
    watch_parent()
    from pa_core.loop.signals import StopSignals

    parser = argparse.ArgumentParser(description="Evaluate versions of a run as they are published.")
    parser.add_argument("--run-url", required=True, help="the run's folder in the store")
    parser.add_argument("--versions", required=True, help="policy versions, ascending, separated by commas")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("pa_core").setLevel(logging.INFO)
    try:
        with StopSignals():
            evaluate_versions(arguments.run_url, [int(version) for version in arguments.versions.split(",")])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
