"""Deliveries to a server that fails, hangs or refuses."""

from __future__ import annotations

import logging
import threading
import time

import pytest

from pa_core.tracking.outbox import Outbox


def is_passing(error: Exception) -> bool:
    return isinstance(error, OSError)


def test_deliveries_arrive_in_order_and_putting_never_waits() -> None:
    arrived: list[int] = []
    gate = threading.Event()
    outbox = Outbox(is_passing)
    outbox.put("slow", lambda: gate.wait(30))
    start = time.monotonic()
    for number in range(50):
        outbox.put(str(number), lambda number=number: arrived.append(number))
    assert time.monotonic() - start < 10
    gate.set()

    assert outbox.close(30) == []
    assert arrived == list(range(50))


def test_what_failed_during_an_outage_arrives_afterwards_and_recovery_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    down = threading.Event()
    down.set()
    recovered = threading.Event()
    arrived: list[str] = []

    def deliver(name: str) -> None:
        if down.is_set():
            raise ConnectionError("server away")
        arrived.append(name)

    outbox = Outbox(is_passing, recovered.set, first_pause_s=0.01, longest_pause_s=0.02)
    with caplog.at_level(logging.INFO):
        outbox.put("a", lambda: deliver("a"))
        outbox.put("b", lambda: deliver("b"))
        time.sleep(0.1)
        down.clear()
        assert recovered.wait(5)
        assert outbox.close(5) == []

    assert sorted(arrived) == ["a", "b"]
    warnings = [message for message in caplog.messages if "will be tried again" in message]
    assert len(warnings) == 1, "one warning per outage, however often it tries"


def test_patient_closing_sits_out_an_outage() -> None:
    attempts: list[int] = []

    def fails_three_times() -> None:
        attempts.append(1)
        if len(attempts) < 4:
            raise ConnectionError("server away")

    outbox = Outbox(is_passing, first_pause_s=0.01)
    outbox.put("a", fails_three_times)

    assert outbox.close(20, patient=True) == []
    assert len(attempts) == 4


def test_patient_closing_ends_at_its_deadline_all_the_same() -> None:
    def fail() -> None:
        raise ConnectionError("server away")

    outbox = Outbox(is_passing, first_pause_s=0.01)
    outbox.put("a", fail)

    assert outbox.close(0.3, patient=True) == ["a"]


def test_after_an_outage_the_newest_of_what_replaces_itself_is_in_force_and_came_once() -> None:
    down, tried = threading.Event(), threading.Event()
    down.set()
    written: list[tuple[str, int]] = []

    def write(path: str, value: int) -> None:
        tried.set()
        if down.is_set():
            raise ConnectionError("server away")
        written.append((path, value))

    outbox = Outbox(is_passing, first_pause_s=0.01, longest_pause_s=0.02)
    for value in range(5):
        outbox.put("picture", lambda value=value: write("picture", value), replaces=True)
        outbox.put("point", lambda value=value: write("point", value))
        assert tried.wait(5)
    down.clear()

    assert outbox.close(5, patient=True) == []
    assert [value for path, value in written if path == "picture"] == [4]
    assert sorted(value for path, value in written if path == "point") == [0, 1, 2, 3, 4]


def test_closing_during_an_outage_names_what_is_lost_without_waiting_for_the_pauses() -> None:
    def fail() -> None:
        raise ConnectionError("server away")

    outbox = Outbox(is_passing, first_pause_s=60)
    outbox.put("a", fail)
    outbox.put("b", fail)
    start = time.monotonic()

    assert sorted(outbox.close(50)) == ["a", "b"]
    assert time.monotonic() - start < 20


def test_a_hanging_delivery_does_not_hold_closing_beyond_its_deadline() -> None:
    release = threading.Event()
    outbox = Outbox(is_passing)
    outbox.put("hangs", lambda: release.wait(60))
    outbox.put("behind", lambda: None)
    start = time.monotonic()

    assert outbox.close(0.2) == ["hangs", "behind"]
    assert time.monotonic() - start < 20
    release.set()


def test_a_refused_delivery_is_dropped_at_once_and_the_next_arrives() -> None:
    attempts: list[str] = []

    def refused() -> None:
        attempts.append("refused")
        raise ValueError("not a metric")

    outbox = Outbox(is_passing)
    outbox.put("bad", refused)
    outbox.put("good", lambda: attempts.append("good"))

    assert outbox.close(5) == ["bad"]
    assert attempts == ["refused", "good"]
