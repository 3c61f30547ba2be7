"""The ledger: which groups each optimizer iteration consumed, so that each contributes exactly once."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pa_core.errors import StoreError
from pa_core.store.objects import ObjectStore
from pa_core.store.versions import version_name, version_of


@dataclass(frozen=True)
class LedgerEntry:
    """One iteration: ``group_ids`` (sorted) were consumed at ``version``; ``facts`` is whatever else was recorded.

    With dynamic sampling, ``facts["uninformative"]`` has the ids of the groups that were generated and not trained on.
    """

    version: int
    group_ids: tuple[str, ...]
    facts: Mapping[str, Any]


class Ledger:
    """``ledger/v000012.json`` below a run's store, one per iteration, each written once."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store.child("ledger")

    def write(self, version: int, group_ids: Sequence[str], facts: Mapping[str, Any] | None = None) -> LedgerEntry:
        """Record what the step from ``version`` consumed. Recording the same groups again is no error.

        Raises:
            StoreError: a group occurs twice, or other groups are recorded for this version.
        """
        twice = sorted(group_id for group_id, count in Counter(group_ids).items() if count > 1)
        if twice:
            raise StoreError(f"iteration {version} would consume groups twice: {', '.join(twice)}")
        entry = LedgerEntry(version, tuple(sorted(group_ids)), dict(facts or {}))
        data = json.dumps({"version": version, "group_ids": entry.group_ids, "facts": entry.facts}, indent=1).encode()
        try:
            self._store.publish(self._key(version), data)
        except FileExistsError:
            existing = self.read(version)
            if existing is None or existing.group_ids != entry.group_ids:
                message = f"store {self._store.url}: iteration {version} is recorded with other groups"
                raise StoreError(message) from None
            return existing
        return entry

    def read(self, version: int) -> LedgerEntry | None:
        """The record of an iteration, or None where there is none."""
        data = self._store.find(self._key(version))
        if data is None:
            return None
        tree = json.loads(data)
        return LedgerEntry(tree["version"], tuple(tree["group_ids"]), tree["facts"])

    def forget_after(self, version: int) -> None:
        """Remove the records of iterations later than ``version``, which will be done anew with other groups."""
        for key in self._store.list():
            if version_of(key) > version:
                self._store.delete(key)

    def _key(self, version: int) -> str:
        return f"{version_name(version)}.json"
