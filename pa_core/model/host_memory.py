"""How this process's allocator treats freed memory."""

from __future__ import annotations

import ctypes
import logging

log = logging.getLogger(__name__)

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4  # malloc.h of the GNU C library
_LARGEST = (1 << 31) - 1
_TOP_PAD = 64 << 20


def keep_freed_memory() -> bool:
    """Have malloc keep what is freed for what comes next; returns whether it does.

    A training step on a CPU frees and takes gigabytes in large pieces. By default glibc gives each back to the system
    at once, and every page of the next one costs a fault and a cleared page again. The peak stays as it was.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        log.debug("this C library has no mallopt; freed memory goes back to the system")
        return False
    settings = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, _LARGEST), (_M_TOP_PAD, _TOP_PAD))
    return all(mallopt(name, value) == 1 for name, value in settings)
