"""The ``reasoning_gym`` reward: the task's own scorer. Imported in reward workers only."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import reasoning_gym as gym
from reasoning_gym.utils import extract_answer


@lru_cache(maxsize=8)
def _dataset(name: str, options: str) -> Any:
    return gym.create_dataset(name, **{"seed": 0, **json.loads(options)})


def reasoning_gym(response: str, answer: str, *, metadata: Mapping[str, Any], tag: str | None = None) -> float:
    """The score in [0, 1] that the problem's reasoning-gym task gives to the stripped response.

    Args:
        tag: score only the text inside the last ``<tag>…</tag>`` of the response; a response without it scores 0.

    Raises:
        ValueError: when the problem does not come from reasoning-gym (``data.name``).
    """
    task = metadata.get("reasoning_gym")
    if task is None:
        raise ValueError(
            "the problem is not a reasoning-gym task; set data.name, or use the reward exact, number or math"
        )
    found = extract_answer(response, tag_name=tag) if tag else response
    if found is None:
        return 0.0
    known = {key: value for key, value in metadata.items() if key != "reasoning_gym"}
    entry = {"question": task["question"], "answer": answer or None, "metadata": known}
    return float(_dataset(task["name"], json.dumps(task["options"])).score_answer(found.strip(), entry))
