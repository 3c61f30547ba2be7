"""The endless prompt stream: epoch after epoch, each shuffled by (seed, epoch), resumable at any position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pa_core.data.prompts import fingerprint
from pa_core.errors import DataError
from pa_core.records import Prompt


class PromptStream:
    """Position ``i`` of the stream is a pure function of (prompts, seed, shuffle): resuming is setting a number.

    Args:
        prompts: the distinct problems of one epoch.
        seed: seeds the order of every epoch.
        shuffle: off keeps the order of ``prompts``.
    """

    def __init__(self, prompts: Sequence[Prompt], seed: int, shuffle: bool = True) -> None:
        if not prompts:
            raise DataError("there are no prompts to train on")
        self._prompts = list(prompts)
        self._seed = seed
        self._shuffle = shuffle
        self._fingerprint = fingerprint((prompt.text, prompt.answer) for prompt in self._prompts)
        self._position = 0
        self._order: tuple[int, NDArray[np.int64]] = (-1, np.empty(0, dtype=np.int64))

    @property
    def epoch(self) -> float:
        """Epochs taken so far; a fraction inside an epoch."""
        return self._position / len(self._prompts)

    def take(self, count: int) -> list[Prompt]:
        """The next ``count`` prompts; ids and indices name the position in the stream and never repeat."""
        start, self._position = self._position, self._position + count
        return [self._at(index) for index in range(start, self._position)]

    def _at(self, index: int) -> Prompt:
        epoch, offset = divmod(index, len(self._prompts))
        if self._order[0] != epoch:
            self._order = (epoch, self._epoch_order(epoch))
        prompt = self._prompts[int(self._order[1][offset])]
        return replace(prompt, id=f"p{index:08d}", index=index)

    def _epoch_order(self, epoch: int) -> NDArray[np.int64]:
        if not self._shuffle:
            return np.arange(len(self._prompts))
        return np.random.default_rng([self._seed, epoch]).permutation(len(self._prompts))

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: the position, and what must be equal for it to mean the same."""
        return {
            "position": self._position,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "fingerprint": self._fingerprint,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state`` was taken.

        Raises:
            DataError: when seed, shuffling or data differ from those of the state: the order would be another one.
        """
        mine = self.state()
        for key, field in (("seed", "seed"), ("shuffle", "data.shuffle"), ("fingerprint", "data")):
            if state[key] != mine[key]:
                raise DataError(
                    f"{field} changed since the checkpoint ({state[key]} then, {mine[key]} now), so prompts would be "
                    "repeated or left out; resume with the same configuration and data, or start a new run"
                )
        self._position = int(state["position"])
