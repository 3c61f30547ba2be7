"""What a comparison shows, in words: what was equal, what was not, and what the times say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pa_core.store.objects import ObjectStore
from pa_core.study.children import Outcome
from pa_core.study.history import History, Series
from pa_core.study.rounding import Agreement, agreement, tolerance
from pa_core.tracking.description import flatten

Equality = Literal["bitwise", "rounding", "unproven", "different", "incomparable"]
HEADLINES: dict[Equality, str] = {
    "bitwise": "equal, bit for bit",
    "rounding": "equal up to rounding",
    "unproven": "not shown to be equal",
    "different": "NOT equal",
    "incomparable": "not comparable",
}
HOW = (
    *("schedule.", "engine.", "trainer.", "parallel.", "store.", "checkpoint.", "tracking.", "evaluation.", "scoring."),
    *("deterministic", "model.attention", "metrics."),
)
"""Keys that change how, and how fast, the same training is computed; any other key makes it another training."""

PLACES = ("run_name", "store.url")
FEW_ITERATIONS = 5
SAME_WORK = 0.02
"""Token counts that differ by less than this share are the same work as far as times are concerned."""


@dataclass(frozen=True)
class Finished:
    """A finished run with all that is said about it."""

    outcome: Outcome
    history: History
    store: ObjectStore

    @property
    def name(self) -> str:
        """The run's name in the comparison."""
        return self.outcome.name

    def number(self, key: str) -> float:
        """A figure of the summary."""
        return float(self.outcome.summary[key])


@dataclass(frozen=True)
class Verdict:
    """What one run is against the baseline.

    Attributes:
        equality: of what was trained. sentences: that, and the speed, in words.
        speed_up: wall time of the baseline over that of the run; None where it means nothing.
        bound: largest speed-up that the baseline's times allow; None unless the baseline is synchronous.
    """

    name: str
    baseline: str
    equality: Equality
    sentences: tuple[str, ...]
    speed_up: float | None = None
    bound: float | None = None

    @property
    def headline(self) -> str:
        """In one line."""
        return f"{self.name} against {self.baseline}: {HEADLINES[self.equality]}"


@dataclass
class Comparison:
    """Two runs beside each other."""

    base: Finished
    other: Finished
    differing: Mapping[str, tuple[str, str]] = field(init=False)

    def __post_init__(self) -> None:
        self.differing = differing_settings(self.base.outcome, self.other.outcome)

    @property
    def names(self) -> str:
        """Both, for sentences."""
        return f"{self.base.name} and {self.other.name}"


def differing_settings(first: Outcome, second: Outcome) -> dict[str, tuple[str, str]]:
    """Keys in which two configs differ, their names and places aside, with both values."""
    one, two = (flatten(run.child.config.model_dump(mode="json")) for run in (first, second))
    return {
        key: (one.get(key, "not set"), two.get(key, "not set"))
        for key in dict.fromkeys([*one, *two])
        if key not in PLACES and one.get(key) != two.get(key)
    }


def choose_baseline(outcomes: Sequence[Outcome]) -> Outcome | None:
    """What the others are measured against: the first synchronous run that finished, else the first that did."""
    finished = [outcome for outcome in outcomes if outcome.state == "finished"]
    return next((one for one in finished if not one.child.config.schedule.stream), next(iter(finished), None))


def judge(base: Finished, other: Finished) -> Verdict:
    """What ``other`` is against ``base``."""
    pair = Comparison(base, other)
    settings = _settings(pair)
    equality, sentences = _equality(pair)
    speed_up, bound, speed = _speed(pair, comparable=equality != "incomparable")
    accuracy = _accuracy(pair)
    told = (settings, *sentences, *accuracy, *speed)
    return Verdict(other.name, base.name, equality, told, speed_up, bound)


def unfinished(outcome: Outcome, baseline: str) -> Verdict:
    """What is said of a run that has no result."""
    why = outcome.error.strip().splitlines() or ["no reason is known"]
    sentence = f"{outcome.name} {outcome.state}, so that nothing can be said about it: {why[0]}"
    return Verdict(outcome.name, baseline, "incomparable", (sentence,))


def _settings(pair: Comparison) -> str:
    if not pair.differing:
        return "All settings were the same."
    told = [f"`{key}` ({first} and {second})" for key, (first, second) in pair.differing.items()]
    more = f", and {len(told) - 8} more" if len(told) > 8 else ""
    return f"Settings that differed between {pair.names}: {', '.join(told[:8])}{more}; all others were the same."


def _other_training(pair: Comparison) -> list[str]:
    """Why the two are not the same training, in words; empty when they are."""
    keys = [key for key in pair.differing if not key.startswith(HOW)]
    prints = [one.outcome.facts.get("fingerprints", {}) for one in (pair.base, pair.other)]
    changed = [name for name in ("data", "model") if prints[0].get(name) != prints[1].get(name)]
    reasons = [f"`{key}` differed" for key in keys[:5]]
    for name in changed:
        if not any(key.startswith(f"{name}.") for key in keys):
            reasons.append(f"the {name} itself differed (its fingerprint), although its settings were the same")
    return reasons


def _equality(pair: Comparison) -> tuple[Equality, list[str]]:
    """Whether both trained the same, and how that is known."""
    if reasons := _other_training(pair):
        return "incomparable", [
            f"They are not the same training: {'; '.join(reasons)}. Different rewards and weights are expected, and "
            "say nothing about the schedule."
        ]
    digests = [one.outcome.summary.get("weights_sha256") for one in (pair.base, pair.other)]
    first = first_difference(pair.base.history, pair.other.history)
    count = len(pair.base.history.reward)
    if digests[0] == digests[1] and digests[0] is not None:
        return _same_weights(pair, str(digests[0]), first, count)
    found = _look_into(pair, first)
    if all(one.outcome.child.config.deterministic for one in (pair.base, pair.other)):
        return _broken_promise(pair, first, found)
    return _different_weights(pair, first, count, found)


def first_difference(one: History, other: History) -> int | None:
    """The first iteration with another reward or number of tokens, or that only one of them has; None: all same."""

    def differs(first: Series, second: Series, at: int) -> bool:
        return first.get(at) != second.get(at)

    iterations = sorted({*one.reward, *other.reward, *one.tokens, *other.tokens})
    return next(
        (at for at in iterations if differs(one.reward, other.reward, at) or differs(one.tokens, other.tokens, at)),
        None,
    )


def _look_into(pair: Comparison, first: int | None) -> Agreement | None:
    """The samples of the iteration that differs first; of the last one when none does."""
    iterations = sorted(pair.base.history.reward)
    if not iterations:
        return None
    allowed = max(tolerance(one.outcome.child.config) for one in (pair.base, pair.other))
    return agreement(pair.base.store, pair.other.store, iterations[-1] if first is None else first, allowed)


def _same_weights(pair: Comparison, digest: str, first: int | None, count: int) -> tuple[Equality, list[str]]:
    gradients = pair.base.history.gradient.values()
    if gradients and not any(gradients):
        return "unproven", [
            "Both end in the same bytes, which proves nothing: no iteration moved any weight, because all samples of "
            "each group earned the same. Train longer, or with a reward that tells samples apart."
        ]
    weights = f"the final weights are the same bytes (sha256 {digest[:12]}…)"
    if first is not None:
        return "different", [f"Although {weights}, reward or tokens differ from iteration {first} on."]
    return "bitwise", [
        f"Equal, bit for bit: {weights}, and the mean reward and the number of tokens are the same in each of the "
        f"{count} iterations."
    ]


def _broken_promise(pair: Comparison, first: int | None, found: Agreement | None) -> tuple[Equality, list[str]]:
    where = "in the last digits of the weights only" if first is None else f"from iteration {first} on"
    promise = "`deterministic: true` promises the same bytes on the same machine with the same threads"
    if any(one.outcome.child.config.engine.kind == "vllm" for one in (pair.base, pair.other)):
        promise = "`deterministic: true` promises the same bytes from the same rollouts, and vLLM does not repeat its"
    return "different", [f"NOT equal: they differ {where}. {promise}.", *_samples(found)]


def _different_weights(
    pair: Comparison, first: int | None, count: int, found: Agreement | None
) -> tuple[Equality, list[str]]:
    proof = "`deterministic: true` makes them equal bit for bit; `pa verify` measures the difference of the weights."
    if first is None:
        same = f"The mean reward and the number of tokens are the same in each of the {count} iterations"
        if found is None:
            return "unproven", [f"{same}; the weights are not the same bytes, and no rollouts are left to look into."]
        if found.rounding and not found.differing:
            return "rounding", [
                f"Equal up to rounding: {same[0].lower()}{same[1:]}, and the same tokens were sampled in the last. The "
                f"weights are not the same bytes, because sums in another order are rounded otherwise. {proof}",
                *_samples(found),
            ]
        return "different", [f"NOT equal: {same[0].lower()}{same[1:]}, but not what was sampled.", *_samples(found)]
    before = "From the first iteration on" if first == 0 else f"The same until iteration {first - 1}; from {first} on"
    if found is None:
        return "unproven", [f"{before} reward or tokens differ, and no rollouts are left to tell rounding from more."]
    if found.rounding:
        return "rounding", [
            f"{before} reward or tokens differ, and rounding explains it: it made another token be drawn, and from "
            f"there the two are different draws of the same experiment. {proof}",
            *_samples(found),
        ]
    if found.undecided:
        return "unproven", [
            f"{before} reward or tokens differ, by more than rounding itself, though no more than AdamW may have made "
            f"of it: it moves weights whose gradient is next to zero by that gradient's sign. {proof}",
            *_samples(found),
        ]
    return "different", [f"NOT equal: {before[0].lower()}{before[1:]} they differ by more than rounding explains.",
                         *_samples(found)]  # fmt: skip


def _samples(found: Agreement | None) -> list[str]:
    if found is None:
        return []
    only_one = f" {found.missing} samples are of one of them only." if found.missing else ""
    return [
        f"In iteration {found.iteration}, {found.differing} of {found.samples} samples have another token somewhere; "
        f"up to there log-probabilities agree within {found.largest:.1e} nats (rounding explains {found.tolerance:g})."
        + only_one
    ]


def _accuracy(pair: Comparison) -> list[str]:
    ours, theirs = (_last(one.history.accuracy) for one in (pair.base, pair.other))
    if ours is None or theirs is None:
        return []
    apart = abs(ours - theirs)
    half = sum((_last(one.history.accuracy_ci95) or 0.0) ** 2 for one in (pair.base, pair.other)) ** 0.5
    told = f"Held-out accuracy: {ours:.3f} and {theirs:.3f}"
    if apart == 0:
        return [f"{told}, the same."]
    within = "within" if apart <= half else "more than"
    return [f"{told}; the difference of {apart:.3f} is {within} what {half:.3f} of chance explains at 95 %."]


def _last(series: Series) -> float | None:
    return series[max(series)] if series else None


def _speed(pair: Comparison, comparable: bool) -> tuple[float | None, float | None, list[str]]:
    """Speed-up, bound, and what they say."""
    base, other = pair.base, pair.other
    walls = base.number("wall"), other.number("wall")
    if not comparable or not all(walls):
        return None, None, ["No speed-up is given: their wall times are those of different work."]
    speed_up = walls[0] / walls[1]
    told = [
        f"{other.name} took {walls[1]:.1f} s of iterations, {base.name} {walls[0]:.1f} s: {speed_up:.2f} times as fast."
    ]
    bound = None if base.outcome.child.config.schedule.stream else base.number("bound")
    if bound is not None and other.outcome.child.config.schedule.stream:
        told.append(_against_bound(base.name, speed_up, bound))
    tokens = base.number("tokens"), other.number("tokens")
    if abs(tokens[0] - tokens[1]) > SAME_WORK * max(tokens):
        rate = other.number("tokens_per_s") / (base.number("tokens_per_s") or 1.0)
        told.append(
            f"Their work was not the same: {tokens[0]:,.0f} and {tokens[1]:,.0f} tokens. Per token it was {rate:.2f} "
            "times as fast."
        )
    if other.number("iterations") < FEW_ITERATIONS:
        told.append(f"{other.number('iterations'):.0f} iterations are few: start-up effects weigh on these times.")
    return speed_up, bound, told


def _against_bound(base: str, speed_up: float, bound: float) -> str:
    if speed_up > bound * 1.005:
        return (
            f"That is more than the {bound:.2f} that the times of {base} allow by overlap alone: something else "
            "differed too, such as the load of the machine."
        )
    return f"The times of {base} allow at most {bound:.2f} by overlap (the bound): {speed_up / bound:.0%} of it."
