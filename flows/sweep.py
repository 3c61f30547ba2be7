"""The ``sweep`` flow: a grid or list of runs, so many at a time, and the best of them in the model registry."""

from typing import Any

from prefect import State, flow
from prefect.states import Completed, Failed
from prefect.task_runners import ThreadPoolTaskRunner

from flows.study import StudyPage, publish
from flows.train import end_mlflow_runs, failed, run_name_hint
from pa_core.config import TrainConfig
from pa_core.errors import UserError
from pa_core.study.config import SweepConfig
from pa_core.study.sweep import plan_sweep
from pa_core.study.sweep import sweep as train_and_choose

MAX_CONCURRENCY = 64


@flow(
    name="sweep",
    task_runner=ThreadPoolTaskRunner(max_workers=MAX_CONCURRENCY + 2),  # type: ignore[arg-type]
    persist_result=False,
    log_prints=False,
    on_crashed=[end_mlflow_runs],
    on_cancellation=[end_mlflow_runs],
)
def sweep(config: TrainConfig, sweep: SweepConfig) -> State[Any]:
    """Train a grid over any keys of a config, or a list of runs, and register the best in MLflow.

    A run that fails loses nobody else. Each has its own MLflow run, below one that holds the table and the picture.
    Give a name that exists to train only what is missing: stopped runs go on from their checkpoint.

    Args:
        config: What all runs have in common: every key of the configuration.
        sweep: The grid or list of runs, how many at a time, and how the best is chosen.
    """
    try:
        study = plan_sweep(config, sweep, run_name_hint())
        with StudyPage(study, config.tracking.uri) as page:
            found = train_and_choose(study, sweep, [page], tags=page.tags, opened=page.opened)
    except UserError as error:
        return failed(str(error), error.exit_code)
    pictures = {"sweep.png": found.picture} if found.picture is not None else {}
    publish("sweep", found.report, list(found.rows), pictures, found.headline)
    if found.best is None:
        return Failed(message=found.headline)
    return Completed(message=found.headline, data=found.result())
