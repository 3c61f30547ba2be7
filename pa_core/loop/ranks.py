"""Several processes that train as one: the first does what is done once, the others repeat its calls.

Every process holds a :class:`~pa_core.loop.learner.Learner`. Methods of it that are marked :func:`collective` are
called by the first process alone; the call goes to the others by a broadcast, with its arguments, and all of them run
it together. What a method receives and decides is therefore the same everywhere, but for the samples that each takes
from an accumulation (:mod:`pa_core.model.shares`).

Calls travel over the host network (gloo) as JSON and, for groups, as an Arrow table: nothing is unpickled.
"""

from __future__ import annotations

import functools
import io
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

import pyarrow as pa
import torch
import torch.distributed as dist

from pa_core.errors import TrainingError, first_line
from pa_core.loop.signals import StopSignals
from pa_core.records import Group
from pa_core.store.group_codec import from_table, to_table

log = logging.getLogger(__name__)

GRACE_S = 10.0
"""Seconds that a joint step gets to fail by itself once its time is over or another process has died."""

_POLL_S = 0.2
_NOTICE_S = 3.0
_YEAR = timedelta(days=365)
_GROUPS = "groups"

P = ParamSpec("P")
R = TypeVar("R")


class Joint(Protocol):
    """What has collective methods: ``ranks`` is None in a single process."""

    ranks: Ranks | None


L = TypeVar("L", bound=Joint)


def collective(method: Callable[Concatenate[L, P], R]) -> Callable[Concatenate[L, P], R]:
    """Have every process run ``method`` when the first one calls it. Arguments: positional, JSON or a list of groups.

    A collective method that another one calls is part of that one.
    """

    @functools.wraps(method)
    def call(self: L, *arguments: P.args, **keywords: P.kwargs) -> R:
        if self.ranks is None or self.ranks.busy:
            return method(self, *arguments, **keywords)
        with self.ranks.joint(method.__name__, arguments):
            return method(self, *arguments, **keywords)

    cast(Any, call).collective = True
    return call


class Ranks:
    """This process's end of the channel over which the first process tells the others what to do.

    Args:
        timeout_s: seconds that one joint step may take.
        signals: on the first process, how a stop from outside arrives: it waits for a joint step to end.
        failure: what another process died of, as far as this one can know.
        end_others: ends those that this process has started, so that what waits for them fails.

    Attributes:
        on_failure: told once that another process has died.
        broken: a joint step was left half done, so that there cannot be another one.
    """

    def __init__(
        self,
        timeout_s: float,
        signals: StopSignals | None = None,
        failure: Callable[[], str | None] = lambda: None,
        end_others: Callable[[], None] = lambda: None,
    ) -> None:
        self.number = dist.get_rank()
        self._timeout_s = timeout_s
        self._signals = signals
        self._failure = failure
        self._end_others = end_others
        self._verdict: str | None = None
        self.broken = False
        # Of its own, because between two calls the others wait for as long as generation takes.
        self._channel = dist.new_group(backend="gloo", timeout=_YEAR)
        self._one_at_a_time = threading.RLock()
        self._step: str | None = None
        self._stepping: int | None = None
        self._deadline = 0.0
        self._closed = threading.Event()
        self.on_failure: Callable[[BaseException], None] = lambda error: None
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()

    @property
    def leads(self) -> bool:
        """Whether this is the first process."""
        return self.number == 0

    @property
    def busy(self) -> bool:
        """Whether the calling thread is in a joint step."""
        return self._stepping == threading.get_ident()

    @contextmanager
    def joint(self, name: str, arguments: Sequence[Any] = ()) -> Iterator[None]:
        """A step that all processes take together; the first one announces it, unless it follows an announcement.

        Raises:
            TrainingError: another process is gone, or they did not get through in time; names the step.
        """
        shield = nullcontext() if self._signals is None else self._signals.uninterrupted()
        with shield, self._one_at_a_time:
            if self.broken:
                raise TrainingError(f"{name}: an earlier joint step of the training processes has failed")
            self._step, self._stepping = name, threading.get_ident()
            self.progress()
            try:
                if self.leads:
                    self._send({"call": name}, arguments)
                yield
            except RuntimeError as error:  # what torch's backends raise
                self.broken = True
                raise self.explained(name, error) from error
            except BaseException:
                self.broken = True
                raise
            finally:
                self._step = self._stepping = None

    def progress(self) -> None:
        """The joint step goes on: its time begins anew."""
        self._deadline = time.monotonic() + self._timeout_s

    def interrupted(self) -> bool:
        """Whether the first process has been told to stop; the same answer everywhere, so all can leave a step."""
        self.progress()
        flag = torch.tensor([self._signals is not None and self._signals.pending])
        dist.broadcast(flag, src=0, group=self._channel)
        return bool(flag)

    def receive(self) -> tuple[str, list[Any]] | None:
        """On the other processes: the next call and its arguments, or None when the first one is done."""
        sizes = torch.zeros(2, dtype=torch.int64)
        dist.broadcast(sizes, src=0, group=self._channel)
        message = torch.zeros(int(sizes.sum()), dtype=torch.uint8)
        dist.broadcast(message, src=0, group=self._channel)
        head, blob = message.numpy().tobytes()[: int(sizes[0])], message.numpy().tobytes()[int(sizes[0]) :]
        header = json.loads(head)
        if header["call"] is None:
            return None
        arguments = [_decoded(blob) if argument == {_GROUPS: True} else argument for argument in header["arguments"]]
        return header["call"], arguments

    def _send(self, header: dict[str, Any], arguments: Sequence[Any]) -> None:
        plain, blob = [], b""
        for argument in arguments:
            groups = isinstance(argument, Sequence) and bool(argument) and isinstance(argument[0], Group)
            blob = _encoded(argument) if groups else blob
            plain.append({_GROUPS: True} if groups else argument)
        head = json.dumps(header | {"arguments": plain}).encode()
        dist.broadcast(torch.tensor([len(head), len(blob)]), src=0, group=self._channel)
        message = torch.frombuffer(bytearray(head + blob), dtype=torch.uint8)
        dist.broadcast(message, src=0, group=self._channel)

    def follow(self, learner: Any) -> None:
        """On the other processes: repeat the first one's calls on ``learner`` until it is done."""
        while (received := self.receive()) is not None:
            name, arguments = received
            method = getattr(type(learner), name)
            if not getattr(method, "collective", False):
                raise ValueError(f"{name} is not a collective method")
            method(learner, *arguments)

    def close(self) -> None:
        """On the first process: let the others go. They may be gone already."""
        self._closed.set()
        if self.leads and self._failure() is None and not self.broken:
            try:
                self._send({"call": None}, ())
            except RuntimeError as error:
                log.warning("the other processes could not be told that training is over: %s", first_line(error))

    def explained(self, name: str, error: RuntimeError) -> Exception:
        """What a failed collective operation means, or the error itself where it is none."""
        known = isinstance(error, dist.DistError) or "gloo" in str(error).lower()
        # Whoever notices the broken connection may be faster than the end of the process at its other side.
        deadline = time.monotonic() + (_NOTICE_S if known else 0)
        while (cause := self._verdict or self._failure()) is None and time.monotonic() < deadline:
            time.sleep(_POLL_S / 4)
        if cause is not None:
            return TrainingError(f"{name}: {cause}")
        if not known:
            return error
        if "timed out" in str(error).lower():
            return TrainingError(f"{name}: {self._overdue()}")
        return TrainingError(
            f"{name}: another process of this run is gone (process {self.number}: {first_line(error)}); its own log "
            "says why"
        )

    def _overdue(self) -> str:
        return (
            f"the processes did not get through this joint step within parallel.timeout_s="
            f"{self._timeout_s:g} s (process {self.number}); one of them hangs, or the step needs more time"
        )

    def _watch(self) -> None:
        """End this process where it is stuck in a joint step that will not come to an end."""
        stuck_since: float | None = None
        told = False
        while not self._closed.wait(_POLL_S):
            name, cause = self._step, self._failure()
            if cause is not None and not told:
                told = True
                self.on_failure(TrainingError(cause))
            if name is None:
                stuck_since = None
                continue
            if cause is None and time.monotonic() > self._deadline:
                cause = self._verdict = self._overdue()
                self._end_others()
            if cause is None:
                continue
            stuck_since = stuck_since or time.monotonic()
            if time.monotonic() - stuck_since > GRACE_S:
                log.error("%s: %s", name, self._verdict or cause)
                os._exit(1)


def _encoded(groups: Sequence[Group]) -> bytes:
    table, sink = to_table(groups), io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def _decoded(blob: bytes) -> list[Group]:
    with pa.ipc.open_stream(blob) as reader:
        return from_table(reader.read_all())
