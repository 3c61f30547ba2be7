"""The rollout buffer: where the producer hands finished groups to the trainer.

A group is stored first and delivered second, so that what :meth:`RolloutBuffer.put` has acknowledged is never
generated again (it is read back on resume), and it is delivered at most once, whatever arrives twice.

    rollouts/v000012/<group id>.arrow   one group; written by ``put``
    rollouts/v000012.parquet            the whole iteration; written by ``compact``, which then removes the former

Columns of both: :mod:`pa_core.store.group_codec`.
"""

from __future__ import annotations

import io
import re
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future

import pyarrow as pa
import pyarrow.parquet as pq

from pa_core.errors import EngineError, StoreError
from pa_core.records import Group, Sample
from pa_core.store.group_codec import from_table, to_table
from pa_core.store.objects import ObjectStore
from pa_core.store.versions import version_name, version_of

PUT_TIMEOUT_S = 300.0


class StalenessError(StoreError):
    """A group that was sampled by a policy version which the schedule does not allow; it must not be trained on."""


class RolloutBuffer:
    """Hands groups from the producer's threads to the trainer's, exactly once each.

    Attributes:
        accepted: groups made available for training, by ``put`` or ``restore``.
        stale: groups refused for their version.
        restored: groups that ``restore`` took from the store.
        max_staleness_seen: largest difference between the trainer's version and one that sampled a token it got.
    """

    def __init__(self, store: ObjectStore, max_staleness: int = 0) -> None:
        self._store = store.child("rollouts")
        self._max_staleness = max_staleness
        self._changed = threading.Condition()
        self._acknowledged: dict[tuple[int, str], Future[None]] = {}
        self._available: deque[Group] = deque()
        self._expected: dict[int, set[str]] = {}
        self._delivered: dict[int, set[str]] = {}
        self._duplicates: Counter[int] = Counter()
        self._version: int | None = None
        self._failure: BaseException | None = None
        self.accepted = 0
        self.stale = 0
        self.restored = 0
        self.max_staleness_seen = 0

    @property
    def duplicates(self) -> int:
        """Groups that ``put`` dropped because their version and id had been stored before."""
        with self._changed:
            return sum(self._duplicates.values())

    @property
    def waiting(self) -> int:
        """Groups that are available and were not taken yet."""
        with self._changed:
            return len(self._available)

    def undelivered(self, version: int) -> int:
        """Group ids that belong to iteration ``version``, still open, and that nobody has taken yet."""
        with self._changed:
            return len(self._expected.get(version, set()) - self._delivered.get(version, set()))

    def duplicates_of(self, version: int) -> int:
        """:attr:`duplicates` of one version."""
        with self._changed:
            return self._duplicates[version]

    def expect(self, version: int, ids: Sequence[str]) -> None:
        """Open iteration ``version`` with these group ids: others are refused, and missing ones can be named."""
        with self._changed:
            self._version = version
            oldest = version - self._max_staleness
            self._expected = {past: known for past, known in self._expected.items() if past >= oldest}
            self._delivered = {past: known for past, known in self._delivered.items() if past >= oldest}
            self._expected[version] = set(ids)

    def admit(self, version: int, ids: Sequence[str]) -> None:
        """Let further group ids belong to iteration ``version``, which this opens if :meth:`expect` has not."""
        with self._changed:
            if version in self._expected:
                self._expected[version] |= set(ids)
                return
        self.expect(version, ids)

    def put(self, group: Group) -> bool:
        """Store a group, then make it available; returns once it is stored.

        A group whose version and id were put before is dropped and counted. Where an earlier life of the program had
        stored it, that one is delivered, because it was acknowledged.

        Returns:
            whether the group was new.

        Raises:
            StalenessError: its version, or that of a token, is older than the schedule allows, or versions mix.
            StoreError: it cannot be stored, is malformed, or does not belong to the iteration.
        """
        self._check_form(group)
        key = (group.version, group.id)
        with self._changed:
            first = self._acknowledged.get(key)
            if first is None:
                self._check_gate(group)
                mine = self._acknowledged[key] = Future()
        if first is not None:
            self._await_stored(first, group)
            self._count_duplicate(group)
            return False
        try:
            new = self._keep(group)
            delivered = group if new else self._read_group(*key)
        except BaseException as error:
            with self._changed:
                del self._acknowledged[key]
            mine.set_exception(error)
            raise
        self._make_available([delivered])
        mine.set_result(None)
        if not new:
            self._count_duplicate(group)
        return new

    def _await_stored(self, first: Future[None], group: Group) -> None:
        """A duplicate is acknowledged no earlier than the one that came first."""
        try:
            first.result(PUT_TIMEOUT_S)
        except TimeoutError:
            raise StoreError(
                f"store {self._store.url}: group {group.id} was not stored within {PUT_TIMEOUT_S:g} s"
            ) from None

    def _count_duplicate(self, group: Group) -> None:
        with self._changed:
            self._duplicates[group.version] += 1

    def _make_available(self, groups: Sequence[Group]) -> None:
        with self._changed:
            self._available.extend(groups)
            self.accepted += len(groups)
            self._changed.notify_all()

    def _keep(self, group: Group) -> bool:
        table = to_table([group])
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        try:
            self._store.publish(_group_key(group.version, group.id), sink.getvalue().to_pybytes())
        except FileExistsError:
            return False
        return True

    def next(self, version: int, timeout_s: float) -> Group:
        """The next available group for iteration ``version``; see :meth:`take`."""
        return self._wait(version, timeout_s, at_most=1)[0]

    def take(self, version: int, timeout_s: float) -> list[Group]:
        """All groups available for iteration ``version``, waiting for the first. Each is returned once, ever.

        Raises:
            EngineError: none came within ``timeout_s``; names the missing ones if :meth:`expect` told them.
            StalenessError: an available group is too old or from a later version; it is dropped and counted.
            BaseException: what :meth:`fail` was given, as soon as it was.
        """
        return self._wait(version, timeout_s, at_most=None)

    def _wait(self, version: int, timeout_s: float, at_most: int | None) -> list[Group]:
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._version = version
            while self._failure is None and not self._available:
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise EngineError(self._missing(version, timeout_s))
                self._changed.wait(remaining)
            if self._failure is not None:
                raise self._failure
            taken: list[Group] = []
            while self._available and (at_most is None or len(taken) < at_most):
                group = self._available.popleft()
                try:
                    self._check_delivery(group, version)
                except StalenessError:
                    self._available.extendleft(reversed(taken))
                    raise
                taken.append(group)
            for group in taken:
                self._delivered.setdefault(version, set()).add(group.id)
            return taken

    def fail(self, error: BaseException) -> None:
        """Make every present and later ``next`` or ``take`` raise ``error``; the first failure stays."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def stored(self, version: int, ids: Sequence[str]) -> list[Group]:
        """Those of ``ids`` that were stored at ``version``, compacted or not, in the order of ``ids``."""
        groups: dict[str, Group] = {}
        for group_id in ids:
            data = self._store.find(_group_key(version, group_id))
            if data is not None:
                groups[group_id] = _decode(data)
        if len(groups) < len(ids):
            data = self._store.find(_compact_key(version))
            compacted = [] if data is None else from_table(pq.read_table(io.BytesIO(data)))
            groups = {group.id: group for group in compacted if group.id in set(ids)} | groups
        return [groups[group_id] for group_id in ids if group_id in groups]

    def restore(self, version: int, ids: Sequence[str]) -> list[Group]:
        """Admit ``ids`` to iteration ``version``; what the store has of them is available as if it had just been put.

        Returns:
            the groups that need no generation.
        """
        self.admit(version, ids)
        found = self.stored(version, ids)
        for group in found:
            self._check_form(group)
        with self._changed:
            new = [group for group in found if (version, group.id) not in self._acknowledged]
            for group in new:
                self._check_gate(group)
                done: Future[None] = Future()
                done.set_result(None)
                self._acknowledged[version, group.id] = done
            self.restored += len(new)
        self._make_available(new)
        return found

    def compact(
        self,
        version: int,
        groups: Sequence[Group],
        advantages: Mapping[str, Sequence[float | None]] | None = None,
    ) -> str:
        """Write an iteration's groups to one Parquet file, then remove their single files.

        Args:
            advantages: by group id, one per sample, None where a sample had none.

        Returns:
            the file's URL.
        """
        sink = pa.BufferOutputStream()
        pq.write_table(to_table(groups, advantages), sink, compression="zstd")
        self._store.publish(_compact_key(version), sink.getvalue().to_pybytes(), exclusive=False)
        for group in groups:
            self._store.delete(_group_key(group.version, group.id))
        if not self._store.list(version_name(version)):
            self._store.delete(version_name(version))
        return f"{self._store.url}/{_compact_key(version)}"

    def forget_after(self, version: int) -> None:
        """Remove what is stored for iterations later than ``version``, which will be done anew."""
        for key in self._store.list():
            if version_of(key) > version:
                self._store.delete(key)

    def _read_group(self, version: int, group_id: str) -> Group:
        return _decode(self._store.read(_group_key(version, group_id)))

    def _check_form(self, group: Group) -> None:
        """What no group may be: unnamed, empty, or with arrays of unequal length."""
        if not re.fullmatch(r"[A-Za-z0-9-]+", group.id):
            raise StoreError(f"group id {group.id!r}: use letters, digits and '-' only")
        if not group.samples:
            raise StoreError(f"group {group.id} of version {group.version} has no samples")
        for number, sample in enumerate(group.samples):
            lengths = {
                "token_ids": len(sample),
                "logprobs": len(sample.logprobs),
                "loss_mask": len(sample.loss_mask),
                "versions": sum(tokens for _, tokens in sample.versions),
            }
            if len(set(lengths.values())) > 1:
                raise StoreError(f"group {group.id}, sample {number}: lengths differ: {lengths}")

    def _check_gate(self, group: Group) -> None:
        """Refuse what cannot be trained on any more, or never could. Later versions wait for their iteration."""
        oldest, newest = _versions(group)
        expected = self._expected.get(group.version)
        current = newest if self._version is None else max(newest, self._version)
        if current - oldest > self._max_staleness:
            self.stale += 1
            raise StalenessError(self._stale_message(group, current))
        if expected is not None and group.id not in expected:
            raise StoreError(f"group {group.id} does not belong to iteration {group.version}")

    def _check_delivery(self, group: Group, version: int) -> None:
        oldest, newest = _versions(group)
        if newest > version or version - oldest > self._max_staleness:
            self.stale += 1
            raise StalenessError(self._stale_message(group, version))
        self.max_staleness_seen = max(self.max_staleness_seen, version - oldest)

    def _stale_message(self, group: Group, version: int) -> str:
        oldest, newest = _versions(group)
        return (
            f"group {group.id} was sampled by policy versions {oldest} to {newest}; with schedule.max_staleness="
            f"{self._max_staleness} it cannot be trained on at version {version}"
        )

    def _missing(self, version: int, timeout_s: float) -> str:
        delivered = self._delivered.get(version, set())
        message = f"no group of policy version {version} arrived within {timeout_s:g} s"
        if version in self._expected:
            missing = sorted(self._expected[version] - delivered)
            shown = ", ".join(missing[:8]) + (", …" if len(missing) > 8 else "")
            return f"{message}; {len(missing)} of {len(self._expected[version])} are missing: {shown}"
        return f"{message}; {len(delivered)} were delivered before"


def _versions(group: Group) -> tuple[int, int]:
    """The oldest and the newest policy version in a group."""
    versions = [group.version, *(version for sample in group.samples for version in _span_versions(sample))]
    return min(versions), max(versions)


def _span_versions(sample: Sample) -> list[int]:
    return [version for version, _ in sample.versions]


def _group_key(version: int, group_id: str) -> str:
    return f"{version_name(version)}/{group_id}.arrow"


def _compact_key(version: int) -> str:
    return f"{version_name(version)}.parquet"


def _decode(data: bytes) -> Group:
    with pa.ipc.open_file(pa.BufferReader(data)) as reader:
        (group,) = from_table(reader.read_all())
    return group
