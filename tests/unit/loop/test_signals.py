"""Stops by signal, sent to this very process."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from pa_core.errors import Stopped
from pa_core.loop.signals import StopSignals


@pytest.fixture
def signals() -> Iterator[StopSignals]:
    with StopSignals() as signals:
        yield signals


def test_a_stop_comes_at_once(signals: StopSignals) -> None:
    with pytest.raises(Stopped, match="SIGTERM"):
        signal.raise_signal(signal.SIGTERM)


def test_a_stop_waits_for_the_end_of_the_outermost_uninterrupted_block(signals: StopSignals) -> None:
    done = []
    with pytest.raises(Stopped, match="SIGINT"), signals.uninterrupted():
        with signals.uninterrupted():
            signal.raise_signal(signal.SIGINT)
            done.append("inner")
        done.append("outer")
    assert done == ["inner", "outer"]


def test_a_second_signal_does_not_wait(signals: StopSignals) -> None:
    with pytest.raises(Stopped), signals.uninterrupted():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        pytest.fail("the second signal waited")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_stop_that_comes_while_a_destructor_runs_is_not_lost(signals: StopSignals) -> None:
    class Dying:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGTERM)

    dying = Dying()
    del dying  # Python prints the exception and goes on
    with pytest.raises(Stopped, match="SIGTERM"):
        signals.check()


def test_without_a_signal_nothing_stops(signals: StopSignals) -> None:
    signals.check()
    with signals.uninterrupted():
        signals.check()
