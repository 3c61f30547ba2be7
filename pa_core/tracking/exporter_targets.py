"""How Prometheus finds a run: a file of targets per run, in a folder that its ``file_sd_configs`` watch.

The file names the trainer's endpoint (``job="pa_trainer"``) and that of each replica that serves
(``job="pa_replica"``), all with the run's name as label ``run``; it is written again when replicas come and go, and
removed when the run ends. One that a killed trainer left behind stays, so that Prometheus sees that trainer as down,
until the next run on the same host that uses the folder begins.
"""

from __future__ import annotations

import json
import os
import platform
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from pa_core.processes import running_process
from pa_core.tracking.exporter import RunMetrics

LOOK_S = 2.0
"""Seconds between two looks for replicas that came or went."""

_OWNER = "__pa_owner"


@contextmanager
def announced(folder: str, address: str, metrics: RunMetrics) -> Iterator[None]:
    """Keep the run's file of targets within the block. A folder that cannot be written costs the file alone."""
    path = Path(folder).expanduser().resolve() / f"{metrics.run}-{os.getpid()}.json"
    ended = threading.Event()
    writer = threading.Thread(target=_keep, args=(path, address, metrics, ended), name="metrics-targets", daemon=True)
    writer.start()
    try:
        yield
    finally:
        ended.set()
        writer.join(LOOK_S)
        try:
            path.unlink(missing_ok=True)
        except OSError:
            metrics.failed(f"removing {path}")


def _keep(path: Path, address: str, metrics: RunMetrics, ended: threading.Event) -> None:
    written: list[dict[str, Any]] = []
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _sweep(path.parent)
    except OSError:
        metrics.failed(f"preparing {path.parent}")
    while True:
        try:
            wanted = targets(address, metrics)
            if wanted != written and not ended.is_set():
                part = path.with_suffix(".part")
                part.write_text(json.dumps(wanted, indent=2))
                part.replace(path)
                written = wanted
        except Exception:
            metrics.failed(f"writing {path}")
        if ended.wait(LOOK_S):
            return


def targets(address: str, metrics: RunMetrics) -> list[dict[str, Any]]:
    """The run's targets as Prometheus reads them from a file; labels that begin with ``__`` do not reach the series."""
    owner = {_OWNER: f"{platform.node()} {os.getpid()} {psutil.Process().create_time()}"}
    groups = [{"targets": [address], "labels": {"job": "pa_trainer", "run": metrics.run, **owner}}]
    for name, replica in sorted(metrics.live().replicas.items()):
        if replica.url is not None:
            parts = urlsplit(replica.url)
            labels = {"job": "pa_replica", "run": metrics.run, "replica": name, "kind": replica.engine}
            groups.append({"targets": [parts.netloc], "labels": {**labels, "__scheme__": parts.scheme}})
    return groups


def _sweep(folder: Path) -> None:
    """Remove the files of this host's trainers that are gone."""
    for path in folder.glob("*.json"):
        try:
            host, pid, started = json.loads(path.read_text())[0]["labels"][_OWNER].split()
            gone = host == platform.node() and running_process(int(pid), float(started)) is None
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            continue  # somebody else's, or just removed
        if gone:
            path.unlink(missing_ok=True)
