"""Processes of this machine, told apart by number and start time since numbers are given again, and its cores."""

from __future__ import annotations

import os

import psutil


def running_process(pid: int, started: float) -> psutil.Process | None:
    """The process of that number that began at ``started`` (seconds since the epoch), or None when it is over."""
    try:
        process = psutil.Process(pid)
        same = abs(process.create_time() - started) < 1
        return process if same and process.status() != psutil.STATUS_ZOMBIE else None
    except psutil.NoSuchProcess:
        return None


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
