"""Ways to train: a new run, a prepared or stopped one, or one whose replicas others started."""

from __future__ import annotations

from pa_core.config import TrainConfig
from pa_core.errors import UserError
from pa_core.loop.joining import joined
from pa_core.loop.progress import ProgressBar
from pa_core.loop.run import Run, prepare_run, sole_trainer
from pa_core.loop.services import replica_set
from pa_core.loop.signals import StopSignals
from pa_core.loop.trainer import Trainer
from pa_core.tracking.summary import RunSummary


def train_new(config: TrainConfig, name_hint: str) -> RunSummary:
    """Prepare a run and train it. Input that turns out bad before anything began leaves no folder behind."""
    run = prepare_run(config, name_hint)
    try:
        return train_alone(run)
    except UserError as error:
        if error.exit_code == 2 and "mlflow_run_id" not in run.facts():
            run.store.delete("")
        raise


def train_alone(run: Run) -> RunSummary:
    """Start the run's replicas, train, and end the replicas whatever happens."""
    with (
        StopSignals() as signals,
        sole_trainer(run),
        replica_set(run) as replicas,
        joined(run, signals) as (layout, ranks),
        ProgressBar() as bar,
    ):
        return Trainer(run, signals, bar.update, replicas, layout, ranks).run()


def train_attached(run: Run) -> RunSummary:
    """Train with replicas that somebody else starts and stops; PA_API_KEY must be the run's key."""
    with StopSignals() as signals, sole_trainer(run), joined(run, signals) as (layout, ranks), ProgressBar() as bar:
        return Trainer(run, signals, bar.update, None, layout, ranks).run()
