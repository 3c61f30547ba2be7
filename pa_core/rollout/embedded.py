"""The engine that needs nothing but transformers: several groups share one decode loop.

A prompt is prefilled once and its cache repeated for the K samples; rows leave the batch as they end, and a
group is answered as soon as its own K responses are done, while the others go on.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from pa_core.errors import EngineError
from pa_core.model.loading import context_limit
from pa_core.rollout.protocol import GenerateRequest, GenerateResponse, Generation, VersionMismatch

logger = logging.getLogger(__name__)

IDLE_TIMEOUT_S = 60.0
"""Seconds a load waits for groups in flight (a cancelled group leaves at the next token)."""

LINGER_S = 0.02
"""Seconds a batch that is not full waits for groups that arrive together with its first one."""


class AppendLayer(DynamicLayer):
    """A :class:`DynamicLayer` that appends in place instead of copying the whole cache for every token.

    Rows ``[B, heads, length, dim]`` live in a larger buffer; ``keys`` and ``values`` are views of it.
    """

    HEADROOM = 64

    def __init__(self) -> None:
        super().__init__()
        self._buffers: tuple[torch.Tensor, torch.Tensor] | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append states ``[B, heads, new, dim]`` and return all of them, as views."""
        if not self.is_initialized:
            # A prefill is repeated for the samples right afterwards, so headroom would be copied for nothing.
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states, value_states
            return self.keys, self.values
        length = self.keys.shape[-2]
        total = length + key_states.shape[-2]
        if self._buffers is None or self._buffers[0].shape[-2] < total:
            self._buffers = self._grown(self.keys, total), self._grown(self.values, total)
        rows = key_states.shape[0]
        keys, values = (buffer[:rows, :, :total] for buffer in self._buffers)
        keys[:, :, length:] = key_states
        values[:, :, length:] = value_states
        self.keys, self.values = keys, values
        return keys, values

    def _grown(self, states: torch.Tensor, total: int) -> torch.Tensor:
        rows, heads, length, dim = states.shape
        buffer = states.new_empty(rows, heads, total + self.HEADROOM, dim)
        buffer[:, :, :length] = states
        return buffer

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows ``indices``; rows that stay where they are cost nothing."""
        moves = [(target, source) for target, source in enumerate(indices.tolist()) if target != source]
        if self._buffers is None or any(source < len(indices) for _, source in moves):
            super().batch_select_indices(indices)
            self._buffers = None
            return
        for states in (self.keys, self.values):
            for target, source in moves:
                states[target] = states[source]
        self.keys, self.values = self.keys[: len(indices)], self.values[: len(indices)]


def group_uniforms(request: GenerateRequest) -> NDArray[np.float64]:
    """The group's random numbers in [0, 1), f64[K, max_tokens], a function of (seed, version, group id) alone."""
    name = f"{request.seed}:{request.version}:{request.group_id}".encode()
    generator = np.random.Generator(np.random.PCG64(int.from_bytes(hashlib.sha256(name).digest(), "big")))
    return generator.random((request.samples, request.max_tokens))


def choose_tokens(
    logits: torch.Tensor, temperature: torch.Tensor, uniforms: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample by inverse CDF, or take the arg max where the temperature is 0.

    Args:
        logits: f32[B, V].
        temperature: f32[B].
        uniforms: f64[B] in [0, 1).

    Returns:
        Token ids i64[B] and their log-probabilities f32[B] under softmax(logits / temperature); under
        softmax(logits) for greedy rows.
    """
    greedy = temperature == 0
    logprobs = torch.log_softmax(logits / torch.where(greedy, 1.0, temperature)[:, None], dim=-1)
    if bool(greedy.all()):
        tokens = logprobs.argmax(dim=-1)
    else:
        cdf = torch.cumsum(logprobs.exp(), dim=-1, dtype=torch.float64)
        # right=True: the first token whose cumulated probability exceeds u, never one of probability 0.
        tokens = torch.searchsorted(cdf, (uniforms * cdf[:, -1])[:, None], right=True)[:, 0]
        tokens.clamp_(max=logits.shape[-1] - 1)
        if bool(greedy.any()):
            tokens = torch.where(greedy, logprobs.argmax(dim=-1), tokens)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


def keep_order(kept: Sequence[int]) -> list[int]:
    """An order of the ``kept`` (ascending) rows in which as many as possible stay where they are."""
    count = len(kept)
    order = list(range(count))
    staying = {row for row in kept if row < count}
    holes = (row for row in range(count) if row not in staying)
    for hole, source in zip(holes, (row for row in kept if row >= count), strict=True):
        order[hole] = source
    return order


class _Job:
    """A group on its way: the request, who waits for it, and its responses so far."""

    def __init__(self, request: GenerateRequest, future: Future[GenerateResponse]) -> None:
        self.request = request
        self.future = future
        self.started_at = 0.0
        self.tokens: list[list[int]] = [[] for _ in range(request.samples)]
        self.logprobs: list[list[float]] = [[] for _ in range(request.samples)]
        self.reasons: list[str] = ["length"] * request.samples
        self.open = request.samples

    def answer(self, replica: str) -> None:
        generations = [
            Generation(
                token_ids=np.asarray(tokens, dtype=np.int32),
                logprobs=np.asarray(logprobs, dtype=np.float32),
                finish_reason=reason,
                versions=((self.request.version, len(tokens)),),
            )
            for tokens, logprobs, reason in zip(self.tokens, self.logprobs, self.reasons, strict=True)
        ]
        if self.future.set_running_or_notify_cancel():
            request = self.request
            self.future.set_result(
                GenerateResponse(request.group_id, request.version, generations, self.started_at, time.time(), replica)
            )

    def fail(self, error: BaseException) -> None:
        if not self.future.done() and self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


class EmbeddedEngine:
    """Generates with a transformers causal model, in one thread of its own.

    Args:
        model: causal language model in eval mode; its parameters are overwritten in place by ``load_weights``.
        stop_ids: token ids that end a response; the sampled one is kept as its last token.
        load_weights: copies a version into ``model`` in place, verifies it, and returns its digest.
        replica: id put into every answer.
        batch_groups: groups decoded together.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        stop_ids: Iterable[int],
        load_weights: Callable[[int], str],
        *,
        replica: str = "embedded",
        batch_groups: int = 4,
    ) -> None:
        self._model = model.eval()
        self._stop_ids = frozenset(stop_ids)
        self._load_weights = load_weights
        self._replica = replica
        self._batch_groups = batch_groups
        self._context = context_limit(model.config)
        names = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"
        self._version: int | None = None
        self._load_lock = threading.Lock()
        self._changed = threading.Condition()
        self._waiting: deque[_Job] = deque()
        self._active = 0
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="embedded-engine", daemon=True)
        self._thread.start()

    @property
    def version(self) -> int | None:
        """The loaded version; None before the first load, while loading and after a failed load."""
        return self._version

    def submit(self, request: GenerateRequest) -> Future[GenerateResponse]:
        """Queue a group; groups are taken up in order, ``batch_groups`` at a time.

        Raises:
            VersionMismatch: the request asks for another version than the loaded one.
            EngineError: the request cannot be served by this model, or the engine is closed.
        """
        request.check()
        length = len(request.token_ids) + request.max_tokens
        if length > self._context:
            raise EngineError(
                f"group {request.group_id}: prompt ({len(request.token_ids)} tokens) + max_tokens "
                f"({request.max_tokens}) exceeds the model's context of {self._context}; lower sampling.max_tokens"
            )
        with self._changed:
            if self._closed:
                raise EngineError(f"replica {self._replica} is shutting down")
            if request.version != self._version:
                raise VersionMismatch(
                    f"group {request.group_id} asks for policy version {request.version}, but replica "
                    f"{self._replica} has loaded {self._version}"
                )
            job = _Job(request, Future())
            self._waiting.append(job)
            self._changed.notify_all()
        return job.future

    def load(self, version: int) -> str:
        """Wait for an idle engine, load ``version`` in place and return the digest of its weights.

        No cache outlives a decode loop and none runs here, so nothing computed by the old weights remains.

        Raises:
            EngineError: groups stay in flight.
            StoreError: the version is missing or fails its digests. Generation is refused until a load succeeds.
        """
        with self._load_lock:
            with self._changed:
                self._version = None
                if not self._changed.wait_for(lambda: not self._waiting and not self._active, IDLE_TIMEOUT_S):
                    count = len(self._waiting) + self._active
                    raise EngineError(
                        f"replica {self._replica}: {count} groups were still in flight {IDLE_TIMEOUT_S:.0f} s after "
                        f"it was asked to load version {version}"
                    )
            # Without a version nothing is admitted, so the weights may change outside the lock.
            digest = self._load_weights(version)
            self._version = version
            return digest

    def close(self) -> None:
        """Fail what waits or runs and end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout=10.0)

    def _work(self) -> None:
        while jobs := self._take():
            try:
                self._decode(jobs)
            except EngineError as error:
                for job in jobs:
                    job.fail(error)
            except Exception as error:
                logger.exception("generation failed on replica %s", self._replica)
                failure = EngineError(f"replica {self._replica} failed to generate: {type(error).__name__}: {error}")
                for job in jobs:
                    job.fail(failure)
            finally:
                with self._changed:
                    self._active = 0
                    self._changed.notify_all()

    def _take(self) -> list[_Job]:
        """The next batch, in order; empty when the engine is closed."""
        with self._changed:
            while True:
                self._changed.wait_for(lambda: bool(self._waiting) or self._closed)
                if self._closed:
                    for job in self._waiting:
                        job.fail(EngineError(f"replica {self._replica} is shutting down"))
                    self._waiting.clear()
                    return []
                self._changed.wait_for(lambda: len(self._waiting) >= self._batch_groups or self._closed, LINGER_S)
                jobs: list[_Job] = []
                while self._waiting and len(jobs) < self._batch_groups:
                    job = self._waiting.popleft()
                    if not job.future.cancelled():
                        jobs.append(job)
                self._active = len(jobs)
                if jobs:
                    return jobs
                self._changed.notify_all()

    @torch.inference_mode()
    def _decode(self, jobs: list[_Job]) -> None:
        started = time.time()
        for job in jobs:
            job.started_at = started
        longest = max(job.request.max_tokens for job in jobs)
        logits, cache, mask, positions = self._prefill(jobs, longest)
        rows = [(job, k) for job in jobs for k in range(job.request.samples)]
        repeat = torch.tensor([index for index, job in enumerate(jobs) for _ in range(job.request.samples)])
        uniforms = torch.zeros(len(rows), longest, dtype=torch.float64)
        begin = 0
        for job in jobs:
            uniforms[begin : begin + job.request.samples, : job.request.max_tokens] = torch.from_numpy(
                group_uniforms(job.request)
            )
            begin += job.request.samples
        temperature = torch.tensor([job.request.temperature for job, _ in rows])
        cache.batch_select_indices(repeat)
        logits, positions = logits[repeat], positions[repeat]
        mask = None if mask is None else mask[repeat]
        for step in range(longest):
            tokens, logprobs = choose_tokens(logits, temperature, uniforms[:, step])
            kept = self._record(rows, tokens.tolist(), logprobs.tolist())
            if not kept:
                return
            if len(kept) < len(rows):
                order = keep_order(kept)
                index = torch.tensor(order)
                rows = [rows[row] for row in order]
                cache.batch_select_indices(index)
                tokens, positions, temperature = tokens[index], positions[index], temperature[index]
                uniforms = uniforms[index]
                mask = None if mask is None else mask[index]
            logits = self._forward(tokens[:, None], positions, mask, cache)
            positions = positions + 1

    def _prefill(
        self, jobs: list[_Job], longest: int
    ) -> tuple[torch.Tensor, DynamicCache, torch.Tensor | None, torch.Tensor]:
        """Run all prompts once, left-padded.

        Returns:
            Last-position logits f32[G, V]; the cache of G rows; the mask i64[G, L + longest] (None without
            padding); the position of each prompt's next token, i64[G, 1].
        """
        lengths = [len(job.request.token_ids) for job in jobs]
        width = max(lengths)
        token_ids = torch.zeros(len(jobs), width, dtype=torch.int64)
        mask = torch.ones(len(jobs), width + longest, dtype=torch.int64)
        for row, (job, length) in enumerate(zip(jobs, lengths, strict=True)):
            token_ids[row, width - length :] = torch.from_numpy(job.request.token_ids.astype(np.int64))
            mask[row, : width - length] = 0
        padding = None if min(lengths) == width else mask
        positions = (mask[:, :width].cumsum(dim=1) - 1).clamp_(min=0)
        cache = DynamicCache(config=self._model.config)
        cache.layers = [AppendLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
        logits = self._forward(token_ids, positions, padding, cache)
        return logits, cache, padding, positions[:, -1:] + 1

    def _forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | None, cache: DynamicCache
    ) -> torch.Tensor:
        """Extend the cache by ``token_ids`` i64[B, n]; logits f32[B, V] of the last position."""
        total = cache.get_seq_length() + token_ids.shape[1]
        output = self._model(
            input_ids=token_ids,
            attention_mask=None if mask is None else mask[:, :total],
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **{self._cache_name: cache},
        )
        logits: torch.Tensor = output.logits[:, -1]
        return logits.float()

    def _record(self, rows: list[tuple[_Job, int]], tokens: list[int], logprobs: list[float]) -> list[int]:
        """Append one token per row, answer groups that are complete, and return the rows that go on."""
        if self._closed:
            raise EngineError(f"replica {self._replica} is shutting down")
        kept = []
        for row, (job, k) in enumerate(rows):
            if job.future.cancelled():
                continue
            job.tokens[k].append(tokens[row])
            job.logprobs[k].append(logprobs[row])
            if tokens[row] in self._stop_ids or tokens[row] in job.request.stop_token_ids:
                job.reasons[k] = "stop"
            elif len(job.tokens[k]) < job.request.max_tokens:
                kept.append(row)
                continue
            job.open -= 1
            if not job.open:
                job.answer(self._replica)
        return kept
