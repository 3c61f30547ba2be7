"""The ``evaluate`` flow: a run's version, a checkpoint or a model on problems of one's choice, and how sure that is.

A module that defines flows must not postpone the evaluation of annotations: a served flow then cannot build its form.
"""

import logging
from typing import TYPE_CHECKING, Any, cast

from prefect import State, flow, get_run_logger
from prefect.artifacts import (
    create_link_artifact,
    create_markdown_artifact,
    create_table_artifact,
)
from prefect.states import Completed

from flows import artifacts, tracking
from flows.progress import ProgressArtifact
from flows.train import failed
from pa_core.errors import UserError
from pa_core.evaluation.request import EvaluationRequest

if TYPE_CHECKING:
    from pa_core.loop.evaluation_run import Outcome

TABLE_ROWS = 50


class ProgressPage:
    """How many problems are done, on the flow run's page and in its log."""

    def __init__(self) -> None:
        self._logger: logging.LoggerAdapter[logging.Logger] = cast(Any, get_run_logger())
        self._artifact = ProgressArtifact("evaluation-progress", self._logger)
        self._told = 0.0

    def show(self, done: int, total: int) -> None:
        """Draw it; every tenth is a line in the log as well."""
        percent, line = round(100 * done / total, 1), f"{done} of {total} problems"
        self._artifact.show(percent, line)
        if percent >= self._told + 10:
            self._told = percent
            self._logger.info(line)


def publish(outcome: "Outcome") -> None:
    """Scores, samples and the way into MLflow, on the flow run's page."""
    from pa_core.evaluation.store import shown_rows

    found = outcome.found
    uri, run_id = found["mlflow_uri"], found["mlflow_run_id"]
    page = tracking.run_page(uri, run_id) if run_id else None
    headline = artifacts.evaluation_headline(found)
    create_markdown_artifact(artifacts.evaluation_page(found, page), key="evaluation", description=headline)
    rows = shown_rows(outcome.table, TABLE_ROWS)
    create_table_artifact(rows, key="evaluation-samples", description=f"The first samples; all: {found['samples_url']}")
    if page is not None:
        create_link_artifact(
            page, link_text="MLflow: the run that this evaluation is logged to", key="evaluation-mlflow"
        )


@flow(name="evaluate", persist_result=False, log_prints=False)
def evaluate(request: EvaluationRequest) -> State[Any]:
    """Evaluate a policy: pass@1, avg@k and maj@k with 95 % confidence intervals, with a table of samples.

    Args:
        request: What to evaluate, and on which problems.
    """
    # Here, because it brings torch, which the host that serves the deployments can do without.
    from pa_core.loop.evaluation_run import evaluate as run_evaluation

    progress = ProgressPage()
    try:
        outcome = run_evaluation(request, progress.show)
    except UserError as error:
        return failed(str(error), error.exit_code)
    progress.show(outcome.found["problems"], outcome.found["problems"])
    publish(outcome)
    return Completed(message=artifacts.evaluation_headline(outcome.found), data=outcome.found)
