"""Gold answers of any JSON type as canonical text."""

from __future__ import annotations

import json
import math
import re
from decimal import Decimal
from typing import Any

from pa_core.errors import DataError


def canonical_answer(value: Any) -> str:
    """The text that rewards compare with: ``14.0`` and ``"14 "`` are ``"14"``, a list is compact JSON.

    Raises:
        ValueError: when there is no answer (null, NaN, infinite or empty); the message completes "answer is …".
    """
    if value is None:
        raise ValueError("null")
    if isinstance(value, str):
        text = value.strip()
        if not text:
            raise ValueError("empty")
        return text
    if isinstance(value, float | Decimal):
        if not math.isfinite(value):
            raise ValueError(f"{value}, not a finite number")
        return str(int(value)) if value == int(value) else str(value)
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str)


class AnswerExtractor:
    """Takes the gold answer out of an answer column.

    Args:
        pattern: regular expression whose first group is the answer, or None for the whole value.

    Raises:
        DataError: when the pattern is no regular expression or has no group.
    """

    def __init__(self, pattern: str | None) -> None:
        self._pattern: re.Pattern[str] | None = None
        if pattern is None:
            return
        try:
            self._pattern = re.compile(pattern)
        except re.error as error:
            raise DataError(f"data.answer_pattern={pattern!r} is not a regular expression: {error}") from None
        if self._pattern.groups < 1:
            raise DataError(
                f"data.answer_pattern={pattern!r} has no group; put the part that is the answer in parentheses"
            )

    def __call__(self, value: Any) -> str:
        """The canonical answer. Raises :class:`ValueError` that completes the sentence "answer is …"."""
        text = canonical_answer(value)
        if self._pattern is None:
            return text
        match = self._pattern.search(text)
        if match is None:
            shown = text if len(text) <= 80 else f"…{text[-80:]}"
            raise ValueError(f"{shown!r}, which data.answer_pattern={self._pattern.pattern!r} does not match")
        return canonical_answer(match.group(1))
