"""The ``math`` reward: mathematical equality by math-verify. Imported in reward workers only."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from math_verify import parse, verify

# math-verify's own time-outs use SIGALRM; here the worker pool ends a call that takes too long, so they are switched
# off, and the library's warning about that says nothing new.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def math(response: str, answer: str, *, metadata: Mapping[str, Any]) -> float:
    """1 when the response's final expression (boxed, in LaTeX, or plain) equals the answer mathematically; else 0.

    A response without any expression is wrong. An answer without one is an error of the data set, not of the policy.

    Raises:
        ValueError: when the gold answer cannot be parsed.
    """
    found = parse(response, parsing_timeout=None)
    return float(verify(_parse_gold(answer), found, timeout_seconds=None))


@lru_cache(maxsize=256)  # the samples of a group share their answer
def _parse_gold(answer: str) -> list[Any]:
    # Outside of a LaTeX environment only plain numbers are read; "x^2+1" and "(1,2)" need one.
    text = answer if "$" in answer or "\\boxed" in answer else f"\\boxed{{{answer}}}"
    gold: list[Any] = parse(text, parsing_timeout=None, raise_on_error=True)
    if not gold:
        raise ValueError(f"the gold answer {answer!r} cannot be parsed as mathematics; use the reward exact")
    return gold
