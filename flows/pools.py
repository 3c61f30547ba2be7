"""Device pools: deployments that name the same ``work_pool`` share its devices, and wait for each other.

A served deployment has no worker that could hold a limit, so the pool becomes a global concurrency limit of the same
name, attached to its deployments. The server gives out its slots before a run's process is started: a run that has to
wait shows as AwaitingConcurrencySlot, and the slot of a run that crashed is free at once. It is 1 until somebody
changes it on the page *Concurrency*; serving again keeps what is there. Prefect deletes a limit together with any
deployment that has it: after deleting one, serve again.

Slots are leases. A run renews its lease every 225 s, for 300 s, and tries for more than a minute before it gives up,
so a server that is away for a minute costs no run; leases lie in files, so that they outlive the server.
"""

from __future__ import annotations

from collections.abc import Mapping
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate
from prefect.exceptions import ObjectNotFound

SLOTS = 1
"""Runs of a pool at a time, until somebody changes it."""


def limit_of(client: SyncPrefectClient, pool: str) -> UUID:
    """Id of the pool's limit, which is made when there is none."""
    try:
        return client.read_global_concurrency_limit_by_name(pool).id
    except ObjectNotFound:
        return client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=pool, limit=SLOTS))


def share_devices(client: SyncPrefectClient, pools: Mapping[UUID, str]) -> None:
    """Put deployments, by id, under the limits of their pools."""
    limits = {pool: limit_of(client, pool) for pool in sorted(set(pools.values()))}
    for deployment, pool in pools.items():
        # The client's own model of an update lacks this field of the server's.
        client.request(
            "PATCH",
            "/deployments/{id}",
            path_params={"id": deployment},
            json={"global_concurrency_limit_id": str(limits[pool])},
        )
