"""What finished runs leave in their store, and what of it nobody needs for the result any more."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal, get_args

from pa_core.loop.progress import read_progress
from pa_core.loop.run import RUN_KEY, SUMMARY_KEY
from pa_core.store.objects import ObjectStore

Part = Literal["rollouts", "checkpoints", "weights"]
"""``rollouts``: samples of every iteration; ``checkpoints``: optimizer state; ``weights``: versions before the last."""

PARTS: tuple[Part, ...] = get_args(Part)

_MANIFEST = re.compile(r"weights/v\d+/manifest\.json")
"""The key that makes a published version; the weight store, which knows more, would import torch."""


@dataclass(frozen=True)
class FinishedRun:
    """A run that has a summary.

    Attributes:
        ended: when its progress was last written, else when it was made.
    """

    name: str
    store: ObjectStore
    ended: datetime


def finished_runs(root: str, before: datetime) -> Iterator[FinishedRun]:
    """Runs directly below ``root`` that are finished, since before ``before``. One that could go on is none of them."""
    store = ObjectStore.open(root)
    names = [key.removesuffix(f"/{SUMMARY_KEY}") for key in store.list() if key.endswith(f"/{SUMMARY_KEY}")]
    for name in names:
        run = store.child(name)
        if "/" not in name and run.exists(RUN_KEY):
            found = FinishedRun(name, run, _ended(run))
            if found.ended < before:
                yield found


def _ended(run: ObjectStore) -> datetime:
    progress = read_progress(run)
    if progress is not None:
        return datetime.fromtimestamp(progress.updated_at, UTC)
    return datetime.strptime(json.loads(run.read(RUN_KEY))["created"], "%Y%m%d-%H%M%S").replace(tzinfo=UTC)


def dispensable(run: FinishedRun, parts: Iterable[Part]) -> dict[Part, list[str]]:
    """Keys of these parts by part; of ``weights`` never those of the last version or of the base of adapters."""
    found: dict[Part, list[str]] = {}
    for part in parts:
        keys = [f"{part}/{key}" for key in run.store.child(part).list()]
        if part == "weights":
            versions = sorted(key.split("/")[1] for key in keys if _MANIFEST.fullmatch(key))
            kept = f"weights/{versions[-1]}/" if versions else "weights/"
            keys = [key for key in keys if key.startswith("weights/v") and not key.startswith(kept)]
        if keys:
            found[part] = keys
    return found


def remove(run: FinishedRun, keys: Sequence[str]) -> None:
    """Remove these keys, manifests first, so that no reader takes what is left for whole."""
    for key in sorted(keys, key=lambda key: not key.endswith("manifest.json")):
        run.store.delete(key)
