"""From groups to the tensors of one forward-backward pass.

Two input layouts share one interface, :class:`PackedBatch`: ``shared_prompt`` packs whole groups into a single row
``[p1 | r11 … r1K | p2 | …]``; ``per_sample`` pads one row per sample. Whatever is per token comes out flat, ``[T]``,
in the same order: groups as given, samples within a group, tokens within a sample; only tokens with loss mask 1.

The last trained token of a response is a target and never an input, since nothing is predicted from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pa_core.model.layout import PromptLayout, build_layout
from pa_core.model.rope import RopeLimit
from pa_core.records import Group

Attention = Literal["shared_prompt", "per_sample"]


@dataclass(frozen=True)
class TrainSample:
    """One scored response: token ids i32[L], the engine's logprobs f32[L], loss mask bool[L], and its advantage."""

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    loss_mask: NDArray[np.bool_]
    advantage: float

    @property
    def tokens(self) -> int:
        """Trained tokens: those with loss mask 1."""
        return int(self.loss_mask.sum())

    @property
    def inputs(self) -> int:
        """Response tokens that must be computed: all before the last trained one."""
        trained = np.flatnonzero(self.loss_mask)
        return int(trained[-1]) if trained.size else 0


@dataclass(frozen=True)
class TrainGroup:
    """A prompt i32[Lp] and those of its responses that take part in the update."""

    id: str
    prompt_ids: NDArray[np.int32]
    samples: tuple[TrainSample, ...]

    @property
    def tokens(self) -> int:
        """Trained tokens of all samples."""
        return sum(sample.tokens for sample in self.samples)


def train_group(group: Group, advantages: Tensor) -> TrainGroup:
    """The trainable part of ``group``: unscored samples are left out, so they count in no denominator.

    Args:
        advantages: f32[K], in the order of ``group.samples``.
    """
    if len(advantages) != len(group.samples):
        raise ValueError(f"group {group.id}: {len(advantages)} advantages for {len(group.samples)} samples")
    if not len(group.prompt.token_ids):
        raise ValueError(f"group {group.id}: an empty prompt predicts no first token")
    samples = tuple(
        TrainSample(sample.token_ids, sample.logprobs, sample.loss_mask.astype(np.bool_), float(advantage))
        for sample, advantage in zip(group.samples, advantages.tolist(), strict=True)
        if sample.reward is not None
    )
    return TrainGroup(group.id, group.prompt.token_ids, samples)


@dataclass(frozen=True)
class PackedBatch:
    """One micro-batch.

    Attributes:
        input_ids: i64[R, C]; one row for ``shared_prompt``, one per sample for ``per_sample``.
        position_ids: i64[R, C]; in a shared row they restart at the prompt's length for each response.
        predictors: i64[T], position in the flattened ``[R * C]`` whose hidden state predicts token t.
        targets: i64[T], the token ids.
        advantages: f32[T], each token's sample's advantage.
        engine_logprobs: f32[T], log-probabilities (nats) at sampling.
        sample_index: i64[T], which of the batch's samples a token is from, 0 … S-1.
        sample_tokens: i64[S], trained tokens per sample, 0 for an empty response.
        shortest, longest: prompt + computed response tokens of the batch's shortest and longest sample.
        layout: who attends to whom in a shared row; None for ``per_sample``.
    """

    input_ids: Tensor
    position_ids: Tensor
    predictors: Tensor
    targets: Tensor
    advantages: Tensor
    engine_logprobs: Tensor
    sample_index: Tensor
    sample_tokens: Tensor
    shortest: int
    longest: int
    layout: PromptLayout | None

    @property
    def samples(self) -> int:
        """S, samples in the batch."""
        return len(self.sample_tokens)

    @property
    def tokens(self) -> int:
        """T, trained tokens in the batch."""
        return len(self.targets)

    def to(self, device: torch.device) -> PackedBatch:
        """The same batch on ``device``."""
        moved: dict[str, Any] = {
            name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        return replace(self, **moved, layout=None if self.layout is None else self.layout.to(device))


def _flat_fields(groups: Sequence[TrainGroup]) -> dict[str, Any]:
    """The fields of :class:`PackedBatch` that do not depend on the input layout."""
    samples = [sample for group in groups for sample in group.samples]
    contexts = [_context(group, sample) for group in groups for sample in group.samples]
    counts = np.array([sample.tokens for sample in samples], dtype=np.int64)

    def flat(arrays: list[NDArray[np.generic]], dtype: type[np.generic]) -> Tensor:
        joined = np.concatenate(arrays) if arrays else np.empty(0)
        return torch.from_numpy(joined.astype(dtype))

    return {
        "targets": flat([sample.token_ids[sample.loss_mask] for sample in samples], np.int64),
        "engine_logprobs": flat([sample.logprobs[sample.loss_mask] for sample in samples], np.float32),
        "advantages": torch.from_numpy(
            np.repeat(np.array([sample.advantage for sample in samples], dtype=np.float32), counts)
        ),
        "sample_index": torch.from_numpy(np.repeat(np.arange(len(samples)), counts)),
        "sample_tokens": torch.from_numpy(counts),
        "shortest": min(contexts),
        "longest": max(contexts),
    }


def _context(group: TrainGroup, sample: TrainSample) -> int:
    """Tokens that a sample's last computed position sees, itself included."""
    return len(group.prompt_ids) + sample.inputs


def _predictors(sample: TrainSample, prompt_end: int, response_start: int) -> NDArray[np.int64]:
    """Row positions that predict a sample's trained tokens: the prompt's last one, or the token before."""
    trained = np.flatnonzero(sample.loss_mask)
    return np.where(trained == 0, prompt_end, response_start + trained - 1)


def pack(groups: Sequence[TrainGroup], attention: Attention = "shared_prompt") -> PackedBatch:
    """Pack groups into one micro-batch. Groups keep their order; ``groups`` must hold at least one sample."""
    if not any(group.samples for group in groups):
        raise ValueError("nothing to pack: no group has a sample")
    return _pack_shared(groups) if attention == "shared_prompt" else _pack_per_sample(groups)


def _pack_shared(groups: Sequence[TrainGroup]) -> PackedBatch:
    tokens: list[NDArray[np.int32]] = []
    positions: list[NDArray[np.int64]] = []
    predictors: list[NDArray[np.int64]] = []
    shapes: list[tuple[int, list[int]]] = []
    row = 0
    for group in groups:
        prompt_length = len(group.prompt_ids)
        tokens.append(group.prompt_ids)
        positions.append(np.arange(prompt_length))
        row += prompt_length
        prompt_end = row - 1
        for sample in group.samples:
            tokens.append(sample.token_ids[: sample.inputs])
            positions.append(prompt_length + np.arange(sample.inputs))
            predictors.append(_predictors(sample, prompt_end, row))
            row += sample.inputs
        shapes.append((prompt_length, [sample.inputs for sample in group.samples]))
    return PackedBatch(
        input_ids=torch.from_numpy(np.concatenate(tokens).astype(np.int64)).unsqueeze(0),
        position_ids=torch.from_numpy(np.concatenate(positions)).unsqueeze(0),
        predictors=torch.from_numpy(np.concatenate(predictors)),
        layout=build_layout(shapes),
        **_flat_fields(groups),
    )


def _pack_per_sample(groups: Sequence[TrainGroup]) -> PackedBatch:
    rows = [(group.prompt_ids, sample) for group in groups for sample in group.samples]
    width = max(len(prompt) + sample.inputs for prompt, sample in rows)
    # Right padding: causal attention never looks ahead, so no mask is needed and any token will do.
    input_ids = np.zeros((len(rows), width), dtype=np.int64)
    predictors = []
    for number, (prompt, sample) in enumerate(rows):
        response_start = len(prompt)
        input_ids[number, :response_start] = prompt
        input_ids[number, response_start : response_start + sample.inputs] = sample.token_ids[: sample.inputs]
        predictors.append(number * width + _predictors(sample, response_start - 1, response_start))
    return PackedBatch(
        input_ids=torch.from_numpy(input_ids),
        position_ids=torch.arange(width).expand(len(rows), width),
        predictors=torch.from_numpy(np.concatenate(predictors)),
        layout=None,
        **_flat_fields(groups),
    )


@dataclass(frozen=True)
class _Size:
    """What decides how many tokens a forward pass over some groups computes.

    Attributes:
        shared: prompts + response inputs, in tokens.
        rows: samples.
        width: longest context.
    """

    shared: int = 0
    rows: int = 0
    width: int = 0

    def __add__(self, other: _Size) -> _Size:
        return _Size(self.shared + other.shared, self.rows + other.rows, max(self.width, other.width))

    def cost(self, attention: Attention) -> int:
        """Computed tokens; for ``per_sample`` padding included."""
        return self.shared if attention == "shared_prompt" else self.rows * self.width


def _split(group: TrainGroup, token_budget: int, attention: Attention) -> list[tuple[TrainGroup, _Size]]:
    """Parts of a group within the budget, by responses; a single sample above it stays a part of its own.

    Exact, since advantages are fixed per sample and the loss is a sum over samples.
    """
    parts: list[tuple[TrainGroup, _Size]] = []
    prompt = _Size(shared=len(group.prompt_ids))
    taken: list[TrainSample] = []
    size = prompt
    for sample in group.samples:
        added = _Size(sample.inputs, 1, _context(group, sample))
        if taken and (size + added).cost(attention) > token_budget:
            parts.append((replace(group, samples=tuple(taken)), size))
            taken, size = [], prompt
        taken.append(sample)
        size += added
    if taken:
        parts.append((replace(group, samples=tuple(taken)), size))
    return parts


def _first_fit(groups: Sequence[TrainGroup], token_budget: int, attention: Attention) -> list[list[TrainGroup]]:
    batches: list[list[TrainGroup]] = []
    sizes: list[_Size] = []
    for group in groups:
        for part, size in _split(group, token_budget, attention):
            together = ((number, taken + size) for number, taken in enumerate(sizes))
            fitting = next((found for found in together if found[1].cost(attention) <= token_budget), None)
            if fitting is None:
                batches.append([part])
                sizes.append(size)
            else:
                batches[fitting[0]].append(part)
                sizes[fitting[0]] = fitting[1]
    return batches


def micro_batches(
    groups: Sequence[TrainGroup],
    token_budget: int,
    attention: Attention = "shared_prompt",
    rope: RopeLimit | None = None,
) -> list[list[TrainGroup]]:
    """Spread groups over micro-batches of at most ``token_budget`` computed tokens, each ready for :func:`pack`.

    Whole groups, first fit in the given order; a group above the budget is split by responses. Groups without
    samples vanish. Only a single prompt + response longer than the budget exceeds it.

    Args:
        rope: samples up to its limit and beyond it never share a micro-batch.
    """
    if rope is None:
        return _first_fit(groups, token_budget, attention)
    sides: tuple[list[TrainGroup], list[TrainGroup]] = ([], [])
    for group in groups:
        for side, beyond in zip(sides, (False, True), strict=True):
            kept = tuple(sample for sample in group.samples if (_context(group, sample) > rope.tokens) == beyond)
            side.append(replace(group, samples=kept))
    return [batch for side in sides for batch in _first_fit(side, token_budget, attention)]
