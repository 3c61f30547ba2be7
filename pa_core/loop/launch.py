"""Two ways to run a prepared run: with replicas of our own, or attached to replicas that others started."""

from __future__ import annotations

from pa_core.loop.progress import ProgressBar
from pa_core.loop.run import Run
from pa_core.loop.services import replica_set
from pa_core.loop.signals import StopSignals
from pa_core.loop.trainer import Trainer
from pa_core.tracking.summary import RunSummary


def train_alone(run: Run) -> RunSummary:
    """Start the run's replicas, train, and end the replicas whatever happens."""
    with StopSignals() as signals, replica_set(run) as replicas, ProgressBar() as bar:
        return Trainer(run, signals, bar.update, replicas).run()


def train_attached(run: Run) -> RunSummary:
    """Train with replicas that somebody else starts and stops; PA_API_KEY must be the run's key."""
    with StopSignals() as signals, ProgressBar() as bar:
        return Trainer(run, signals, bar.update).run()
