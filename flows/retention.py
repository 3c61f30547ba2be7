"""The ``retention`` flow: makes room in a store by removing what finished runs no longer need. Looks only, by default.

A module that defines flows must not postpone the evaluation of annotations: a served flow then cannot build its form.
"""

from datetime import UTC, datetime, timedelta
from typing import Any

from prefect import State, flow, get_run_logger
from prefect.artifacts import create_table_artifact
from prefect.states import Completed
from pydantic import Field

from flows.train import failed
from pa_core.config import StoreConfig
from pa_core.config_section import Section
from pa_core.errors import UserError
from pa_core.loop.retention import PARTS, Part, dispensable, finished_runs, remove


class Retention(Section):
    """What to remove of which runs. Runs that could go on, and the last version of every run, are never touched."""

    store_url: str = Field(StoreConfig().url, description="Where the runs are, as store.url.")
    older_than_days: float = Field(30.0, ge=0, description="Only runs that ended so many days ago.")
    parts: list[Part] = Field(
        list(PARTS),
        min_length=1,
        description="rollouts: the samples of all iterations; checkpoints: optimizer state; weights: all versions but "
        "the last. Versions that MLflow's external models name are among the latter.",
    )
    dry_run: bool = Field(True, description="Only list what would be removed.")


def clear(retention: Retention) -> list[dict[str, Any]]:
    """Remove, or only find, what the form says; a row per run. Raises :class:`StoreError`."""
    rows = []
    before = datetime.now(UTC) - timedelta(days=retention.older_than_days)
    for run in finished_runs(retention.store_url, before):
        found = dispensable(run, retention.parts)
        if found and not retention.dry_run:
            remove(run, [key for keys in found.values() for key in keys])
        if found:
            counts = {f"{part}, objects": len(found.get(part, ())) for part in retention.parts}
            rows.append({"run": run.name, "ended": f"{run.ended:%Y-%m-%d}", **counts})
            get_run_logger().info("%s: %s", run.name, counts)
    return rows


@flow(name="retention", persist_result=False, log_prints=False)
def retention(what: Retention = Retention()) -> State[Any]:  # noqa: B008
    """Remove rollouts, checkpoints and older weights of finished runs; a dry run unless told otherwise.

    Args:
        what: What to remove of which runs.
    """
    try:
        rows = clear(what)
    except UserError as error:
        return failed(str(error), error.exit_code)
    did = "would be removed (dry run)" if what.dry_run else "removed"
    create_table_artifact(rows, key="retention", description=f"Objects that {did}, by run.")
    return Completed(message=f"{len(rows)} runs with parts that {did}" if rows else "nothing to remove", data=rows)
