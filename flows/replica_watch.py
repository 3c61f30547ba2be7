"""What a flow shows of its replicas while it runs: their health and loaded version, as log lines and as a table."""

from __future__ import annotations

import json
import logging
import time
from typing import Any, cast
from uuid import UUID

from prefect import get_client
from prefect.artifacts import create_table_artifact
from prefect.client.schemas.actions import ArtifactUpdate

from pa_core.errors import StoreError
from pa_core.rollout.process import ReplicaSet
from pa_core.store.registry import ReplicaRecord

LOOK_EVERY_S = 2.0
TABLE_EVERY_S = 5.0

Logger = logging.Logger | logging.LoggerAdapter[logging.Logger]


class ReplicaWatch:
    """Tells a replica task's log what becomes of its replica: starts, ends, restarts, health, loaded version."""

    def __init__(self, replicas: ReplicaSet, replica_id: str, logger: Logger) -> None:
        self._replicas = replicas
        self._id = replica_id
        self._logger = logger
        self._pid: int | None = None
        self._ended = False
        self._told = ""
        self._due = 0.0

    def look(self) -> None:
        """Log what is new."""
        self._process()
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + LOOK_EVERY_S
            try:
                self._health(self._replicas.registry.read(self._id))
            except StoreError as error:
                self._logger.warning("its record cannot be read: %s", error)

    def _process(self) -> None:
        process = self._replicas.processes[self._id]
        if process.pid != self._pid:
            restarts = self._replicas.processes.restarts[self._id]
            self._logger.info("process %d (restart %d), log %s", process.pid, restarts, process.log_path)
            self._pid, self._ended = process.pid, False
        if process.poll() is not None and not self._ended:
            self._ended = True
            self._logger.warning("process %d ended with exit code %s:\n%s", process.pid, process.poll(), process.tail())

    def _health(self, record: ReplicaRecord | None) -> None:
        if record is None or record.pid != self._pid:
            return
        silence = record.age()
        healthy = silence < self._replicas.config.heartbeat_timeout_s
        news = f"{record.state}{f' ({record.detail})' if record.detail else ''}, policy version {record.version}"
        news += "" if healthy else ", silent"
        if news != self._told:
            self._told = news
            level = logging.INFO if healthy else logging.WARNING
            self._logger.log(level, "%s, last heartbeat %.1f s ago", news, silence)


class ReplicaTable:
    """A table of all replicas that announced themselves, on the flow run's page; updated when something changes."""

    def __init__(self, replicas: ReplicaSet, logger: Logger) -> None:
        self._replicas = replicas
        self._logger = logger
        self._shown: list[dict[str, Any]] = []
        self._artifact: UUID | None = None
        self._due = 0.0

    def look(self) -> None:
        """Show what is new. The table is for looking at: when it cannot be read or shown, training goes on."""
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + TABLE_EVERY_S
        try:
            records = self._replicas.registry.look(self._replicas.ids)
            rows = [self._row(id_, record) for id_, record in sorted(records.items())]
            if rows != self._shown:
                self._show(rows, [record for _, record in sorted(records.items())])
                self._shown = rows
        except Exception as error:
            self._logger.warning("the table of replicas could not be shown: %s", error)

    def _row(self, id_: str, record: ReplicaRecord | None) -> dict[str, Any]:
        restarts = self._replicas.processes.restarts.get(id_)
        return {
            "replica": id_,
            "engine": self._replicas.config.kind if record is None else record.engine,
            "url": "" if record is None else record.url,
            "state": "not announced" if record is None else record.state,
            "loaded version": "" if record is None or record.version is None else record.version,
            "restarts": "started elsewhere" if restarts is None else restarts,
        }

    def _show(self, rows: list[dict[str, Any]], records: list[ReplicaRecord | None]) -> None:
        table = [
            {**row, "heartbeat, s ago": "" if record is None else round(max(0.0, record.age()), 1)}
            for row, record in zip(rows, records, strict=True)
        ]
        if self._artifact is None:
            description = "Replicas of the run as they last changed."
            self._artifact = cast(UUID, create_table_artifact(table, key="replicas", description=description))
        else:
            get_client(sync_client=True).update_artifact(self._artifact, ArtifactUpdate(data=json.dumps(table)))
