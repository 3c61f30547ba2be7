"""The answer that a response gives, in a form in which equal answers are equal text: what a majority vote counts."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction

from pa_core.config import TrainConfig
from pa_core.errors import ConfigError
from pa_core.rewards.text import last_number

Extractor = Callable[[str], str | None]
"""From a response to its answer; None where it gives none."""

_NUMERIC = frozenset({"number", "concise", "closeness"})
_FRACTION = re.compile(r"(-?)\\[dt]?frac\{(\d+)\}\{(\d+)\}")
_PLAIN_NUMBER = re.compile(r"[-+]?(\d+|\d{1,3}(,\d{3})+)(\.\d+)?(/[1-9]\d*)?")
_DECORATION = re.compile(r"\\[,;!: ]|\\left|\\right|\\\(|\\\)|\$|\s+|\.$")


def answer_extractor(config: TrainConfig) -> Extractor:
    """How the answer is read out of a response.

    By ``evaluation.answer_pattern`` where it is set: the first group of its last match. Otherwise by what the
    evaluation metric looks at: for ``math`` the last ``\\boxed{…}``, else the last number; for ``number``, ``concise``
    and ``closeness`` the last number; for every other metric the whole response, white space apart. Numbers are
    compared by value (``1,000`` and ``1000.0`` are one answer), everything else as text.

    Raises:
        ConfigError: the pattern is no regular expression or has no group.
    """
    pattern = config.evaluation.answer_pattern
    if pattern is not None:
        return _by_pattern(pattern)
    reward = next(reward for reward in config.rewards if reward.name == config.evaluation_metric)
    if reward.function is None and reward.name == "math":
        return _mathematical
    if reward.function is None and reward.name in _NUMERIC:
        return _last_number
    return lambda response: " ".join(response.split()) or None


def _by_pattern(pattern: str) -> Extractor:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"evaluation.answer_pattern={pattern!r} is not a regular expression: {error}") from None
    if compiled.groups < 1:
        raise ConfigError(
            f"evaluation.answer_pattern={pattern!r} has no group; put the part that is the answer in parentheses"
        )

    def extract(response: str) -> str | None:
        found = list(compiled.finditer(response))
        return _canonical(found[-1].group(1) or "") if found else None

    return extract


def _last_number(response: str) -> str | None:
    number = last_number(response)
    return None if number is None else str(number)


def _mathematical(response: str) -> str | None:
    boxed = _last_boxed(response)
    return _last_number(response) if boxed is None else _canonical(boxed)


def _last_boxed(response: str) -> str | None:
    """The content of the last complete ``\\boxed{…}``, its braces balanced."""
    for start in reversed([match.end() for match in re.finditer(r"\\f?boxed\{", response)]):
        depth = 1
        for end in range(start, len(response)):
            depth += {"{": 1, "}": -1}.get(response[end], 0)
            if depth == 0:
                return response[start:end]
    return None


def _canonical(answer: str) -> str | None:
    """Numbers by value, the rest without what only typesets it."""
    text = _DECORATION.sub("", _FRACTION.sub(r"\1\2/\3", answer.strip()))
    if _PLAIN_NUMBER.fullmatch(text):
        whole, _, divisor = text.replace(",", "").partition("/")
        return str(Fraction(whole) / Fraction(divisor or 1))
    return text or None
