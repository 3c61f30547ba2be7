"""What runs inside a reward worker process. Imports neither torch nor anything that does."""

from __future__ import annotations

import fcntl
import math
import multiprocessing
import numbers
import os
import signal
import threading
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any, Literal

from pa_core.config import RewardConfig
from pa_core.errors import RewardError
from pa_core.rewards.registry import Reward, load_reward

Cause = Literal["error", "timeout", "none", "nan"]


@dataclass(frozen=True)
class Outcome:
    """A finite value, or the cause why there is none with a message for people."""

    value: float | None = None
    cause: Cause | None = None
    message: str = ""


_rewards: dict[str, Reward] = {}
_load_errors: list[str] = []


def initialize(rewards: Sequence[RewardConfig]) -> None:
    """Prepare this process: bind its life to the parent's and load every reward, so that no call pays for imports."""
    _exit_with_parent()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # ends code that never returns to the interpreter, too
    os.dup2(2, 1)  # what a reward prints must not mix with the program's own output
    for config in rewards:
        try:
            _rewards[config.name] = load_reward(config)
        except RewardError as error:
            _load_errors.append(str(error))


def _exit_with_parent() -> None:
    """End this process when the parent is gone, even in the middle of a reward that hangs.

    The end of the parent closes a pipe. A thread sees that while the interpreter runs; the kernel's SIGIO, whose
    default action ends a process, works even while a C function (a backtracking regular expression) holds the GIL.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    sentinel = parent.sentinel

    def watch() -> None:
        wait([sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="parent-guard", daemon=True).start()
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(sentinel, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(sentinel, fcntl.F_SETFL, fcntl.fcntl(sentinel, fcntl.F_GETFL) | os.O_ASYNC)


def load_errors() -> list[str]:
    """Why rewards could not be loaded in this process; empty when all are ready."""
    return _load_errors


def call(name: str, response: str, answer: str, metadata: Mapping[str, Any]) -> Outcome:
    """Run one reward on one response; whatever it does short of hanging or dying becomes an :class:`Outcome`."""
    try:
        value = _rewards[name](response, answer, metadata=metadata)
    except (Exception, SystemExit) as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{os.path.basename(frame.filename)}:{frame.lineno}"
        return Outcome(cause="error", message=f"{type(error).__name__}: {error} ({place})")
    if value is None:
        return Outcome(cause="none", message="returned None")
    if not isinstance(value, numbers.Real):
        return Outcome(cause="error", message=f"returned {type(value).__name__}, expected a number")
    number = float(value)
    if not math.isfinite(number):
        return Outcome(cause="nan", message=f"returned {number}")
    return Outcome(value=number)
