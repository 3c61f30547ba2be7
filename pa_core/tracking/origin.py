"""Which flow run a process belongs to, so that its MLflow run says so from its first moment on."""

from __future__ import annotations

import os

FLOW_RUN_TAG = "prefect.flow_run_id"
"""Tag of an MLflow run with the id of the flow run whose processes log it."""

FLOW_RUN_VARIABLE = "PREFECT__FLOW_RUN_ID"
"""Environment variable by which Prefect tells a flow's process its run; the processes that it starts inherit it."""


def origin_tags() -> dict[str, str]:
    """The tag that names the flow run of this process; empty outside of one."""
    flow_run_id = os.environ.get(FLOW_RUN_VARIABLE)
    return {FLOW_RUN_TAG: flow_run_id} if flow_run_id else {}
