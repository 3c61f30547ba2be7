"""Built-in rewards on plain text: correctness in strict and lenient form, and shaping towards the strict one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

# A minus right behind a digit, letter or bracket is an operator: the last number of "8-4" is 4, that of "= -4" is -4.
_NUMBER = re.compile(r"(?:(?<![\w)])[-+])?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?:(?<![\w)])[-+])?\.\d+")
_INTEGER = re.compile(r"[-+]?\d+")


def last_number(text: str) -> Fraction | None:
    """The last number of a text as an exact fraction: thousands separators, a decimal point and a sign are read."""
    numbers = _NUMBER.findall(text.replace("\N{MINUS SIGN}", "-"))
    return Fraction(numbers[-1].replace(",", "")) if numbers else None


def _gold_number(answer: str) -> Fraction:
    number = last_number(answer)
    if number is None:
        raise ValueError(f"the gold answer {answer!r} is not a number; use the reward exact or math")
    return number


def exact(response: str, answer: str, *, metadata: Mapping[str, Any]) -> float:
    """1 when the whole response, stripped of outer white space, equals the answer; else 0."""
    return float(response.strip() == answer.strip())


def number(response: str, answer: str, *, metadata: Mapping[str, Any]) -> float:
    """1 when the last number of the response equals the answer, whatever stands around it; else 0.

    Raises:
        ValueError: when the answer is not a number.
    """
    return float(last_number(response) == _gold_number(answer))


def concise(response: str, answer: str, *, metadata: Mapping[str, Any]) -> float:
    """The answer's share of the response's characters when the last number is right; else 0.

    Shaping from the lenient ``number`` to the strict ``exact``: 1 for the bare answer, less for every word around it,
    and nothing for a wrong answer, however well formed, so that a policy cannot live on form alone.

    Raises:
        ValueError: when the answer is not a number.
    """
    if last_number(response) != _gold_number(answer):
        return 0.0
    return min(1.0, len(answer.strip()) / len(response.strip()))


def closeness(response: str, answer: str, *, metadata: Mapping[str, Any], scale: float = 10.0) -> float:
    """Graded distance of the response's last number d = |number - answer|: max(0, 1 - d / scale); 0 without a number.

    Shaping for tasks whose answers are rarely met by chance: it tells near misses within a group apart.

    Raises:
        ValueError: when the answer is not a number or ``scale`` is not positive.
    """
    if scale <= 0:
        raise ValueError(f"scale={scale} must be positive")
    gold, found = _gold_number(answer), last_number(response)
    return 0.0 if found is None else max(0.0, 1.0 - float(abs(found - gold)) / scale)


def integer_only(response: str, answer: str, *, metadata: Mapping[str, Any]) -> float:
    """1 when the response, stripped, is an integer and nothing else, right or wrong; else 0.

    A bonus for form. Keep its weight below that of correctness: alone it is maximal for one constant number.
    """
    return float(_INTEGER.fullmatch(response.strip()) is not None)
