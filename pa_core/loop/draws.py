"""Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): how many prompts an iteration draws, and when another one.

An iteration trains on the first N informative groups in the order of the prompt stream. N prompts go out; each group
that turns out uninformative draws exactly one more, at once and for the same policy version. So at any moment

    prompts drawn = min(N + uninformative groups found, max_draws x N),

and every prompt drawn is waited for. Two things follow.

- *Order does not matter.* Let D be the length of the shortest stretch of the stream with N informative groups. It has
  D - N uninformative ones, so no order of arrival draws more than D prompts; and fewer than D have fewer than N
  informative groups, so one more is due. Exactly these D prompts are drawn, on every schedule and after every resume.
- *Nothing is sampled in surplus, nothing is dropped for being slow.* A group either trains or was uninformative.
  Sampling more prompts than needed and taking the first N to finish would favour short responses instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from pa_core.config import TrainConfig
from pa_core.data.stream import PromptStream
from pa_core.objective.advantages import group_advantages
from pa_core.objective.conventions import AdvantageConvention
from pa_core.records import Group, Prompt

# Whether a group's advantages are all 0 is the same by every convention.
_ANY_CONVENTION = AdvantageConvention("none", 0.0)


def informative(group: Group) -> bool:
    """Whether the group has an advantage other than 0: two scored samples at least, and not all scored alike.

    Judged by the rewards as scored; a KL penalty that the objective takes from them is the trainer's and plays no part.
    """
    rewards = [math.nan if sample.reward is None else sample.reward for sample in group.samples]
    found = group_advantages(torch.tensor(rewards), _ANY_CONVENTION)
    return found.trainable and not found.zero_variance


@dataclass(frozen=True)
class Quota:
    """What an iteration asks for.

    Attributes:
        groups: N, groups to train on.
        draws: prompts that may be drawn for them, N without dynamic sampling.
        dynamic: whether only informative groups count towards N; otherwise all do.
    """

    groups: int
    draws: int
    dynamic: bool

    @classmethod
    def of(cls, config: TrainConfig) -> Quota:
        """The quota of every iteration of a run."""
        return cls(config.prompts_per_iteration, config.max_draws, config.sampling.dynamic is not None)

    def counts(self, group: Group) -> bool:
        """Whether the group is one of the N, given that there is room."""
        return not self.dynamic or informative(group)


class Draws:
    """The prompts of one iteration, taken from the stream. Used by one thread at a time.

    Attributes:
        prompts: the first N.
    """

    def __init__(self, stream: PromptStream, quota: Quota) -> None:
        self._stream = stream
        self._quota = quota
        self._drawn = quota.groups
        self.prompts = stream.take(quota.groups)

    def replacement(self, group: Group) -> Prompt | None:
        """The prompt to draw because of ``group``, which must be stored before; None when it counts, or at the limit.

        Call it once for each group of the iteration. Since a prompt is drawn only for a stored group, a resumed run
        that repeats this for the groups it finds asks for every group that was ever stored, and for no other.
        """
        if self._drawn == self._quota.draws or self._quota.counts(group):
            return None
        self._drawn += 1
        return self._stream.take(1)[0]

    def missing(self, restore: Callable[[Sequence[str]], Sequence[Group]]) -> list[Prompt]:
        """The prompts that need generation; those before them in the stream may be stored, uninformative ones too.

        Args:
            restore: takes over the stored ones of some group ids and returns them.
        """
        missing: list[Prompt] = []
        asked = self.prompts
        while asked:
            stored = {group.id: group for group in restore([prompt.id for prompt in asked])}
            missing += [prompt for prompt in asked if prompt.id not in stored]
            replacements = [self.replacement(group) for group in stored.values()]
            asked = [prompt for prompt in replacements if prompt is not None]
        return missing
