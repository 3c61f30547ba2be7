"""A progress artifact on a flow run's page."""

import logging
from typing import Any, cast
from uuid import UUID

from prefect.artifacts import create_progress_artifact, update_progress_artifact


class ProgressArtifact:
    """Made when it is first shown, updated from then on.

    Progress is for looking at: when it cannot be shown, a warning says so, and the work goes on.
    """

    def __init__(self, key: str, logger: "logging.Logger | logging.LoggerAdapter[Any]") -> None:
        self._key = key
        self._logger = logger
        self._artifact: UUID | None = None
        self._drawn: tuple[float, str] | None = None

    def show(self, percent: float, line: str) -> None:
        """Draw ``line`` at ``percent``, unless it stands there already."""
        if (percent, line) == self._drawn:
            return
        try:
            if self._artifact is None:
                self._artifact = cast(UUID, create_progress_artifact(percent, key=self._key, description=line))
            else:
                update_progress_artifact(self._artifact, percent, description=line)
            self._drawn = (percent, line)
        except Exception as error:
            self._logger.warning("progress could not be shown: %s", error)
