"""What an update reports besides its loss: sums that add over micro-batches, in any order."""

from __future__ import annotations

from dataclasses import dataclass, fields

_MEANS = ("surrogate", "kl", "entropy", "ratio", "clipped", "mismatch", "weight", "corrected")


@dataclass
class MetricSums:
    """Sums over tokens (and one maximum), to be added over micro-batches and divided by ``tokens`` at the end.

    Attributes:
        tokens: trained tokens. samples: samples.
        surrogate: of the policy-gradient term. kl: of the KL estimate against the reference. entropy: in nats.
        ratio: of policy / old policy, of the token or the sequence as the loss has it.
        clipped: tokens on which clipping acts.
        mismatch: of |log-probability of the old policy here - that of the engine|, in nats.
        weight: of the importance correction's bounded weight, 1 without one.
        corrected: tokens whose weight was truncated or masked.
        mismatch_max: largest mismatch.
    """

    tokens: float = 0.0
    samples: float = 0.0
    surrogate: float = 0.0
    kl: float = 0.0
    entropy: float = 0.0
    ratio: float = 0.0
    clipped: float = 0.0
    mismatch: float = 0.0
    weight: float = 0.0
    corrected: float = 0.0
    mismatch_max: float = 0.0

    def add(self, other: MetricSums) -> None:
        """Take in another micro-batch."""
        for item in fields(self):
            mine, theirs = getattr(self, item.name), getattr(other, item.name)
            setattr(self, item.name, max(mine, theirs) if item.name == "mismatch_max" else mine + theirs)

    def means(self) -> dict[str, float]:
        """Per-token means (0 without tokens); ``mismatch_max`` as it is."""
        count = max(self.tokens, 1.0)
        return {name: getattr(self, name) / count for name in _MEANS} | {"mismatch_max": self.mismatch_max}
