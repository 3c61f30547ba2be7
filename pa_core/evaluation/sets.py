"""Named sets of problems: how the rows of each are read and asked. The rows themselves are the user's to point to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

SetName = Literal["gsm8k", "aime24", "mawps"]

BOXED = "{prompt}\n\nReason step by step, and put your final answer within \\boxed{}."


@dataclass(frozen=True)
class NamedSet:
    """How to read one.

    Attributes:
        data: keys of ``data`` that the usual files of the set need.
        max_tokens: room for a response of a model that is not a run's own.
        example: where the set may be found, in the words of an override.
    """

    data: dict[str, Any]
    max_tokens: int
    example: str
    rewards: list[dict[str, Any]] = field(default_factory=lambda: [{"name": "math"}])


NAMED_SETS: dict[str, NamedSet] = {
    "gsm8k": NamedSet(
        {"prompt_column": "question", "answer_column": "answer", "answer_pattern": r"####\s*(.+)"},
        max_tokens=512,
        example="data.path=openai/gsm8k 'data.options={name: main}' data.split=test",
    ),
    "aime24": NamedSet(
        {"prompt_column": "problem", "answer_column": "answer"},
        max_tokens=8192,
        example="data.path=HuggingFaceH4/aime_2024",
    ),
    "mawps": NamedSet(
        {"prompt_column": "input", "answer_column": "target"},
        max_tokens=256,
        example="data.path=mawps/addsub.jsonl",
    ),
}
"""Columns as the sets are usually published; ``data.prompt_column`` and the like override them."""
