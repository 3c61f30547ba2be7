"""Groups spread over the processes that train on them, each with about the same work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pa_core.model.packing import Attention, TrainGroup

_ROUNDS = 16


def shares(groups: Sequence[TrainGroup], count: int, attention: Attention) -> list[list[TrainGroup]]:
    """Spread ``groups`` over ``count`` processes by computed tokens.

    Whole groups where that balances; else groups are split by responses, which is exact, since advantages are fixed
    per sample and the loss is a sum over samples. A shared prompt is then computed once per part, so a group is
    split only as long as the busiest process gets less to do. The result depends on the arguments alone, so that
    every process finds the same one. Groups without samples vanish.
    """
    parts = [group for group in groups if group.samples]
    best = _assign(parts, count, attention)
    for _ in range(_ROUNDS):
        busiest = max(best, key=lambda share: _load(share, attention))
        largest = max(busiest, key=lambda part: (len(part.samples) > 1, _load([part], attention)), default=None)
        if largest is None or len(largest.samples) < 2:
            break
        position = next(index for index, part in enumerate(parts) if part is largest)
        parts = [*parts[:position], *_halves(largest), *parts[position + 1 :]]
        found = _assign(parts, count, attention)
        if _peak(found, attention) >= _peak(best, attention):
            break
        best = found
    return best


def _assign(parts: Sequence[TrainGroup], count: int, attention: Attention) -> list[list[TrainGroup]]:
    """Largest part first, each to the process with the least to do."""
    assigned: list[list[TrainGroup]] = [[] for _ in range(count)]
    loads = [0] * count
    for part in sorted(parts, key=lambda part: -_load([part], attention)):
        target = loads.index(min(loads))
        assigned[target].append(part)
        loads[target] += _load([part], attention)
    return assigned


def _halves(group: TrainGroup) -> tuple[TrainGroup, TrainGroup]:
    """The group as two, of about equally many response tokens each; it has at least two samples."""
    total, taken = sum(sample.inputs for sample in group.samples), 0
    for position, sample in enumerate(group.samples[:-1], start=1):
        taken += sample.inputs
        if 2 * taken >= total or position == len(group.samples) - 1:
            break
    return replace(group, samples=group.samples[:position]), replace(group, samples=group.samples[position:])


def _load(parts: Sequence[TrainGroup], attention: Attention) -> int:
    """Tokens that are computed, padding aside."""
    prompts = sum(len(part.prompt_ids) * (1 if attention == "shared_prompt" else len(part.samples)) for part in parts)
    return prompts + sum(sample.inputs for part in parts for sample in part.samples)


def _peak(assigned: Sequence[Sequence[TrainGroup]], attention: Attention) -> int:
    return max(_load(share, attention) for share in assigned)
