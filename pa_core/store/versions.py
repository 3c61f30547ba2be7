"""How policy versions are written in the keys of a store."""

from __future__ import annotations

import re


def version_name(version: int) -> str:
    """``v000012``: how a policy version is written in keys."""
    return f"v{version:06d}"


def version_of(key: str) -> int:
    """The policy version that a key begins with, or -1."""
    match = re.match(r"v(\d+)(?=[/.])", key)
    return int(match[1]) if match else -1
