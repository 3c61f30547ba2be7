"""What a comparison and a sweep have in common: the parent run around the children, whatever ends them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from pa_core.errors import Stopped, UserError, first_line
from pa_core.loop.run import sole_trainer
from pa_core.study.children import Crew, Observer, Outcome
from pa_core.study.parent_run import ParentRun
from pa_core.study.plan import Child, Study

Result = TypeVar("Result")


class _Adoption(Observer):
    """Hangs every run below the study's in MLflow, as soon as it is there."""

    def __init__(self, parent: ParentRun, tags: Mapping[str, str]) -> None:
        self._parent = parent
        self._tags = tags

    def tracked(self, child: Child, mlflow_run_id: str) -> None:
        self._parent.adopt(mlflow_run_id, {**self._tags, "study.run": child.name})


def run_study(
    study: Study,
    observers: Sequence[Observer],
    conclude: Callable[[ParentRun, list[Outcome]], Result],
    *,
    concurrency: int = 1,
    devices: Sequence[str] = (),
    tags: Mapping[str, str] | None = None,
    opened: Callable[[ParentRun], None] = lambda parent: None,
) -> Result:
    """Train the runs of a study that are missing, and draw the conclusion from all of them.

    Args:
        conclude: writes what came of it to the parent run.
        concurrency: runs at a time. devices: what each may see.
        tags: for the parent and every child, such as the flow run they belong to.
        opened: called with the parent run before anything is trained.

    Raises:
        ConfigError: MLflow cannot be used, or another process works on this study.
        Stopped: it was interrupted; the runs in training keep a checkpoint, and the same study goes on with them.
    """
    with sole_trainer(study.as_run):
        parent = ParentRun.start(study, tags or {})
        study.record(parent.run_id)
        opened(parent)
        watchers = [_Adoption(parent, tags or {}), *observers]
        status: str = "KILLED"
        try:
            with Crew(study, watchers, concurrency, devices) as crew:
                outcomes = crew.train()
            result = _concluded(study, partial(conclude, parent, outcomes))
            status = "FINISHED" if any(one.state == "finished" for one in outcomes) else "FAILED"
            return result
        except Stopped as stop:
            raise Stopped(f"{stop}; go on with the same command and --name {study.name}") from None
        except Exception:
            status = "FAILED"
            raise
        finally:
            parent.finish(status)  # type: ignore[arg-type]


def _concluded(study: Study, conclude: Callable[[], Result]) -> Result:
    """The conclusion, or what to do when MLflow, which it is drawn from, cannot be read now."""
    from mlflow.exceptions import MlflowException

    try:
        return conclude()
    except MlflowException as error:
        cause = first_line(error)
        raise UserError(
            f"{study.kind} {study.name}: all runs ended, but MLflow cannot be read: {cause}. The same command and "
            f"--name {study.name} looks at them again, and trains nothing that is finished"
        ) from error
