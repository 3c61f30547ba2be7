"""What tests with servers share: waiting for something to become so."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any


def wait_for(what: str, check: Callable[[], Any], timeout_s: float, *ignored: type[Exception]) -> Any:
    """The first truthy answer of ``check``; one that raises ``ignored`` has not answered yet."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with suppress(*ignored):
            if answer := check():
                return answer
        time.sleep(0.2)
    raise AssertionError(f"{what}: not within {timeout_s:.0f} s")
