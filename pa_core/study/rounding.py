"""Where two runs first differ: by rounding, or really?

Sums in another order are rounded otherwise. That moves log-probabilities by their last digits, until one day another
token is drawn; from there the two runs are different draws of the same experiment. So two runs that differ by rounding
alone agree, in the first iteration in which anything differs, in the log-probabilities of all tokens up to the first
that differs. Policies that were really different do not.
"""

from __future__ import annotations

import io
from dataclasses import dataclass

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pa_core.config import TrainConfig
from pa_core.store.objects import ObjectStore
from pa_core.store.versions import version_name

TOLERANCES = {"float32": 1e-3, "bfloat16": 1e-1, "float16": 3e-2}
"""Largest difference of a token's log-probability (nats) that rounding explains, by type of the parameters."""

AMPLIFIED = 100.0
"""AdamW moves a weight whose gradient is next to zero by that gradient's sign, so that a few steps make more of
rounding than it is: 0.05 nats were seen after three steps of the quickstart, which with ``deterministic: true`` is
equal bit for bit. Up to so many times the tolerance, the samples cannot tell which of the two it is."""

Sampled = tuple[NDArray[np.int64], NDArray[np.float64]]


@dataclass(frozen=True)
class Agreement:
    """How far two runs' samples of one iteration agree.

    Attributes:
        samples: that both have. differing: of them, those with another token anywhere.
        missing: samples that only one has.
        largest: difference of a log-probability (nats) over tokens before the first that differs.
        tolerance: what rounding explains.
    """

    iteration: int
    samples: int
    differing: int
    missing: int
    largest: float
    tolerance: float

    @property
    def rounding(self) -> bool:
        """Whether rounding explains it all: the same prompts, and the same policy as far as tokens agree."""
        return self._within(self.tolerance)

    @property
    def undecided(self) -> bool:
        """Whether it is more than rounding, and no more than optimizer steps may have made of it."""
        return not self.rounding and self.iteration > 0 and self._within(AMPLIFIED * self.tolerance)

    def _within(self, allowed: float) -> bool:
        return self.missing == 0 and self.samples > 0 and self.largest <= allowed


def tolerance(config: TrainConfig) -> float:
    """Of the coarser of the trainer's and the engine's parameter types."""
    types = [config.model.dtype]
    if config.engine.kind == "vllm" and config.engine.vllm.dtype != "model":
        types.append(config.engine.vllm.dtype)  # type: ignore[arg-type]
    return max(TOLERANCES[one] for one in types)


def agreement(first: ObjectStore, second: ObjectStore, iteration: int, allowed: float) -> Agreement | None:
    """Compare the kept samples of one iteration; None when one of the two has kept none."""
    ours, theirs = _sampled(first, iteration), _sampled(second, iteration)
    if ours is None or theirs is None:
        return None
    both = ours.keys() & theirs.keys()
    differing, largest = 0, 0.0
    for key in both:
        same, apart = _compare(ours[key], theirs[key])
        differing += not same
        largest = max(largest, apart)
    return Agreement(iteration, len(both), differing, len(ours.keys() ^ theirs.keys()), largest, allowed)


def _compare(ours: Sampled, theirs: Sampled) -> tuple[bool, float]:
    """Whether all tokens are the same, and how far log-probabilities are apart until they are not."""
    length = min(len(ours[0]), len(theirs[0]))
    unequal = np.flatnonzero(ours[0][:length] != theirs[0][:length])
    common = int(unequal[0]) if len(unequal) else length
    apart = np.abs(ours[1][:common] - theirs[1][:common])
    same = not len(unequal) and len(ours[0]) == len(theirs[0])
    return same, float(apart.max()) if common else 0.0


def _sampled(store: ObjectStore, iteration: int) -> dict[tuple[str, int], Sampled] | None:
    """Tokens and log-probabilities by group and sample."""
    found = store.find(f"rollouts/{version_name(iteration)}.parquet")
    if found is None:
        return None
    columns = ["group_id", "sample_index", "token_ids", "logprobs"]
    return {
        (row["group_id"], row["sample_index"]): (np.asarray(row["token_ids"]), np.asarray(row["logprobs"]))
        for row in pq.read_table(io.BytesIO(found), columns=columns).to_pylist()
    }
