"""Where replicas listen: loopback, or an address of this machine that others reach."""

from __future__ import annotations

import socket

import pytest

from pa_core.errors import ConfigError
from pa_core.rollout.address import replica_host


def test_replicas_listen_on_loopback_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PA_REPLICA_HOST", raising=False)
    assert replica_host() == "127.0.0.1"
    monkeypatch.setenv("PA_REPLICA_HOST", "127.0.0.2")
    assert replica_host() == "127.0.0.2"


@pytest.mark.parametrize(
    ("value", "reason"),
    [("192.0.2.1", "cannot listen on 192.0.2.1"), ("no-such-host.invalid", "cannot listen"), ("0.0.0.0", "no address")],
)
def test_an_address_at_which_nobody_would_find_it_is_refused(
    monkeypatch: pytest.MonkeyPatch, value: str, reason: str
) -> None:
    monkeypatch.setenv("PA_REPLICA_HOST", value)
    with pytest.raises(ConfigError, match=f"PA_REPLICA_HOST={value}: .*{reason}"):
        replica_host()


def test_auto_is_the_address_of_the_machines_own_name_but_never_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PA_REPLICA_HOST", "auto")
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    with pytest.raises(ConfigError, match=r"PA_REPLICA_HOST=auto: 127\.0\.1\.1 is no address that another machine"):
        replica_host()
