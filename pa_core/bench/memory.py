"""Peak memory of a piece of work: what it needed above what was there before the first one.

On CUDA it is the allocator's own count. On a CPU it is the largest resident set, whose record Linux lets a process
reset (proc(5), ``clear_refs`` 5); freed memory that malloc keeps is given back first, so that work measured before
leaves no trace.
"""

from __future__ import annotations

import ctypes
import gc
import re
from pathlib import Path

import psutil
import torch

_SHARE = 0.8


class PeakMemory:
    """Measures from the memory in use at construction.

    Raises:
        OSError: on a CPU, where the system has no ``/proc/self/clear_refs``.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._baseline = 0
        self._baseline = self.restart()

    def restart(self, trim: bool = True) -> int:
        """Forget the peak so far; returns the bytes in use now.

        Args:
            trim: give back what malloc keeps; getting it again costs time, so not before a step whose time counts.
        """
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            return torch.cuda.memory_allocated(self._device)
        if trim:
            ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        return _resident("VmRSS")

    def peak(self) -> int:
        """The most bytes in use since the last restart, above the baseline."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) - self._baseline
        return _resident("VmHWM") - self._baseline

    def fits_twice(self, size: int) -> bool:
        """Whether twice the work that was just measured would fit what memory is left; ``size`` is what it was."""
        if self._device.type == "cuda":
            available = torch.cuda.mem_get_info(self._device)[0]
        else:
            available = int(psutil.virtual_memory().available)
        return 2 * self.peak() < _SHARE * available


def _resident(field: str) -> int:
    match = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    if match is None:
        raise OSError(f"/proc/self/status has no {field}")
    return int(match[1]) * 1024
