"""The producer: sends an iteration's prompts to the replicas and puts scored groups into the buffer.

The paper's "temporary data generator" between data loader and trainer (Periodic Asynchrony, section 3). It lives
in a thread of the trainer process with an asyncio loop of its own: prompts are dispatched by coroutine, and each
group is put into the buffer the moment it is scored, whatever the others do.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from pa_core.config import SamplingConfig
from pa_core.errors import EngineError
from pa_core.records import Group, Prompt, Sample
from pa_core.rewards.pool import RewardPool
from pa_core.rollout.gate import LoadAck
from pa_core.rollout.lengths import LengthHistory
from pa_core.rollout.pool import ReplicaPool
from pa_core.rollout.protocol import GenerateRequest, GenerateResponse
from pa_core.store.rollouts import RolloutBuffer
from pa_core.tracking.timeline import SCORE, Timeline

logger = logging.getLogger(__name__)

T = TypeVar("T")

SHOW_EVERY_S = 1.0
"""Seconds between two words about the progress of an evaluation."""


class Producer:
    """Runs generation and scoring behind the trainer's back; its failures reach the trainer through the buffer.

    Data flows one way: :meth:`begin` takes prompts, groups leave through ``buffer``.

    Args:
        stop_token_ids: tokens that end a response.
        longest_first: send the prompts of an iteration in the order of decreasing expected length.

    Attributes:
        in_flight: groups that are queued, generated or scored.
        scoring: those of them that are scored.
        tokens: response tokens received so far.
    """

    def __init__(
        self,
        pool: ReplicaPool,
        rewards: RewardPool,
        buffer: RolloutBuffer,
        timeline: Timeline,
        decode: Callable[[NDArray[np.int32]], str],
        seed: int,
        stop_token_ids: tuple[int, ...] = (),
        longest_first: bool = True,
    ) -> None:
        self._pool = pool
        self._rewards = rewards
        self._buffer = buffer
        self._timeline = timeline
        self._decode = decode
        self._seed = seed
        self._stop_token_ids = stop_token_ids
        self._lengths = LengthHistory() if longest_first else None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="producer", daemon=True)
        self._starting: Future[None] | None = None
        self._iteration: Future[None] | None = None
        self._closing = False
        self._failure: Future[Any] = Future()
        self.in_flight = 0
        self.scoring = 0
        self.tokens = 0
        pool.on_failure = self.fail
        pool.on_late_load = self._note_load

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        except BaseException as error:
            self.fail(error)
        if not self._closing:
            self.fail(EngineError("the producer's event loop stopped, so nothing is generated any more"))

    def fail(self, error: BaseException) -> None:
        """Have the trainer stop: whatever it waits for, the next group or :meth:`evaluate`, raises ``error``."""
        self._buffer.fail(error)
        if not self._failure.done():
            self._failure.set_exception(error)

    def _submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        if not self._thread.is_alive():
            coroutine.close()
            raise self._cause() or EngineError("the producer's thread has ended")
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _cause(self) -> BaseException | None:
        return self._failure.exception() if self._failure.done() else None

    def _result(self, job: Future[T], timeout_s: float) -> T:
        """The job's result; raises TimeoutError, or at once what the producer as a whole failed with.

        That failure goes before the job's own, which only follows from it.
        """
        wait((job, self._failure), timeout_s, FIRST_COMPLETED)
        if (cause := self._cause()) is not None:
            job.cancel()
            raise cause
        return job.result(0)

    def start(self, timeout_s: float) -> None:
        """Start the thread and wait until the replicas serve. Raises :class:`EngineError` past ``timeout_s``."""
        self._thread.start()
        try:
            self._starting = self._submit(self._pool.start())
            self._result(self._starting, timeout_s + 10)  # the pool's own deadline says more
        except TimeoutError:
            raise EngineError(
                f"replicas did not come up within engine.startup_timeout_s={timeout_s:g}: {self._pool.status()}"
            ) from None

    def begin(
        self,
        version: int,
        prompts: Sequence[Prompt],
        sampling: SamplingConfig,
        group_size: int,
        replacement: Callable[[Group], Prompt | None] = lambda group: None,
    ) -> None:
        """Open iteration ``version``: replicas load the version, and each gets work as soon as it has done so.

        Returns at once. A failure of any part reaches the trainer as the error of its next ``buffer.next``.

        Args:
            replacement: called once for each group, in the producer's thread, after the group is stored; gives the
                prompt that takes its place in the same iteration, or None.

        Raises:
            EngineError: the producer's thread has ended.
        """
        self._iteration = self._submit(self._produce(version, list(prompts), sampling, group_size, replacement))

    async def _produce(
        self,
        version: int,
        prompts: list[Prompt],
        sampling: SamplingConfig,
        group_size: int,
        replacement: Callable[[Group], Prompt | None],
    ) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._load(version))
                # The order of dispatch alone: buffer and trainer know nothing of it.
                for prompt in prompts if self._lengths is None else self._lengths.longest_first(prompts):
                    tasks.create_task(self._fill(version, prompt, sampling, group_size, replacement))
        except BaseExceptionGroup as failures:
            self._buffer.fail(_first(failures))
        except Exception as error:
            self._buffer.fail(error)

    async def _load(self, version: int) -> None:
        for load in await self._pool.load(version):
            self._note_load(load)

    def _note_load(self, load: LoadAck) -> None:
        self._timeline.add("load", load.replica, load.started_at, load.ended_at, iteration=load.version)

    async def _fill(
        self,
        version: int,
        prompt: Prompt,
        sampling: SamplingConfig,
        group_size: int,
        replacement: Callable[[Group], Prompt | None],
    ) -> None:
        """Put the group of ``prompt`` into the buffer, then those of the prompts that replace it, one by one."""
        asked: Prompt | None = prompt
        while asked is not None:
            group = await self._group(version, asked, sampling.temperature, sampling.max_tokens, group_size)
            if self._lengths is not None:
                self._lengths.observe(group)
            asked = replacement(await asyncio.to_thread(self._deliver, group))
            if asked is not None:
                self._buffer.admit(version, [asked.id])

    def _deliver(self, group: Group) -> Group:
        """Put ``group``; returns the one that the trainer gets, an earlier life's where that was stored already."""
        if self._buffer.put(group):
            return group
        return self._buffer.stored(group.version, [group.id])[0]

    async def _group(self, version: int, prompt: Prompt, temperature: float, max_tokens: int, group_size: int) -> Group:
        """Generate and score one group at ``version``."""
        self.in_flight += 1
        try:
            response = await self._pool.generate(
                GenerateRequest(
                    group_id=prompt.id,
                    token_ids=prompt.token_ids,
                    samples=group_size,
                    temperature=temperature,
                    max_tokens=max_tokens,
                    seed=self._seed,
                    version=version,
                    stop_token_ids=self._stop_token_ids,
                )
            )
            self._timeline.add(
                "generate", response.replica, response.started_at, response.ended_at, iteration=version, group=prompt.id
            )
            group = self._to_group(prompt, response)
            self.tokens += sum(len(sample) for sample in group.samples)
            await self._score(group)
            return group
        finally:
            self.in_flight -= 1

    async def _score(self, group: Group) -> None:
        self.scoring += 1
        try:
            with self._timeline.span("score", SCORE, group.version, group=group.id):
                await self._rewards.score(group)
        finally:
            self.scoring -= 1

    def _to_group(self, prompt: Prompt, response: GenerateResponse) -> Group:
        samples = [
            Sample(
                token_ids=generation.token_ids,
                logprobs=generation.logprobs,
                versions=list(generation.versions),
                loss_mask=np.ones(len(generation.token_ids), dtype=np.uint8),
                finish_reason=generation.finish_reason,
                text=self._decode(generation.token_ids),
                routed_experts=generation.routed_experts,
                sampling_mask=generation.sampling_mask,
            )
            for generation in response.generations
        ]
        return Group(prompt, samples, response.version, response.replica, (response.started_at, response.ended_at))

    def evaluate(
        self,
        version: int,
        prompts: Sequence[Prompt],
        *,
        temperature: float,
        max_tokens: int,
        samples: int,
        timeout_s: float,
        show: Callable[[int, int], None] = lambda done, total: None,
    ) -> list[Group]:
        """Scored groups for ``prompts`` at ``version``; they pass by the buffer and are never trained on.

        Args:
            show: told now and then, in the calling thread, how many of how many problems are done.

        Raises:
            EngineError: some were not finished within ``timeout_s``, or no replica is left.
        """
        missing = {prompt.id for prompt in prompts}

        async def one(prompt: Prompt) -> Group:
            group = await self._group(version, prompt, temperature, max_tokens, samples)
            missing.discard(prompt.id)
            return group

        async def gather() -> list[Group]:
            async with asyncio.TaskGroup() as tasks:
                load = tasks.create_task(self._load(version))
                jobs = [tasks.create_task(one(prompt)) for prompt in prompts]
                await load
            return [job.result() for job in jobs]

        job = self._submit(gather())
        deadline = time.monotonic() + timeout_s
        try:
            while not wait((job, self._failure), min(SHOW_EVERY_S, timeout_s), FIRST_COMPLETED).done:
                if time.monotonic() >= deadline:
                    break
                show(len(prompts) - len(missing), len(prompts))
            return self._result(job, 0)
        except TimeoutError:
            job.cancel()
            raise EngineError(
                f"evaluation at version {version}: {len(missing)} of {len(prompts)} problems were not finished within "
                f"{timeout_s:g} s (engine.request_timeout_s for each): {self._pool.status()}"
            ) from None
        except BaseExceptionGroup as failures:
            raise _first(failures) from None

    def close(self) -> None:
        """Stop producing, close the connections and end the thread. Idempotent."""
        if not self._thread.is_alive():
            return
        self._closing = True
        for job in (self._starting, self._iteration):
            if job is not None:
                job.cancel()
        try:
            self._submit(self._pool.close()).result(10)
        except TimeoutError:
            # The thread is a daemon: one that hangs does not keep the program from ending.
            logger.error("the replica pool did not close within 10 s: %s", self._pool.status())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)


def _first(failures: BaseExceptionGroup) -> BaseException:
    """The first real cause inside nested exception groups."""
    cause: BaseException = failures
    while isinstance(cause, BaseExceptionGroup):
        cause = cause.exceptions[0]
    return cause
