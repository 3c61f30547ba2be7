"""Rewards for small arithmetic: the response is to be the equation, ``3 + 4 = 7``, and nothing else.

``equation`` is the strict one. The other three are its parts, each true of every strict response, so shaping with them
leaves the optimum where it is; they tell apart what a group of all-wrong responses would hide. ``result`` must weigh
more than form (``restates``, ``stops``) costs, or a policy could live on form alone.

All need ``expression`` in the problem's metadata, as reasoning-gym's ``basic_arithmetic`` and ``chain_sum`` have it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_RESULT = re.compile(r" (-?\d+)(?![\d.])")


def _behind_equals(response: str, metadata: Mapping[str, Any]) -> str | None:
    """What follows ``expression =`` at the response's beginning; None when it does not begin so.

    Raises:
        ValueError: when the problem has no expression.
    """
    if "expression" not in metadata:
        raise ValueError("the problem's metadata has no 'expression'; this reward is for reasoning-gym arithmetic")
    head = f"{metadata['expression']} ="
    text = response.strip()
    return text.removeprefix(head) if text.startswith(head) else None


def equation(response: str, answer: str, *, metadata: Mapping[str, Any]) -> float:
    """1 when the whole response, stripped of outer white space, is ``expression = answer``; else 0."""
    return float(_behind_equals(response, metadata) == f" {answer}")


def restates(response: str, answer: str, *, metadata: Mapping[str, Any]) -> float:
    """1 when the response begins by restating the problem as ``expression =``, whatever follows; else 0."""
    return float(_behind_equals(response, metadata) is not None)


def result(response: str, answer: str, *, metadata: Mapping[str, Any]) -> float:
    """1 when ``expression =`` is followed by the right integer, whatever comes after it; else 0."""
    match = _RESULT.match(_behind_equals(response, metadata) or "")
    return float(match is not None and match[1] == answer)


def stops(response: str, answer: str, *, metadata: Mapping[str, Any]) -> float:
    """1 when ``expression =`` is followed by one integer, right or wrong, and by nothing else; else 0."""
    return float(_RESULT.fullmatch(_behind_equals(response, metadata) or "") is not None)
