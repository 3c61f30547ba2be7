"""The pool of reward workers: asynchronous scoring of groups with time-outs that end a hung worker."""

from __future__ import annotations

import asyncio
import logging
import math
import multiprocessing
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from pebble import ProcessExpired, ProcessPool

from pa_core.config import RewardConfig, ScoringConfig
from pa_core.errors import RewardError, RewardSetupError
from pa_core.records import Group, Sample
from pa_core.rewards import worker
from pa_core.rewards.registry import reward_target
from pa_core.rewards.worker import Outcome

START_TIMEOUT_S = 120.0
"""Seconds a worker may take to start and import its rewards on a busy machine."""

_ATTEMPTS = 3
_FIXES = {
    "error": "mend the reward function or the data it stumbles over",
    "timeout": "raise scoring.timeout_s or make the reward faster",
    "none": "let the reward return a number for every response",
    "nan": "let the reward return a finite number for every response",
}

log = logging.getLogger(__name__)


class RewardPool:
    """Scores groups in spawned worker processes; one call is one reward on one sample, so a hang costs only itself.

    A sample for which any reward has no value (exception, time-out, None, not finite) is unscored: its ``reward`` stays
    None and ``unscored`` says ``cause:reward``. Otherwise its reward is the weighted sum.

    Attributes:
        counts: calls without a value since the start, by ``cause:reward``.
    """

    def __init__(self, rewards: Sequence[RewardConfig], scoring: ScoringConfig) -> None:
        """Raises :class:`RewardSetupError` for a reward that does not exist; functions are loaded by :meth:`start`."""
        for config in rewards:
            reward_target(config)
        self._rewards = list(rewards)
        self._scoring = scoring
        self._pool: ProcessPool | None = None
        self._pending: set[Future[Outcome]] = set()
        self._messages: dict[str, str] = {}
        self.counts: Counter[str] = Counter()

    def start(self) -> None:
        """Start the workers and wait until one has loaded every reward. Idempotent.

        Raises:
            RewardError: naming what is missing, or when loading takes longer than ``START_TIMEOUT_S``.
        """
        if self._pool is not None:
            return
        self._pool = self._new_pool()
        try:
            errors = self._pool.schedule(worker.load_errors).result(START_TIMEOUT_S)
        except TimeoutError:
            errors = [f"reward workers did not load {self._names()} within {START_TIMEOUT_S:g} s"]
        except BrokenProcessPool:
            errors = [f"a reward worker died while it loaded {self._names()}; see its output above"]
        if errors:
            self.close()
            raise RewardSetupError("\n".join(errors))

    def _names(self) -> str:
        return ", ".join(config.name for config in self._rewards)

    def _new_pool(self) -> ProcessPool:
        return ProcessPool(
            max_workers=self._scoring.workers,
            initializer=worker.initialize,
            initargs=(self._rewards,),
            context=multiprocessing.get_context("spawn"),
        )

    async def score(self, group: Group) -> None:
        """Fill ``reward``, ``rewards`` and ``unscored`` of every sample of the group.

        Rewards see the prompt's metadata and, as ``metadata["response_tokens"]``, the length of the response.

        Raises:
            RewardError: when the workers do not answer at all; a reward that fails or hangs only unscores its samples.
        """
        if self._pool is None:
            raise RuntimeError("RewardPool.start() comes before score()")
        calls = [
            self._call(
                config.name,
                sample.text,
                group.prompt.answer,
                {**group.prompt.metadata, "response_tokens": len(sample)},
            )
            for sample in group.samples
            for config in self._rewards
        ]
        deadline = self._deadline(len(calls))
        try:
            async with asyncio.timeout(deadline):
                outcomes = iter(await asyncio.gather(*calls))
        except TimeoutError:
            raise RewardError(
                f"group {group.id}: reward workers ({self._names()}) did not answer within {deadline:.0f} s"
            ) from None
        for sample in group.samples:
            self._assign(sample, {config.name: next(outcomes) for config in self._rewards})

    def _deadline(self, calls: int) -> float:
        """Seconds after which every call must have ended, had each one hung and cost its worker's restart."""
        rounds = math.ceil((len(self._pending) + calls) / self._scoring.workers)
        return START_TIMEOUT_S + rounds * (self._scoring.timeout_s + START_TIMEOUT_S / 4)

    async def _call(self, name: str, response: str, answer: str, metadata: Mapping[str, Any]) -> Outcome:
        """One reward on one sample. A pool that breaks under it is replaced, a few times."""
        for _ in range(_ATTEMPTS):
            pool = self._pool
            if pool is None:
                raise RewardError("the reward workers are closed")
            try:
                future = pool.schedule(
                    worker.call, args=(name, response, answer, metadata), timeout=self._scoring.timeout_s
                )
            except RuntimeError:  # pebble: the pool is no longer active
                await self._replace(pool)
                continue
            self._pending.add(future)
            future.add_done_callback(self._pending.discard)
            try:
                return await asyncio.wrap_future(future)
            except TimeoutError:
                return Outcome(
                    cause="timeout", message=f"took longer than scoring.timeout_s={self._scoring.timeout_s:g}"
                )
            except ProcessExpired as error:
                return Outcome(cause="error", message=f"its worker process died (exit code {error.exitcode})")
            except BrokenProcessPool:
                await self._replace(pool)
        return Outcome(cause="error", message=f"its worker process died {_ATTEMPTS} times")

    async def _replace(self, broken: ProcessPool) -> None:
        """A new pool for one that lost an idle worker, which pebble takes for the end of all of them."""
        if self._pool is not broken:
            return
        log.warning("a reward worker was killed from outside; starting the pool again")
        self._pool = self._new_pool()
        await asyncio.to_thread(_stop, broken)

    def _assign(self, sample: Sample, outcomes: Mapping[str, Outcome]) -> None:
        sample.rewards = {name: outcome.value for name, outcome in outcomes.items() if outcome.value is not None}
        sample.reward = sample.unscored = None
        for name, outcome in outcomes.items():
            if outcome.cause is not None:
                key = f"{outcome.cause}:{name}"
                sample.unscored = sample.unscored or key
                if key not in self.counts:
                    log.warning("reward %r left a sample unscored (%s): %s", name, outcome.cause, outcome.message)
                self.counts[key] += 1
                self._messages[key] = outcome.message
        if sample.unscored is None:
            sample.reward = sum(config.weight * sample.rewards[config.name] for config in self._rewards)

    def check(self, groups: Iterable[Group], expected: int = 0) -> None:
        """Judge an iteration's groups: too large a share without a score stops the run.

        Args:
            groups: those that are there.
            expected: samples of the whole iteration; lets the verdict come as soon as it is certain.

        Raises:
            RewardError: naming the reward, the cause, its last message, the share and ``scoring.max_unscored``.
        """
        samples = [sample for group in groups for sample in group.samples]
        causes = Counter(sample.unscored for sample in samples if sample.unscored is not None)
        of = max(expected, len(samples))
        if causes.total() <= self._scoring.max_unscored * of:
            return
        key, _ = causes.most_common(1)[0]
        cause, _, name = key.partition(":")
        listed = ", ".join(f"{count} x {each}" for each, count in causes.most_common())
        last = self._messages.get(key)
        raise RewardError(
            f"reward {name!r} left too many samples unscored: {causes.total()} of {of} have no score "
            f"({listed}), more than scoring.max_unscored={self._scoring.max_unscored:g} allows. "
            + (f"Last {cause}: {last}. " if last else "")
            + f"Fix: {_FIXES[cause]}"
        )

    def close(self) -> None:
        """End the workers, the hung ones too. Calls under way are cancelled. Idempotent."""
        pool, self._pool = self._pool, None
        for future in list(self._pending):
            future.cancel()
        if pool is not None:
            _stop(pool)


def _stop(pool: ProcessPool) -> None:
    pool.stop()
    pool.join()
