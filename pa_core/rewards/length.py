"""The length penalty: it needs no text, only how many tokens the response has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def overlong(response: str, answer: str, *, metadata: Mapping[str, Any], max_tokens: int, buffer: int) -> float:
    """0 up to ``max_tokens - buffer`` tokens, then falling linearly to -1 at ``max_tokens``, and -1 beyond.

    Soft overlong punishment of DAPO, arXiv 2503.14476, eq. 13, to be added to a correctness reward. There
    ``max_tokens`` was 20480 and ``buffer`` 4096.

    Args:
        max_tokens: L_max, usually ``sampling.max_tokens``. buffer: L_cache, the tokens over which the penalty grows.

    Raises:
        ValueError: unless 0 < buffer <= max_tokens.
    """
    if not 0 < buffer <= max_tokens:
        raise ValueError(f"buffer={buffer} must be above 0 and at most max_tokens={max_tokens}")
    excess = int(metadata["response_tokens"]) - (max_tokens - buffer)
    return max(-1.0, min(0.0, -excess / buffer))
