"""The ``compare`` flow: one config on both schedules, or in any variants, one after the other, and what was equal."""

from typing import Any

from prefect import State, flow
from prefect.states import Completed, Failed
from prefect.task_runners import ThreadPoolTaskRunner

from flows.study import StudyPage, publish
from flows.train import end_mlflow_runs, failed, run_name_hint
from pa_core.config import TrainConfig
from pa_core.errors import UserError
from pa_core.study.compare import compare as train_and_compare
from pa_core.study.compare import plan_comparison
from pa_core.study.config import CompareConfig


@flow(
    name="compare",
    task_runner=ThreadPoolTaskRunner(max_workers=4),  # type: ignore[arg-type]
    persist_result=False,
    log_prints=False,
    on_crashed=[end_mlflow_runs],
    on_cancellation=[end_mlflow_runs],
)
def compare(config: TrainConfig, comparison: CompareConfig = CompareConfig()) -> State[Any]:  # noqa: B008
    """Train one config synchronously and periodically, or in any variants, and compare the runs.

    The runs follow each other, since they would distort each other's times. Each has its own MLflow run, below one
    that holds the table, the pictures and the verdict. Give a name that exists to train only what is missing.

    Args:
        config: What all runs have in common: every key of the configuration.
        comparison: The variants, and what each changes in the configuration.
    """
    try:
        study = plan_comparison(config, comparison, run_name_hint())
        with StudyPage(study, config.tracking.uri) as page:
            compared = train_and_compare(study, [page], tags=page.tags, opened=page.opened)
    except UserError as error:
        return failed(str(error), error.exit_code)
    publish("comparison", compared.report, list(compared.rows), compared.pictures, compared.headline)
    if compared.failed:
        return Failed(message=f"without a result: {', '.join(compared.failed)}; {compared.headline}")
    return Completed(message=compared.headline, data=compared.result())
