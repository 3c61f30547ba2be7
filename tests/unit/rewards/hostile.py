"""Rewards that misbehave in every way; the response says how. Loaded by file path in reward workers."""

import os
import re
import signal
import sys
import time
from typing import Any


def obey(response: str, answer: str, *, metadata: dict[str, Any]) -> Any:
    """Do what the response says."""
    match response.partition(" "):
        case "value", _, text:
            return float(text)
        case "hang", _, _:
            time.sleep(3600)
        case "hang-in-c", _, _:
            re.match(r"(a+)+$", "a" * 64 + "b")
        case "raise", _, text:
            raise ValueError(text)
        case "exit", _, text:
            sys.exit(int(text))
        case "kill", _, _:
            os.kill(os.getpid(), signal.SIGKILL)
        case "none", _, _:
            return None
        case "text", _, _:
            return "1.0"
        case "true", _, _:
            return True
        case "tokens", _, _:
            return metadata["response_tokens"]
        case "pid", _, _:
            return os.getpid()
        case "loaded", _, module:
            return module in sys.modules
        case "print", _, text:
            print(text)
            return 1
    return float(response)


def always_one(response: str, answer: str, *, metadata: dict[str, Any]) -> float:
    return 1.0


def needs_scale(response: str, answer: str, *, metadata: dict[str, Any], scale: float) -> float:
    return scale


def no_metadata(response: str, answer: str) -> float:
    return 1.0
