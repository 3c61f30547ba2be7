"""Where the replicas of this machine listen, and hence what they announce."""

from __future__ import annotations

import ipaddress
import os
import socket

from pa_core.errors import ConfigError

HOST_VARIABLE = "PA_REPLICA_HOST"
"""Environment variable with the address of this machine that a replica's trainer reaches."""

LOOPBACK = "127.0.0.1"


def replica_host() -> str:
    """The IPv4 address to listen on and to announce: loopback, unless ``PA_REPLICA_HOST`` says otherwise.

    ``auto`` is the address that this machine's own name has, which in a container or pod is the one others reach it at.

    Raises:
        ConfigError: the value is no address of this machine, or ``auto`` finds none but loopback.
    """
    given = os.environ.get(HOST_VARIABLE) or LOOPBACK
    name = socket.gethostname() if given == "auto" else given
    try:
        address = socket.gethostbyname(name)
        with socket.socket() as probe:
            probe.bind((address, 0))
    except OSError as error:
        raise ConfigError(
            f"{HOST_VARIABLE}={given}: replicas cannot listen on {name} ({error.strerror or error}); name an address "
            "of this machine that the trainer reaches, or unset it for loopback"
        ) from None
    parsed = ipaddress.ip_address(address)
    if parsed.is_unspecified or (given == "auto" and parsed.is_loopback):
        raise ConfigError(
            f"{HOST_VARIABLE}={given}: {address} is no address that another machine reaches this one at; name one"
        )
    return address


def free_port(host: str = LOOPBACK) -> int:
    """A port of ``host``, an address of this machine, that is free now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
