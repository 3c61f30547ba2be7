"""A run's place in the store: made once, found again by its URL."""

from __future__ import annotations

import json
import platform
import re
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from pa_core.config import TrainConfig
from pa_core.config_files import apply_override, parse_config
from pa_core.errors import ConfigError
from pa_core.processes import running_process
from pa_core.store.objects import ObjectStore

RUN_KEY = "run.json"
SUMMARY_KEY = "summary.json"
TRAINER_KEY = "trainer.json"


@dataclass(frozen=True)
class Run:
    """A prepared run: its configuration and the store below its URL."""

    url: str
    name: str
    config: TrainConfig
    store: ObjectStore

    @property
    def log_folder(self) -> Path:
        """Local folder for the logs of the run's processes: in the run's own folder where that is local."""
        if "://" not in self.url or self.url.startswith("file://"):
            return Path(self.url.removeprefix("file://")) / "logs"
        return Path(tempfile.gettempdir()) / "periodic-asynchrony" / self.name

    def describe(self, **facts: Any) -> None:
        """Add facts (fingerprints, MLflow run id) to ``run.json``."""
        record = json.loads(self.store.read(RUN_KEY)) | facts
        self.store.publish(RUN_KEY, json.dumps(record, indent=2).encode(), exclusive=False)

    def facts(self) -> dict[str, Any]:
        """The content of ``run.json``."""
        record: dict[str, Any] = json.loads(self.store.read(RUN_KEY))
        return record


def join_url(root: str, name: str) -> str:
    """A URL below ``root``; a local folder becomes absolute, so that other processes find it."""
    if "://" in root:
        return f"{root.rstrip('/')}/{name}"
    return str(Path(root).expanduser().resolve() / name)


def prepare_run(config: TrainConfig, name_hint: str = "run") -> Run:
    """Create the run's folder with ``run.json``.

    The folder must be new: it is the run's alone, and goes as a whole should the run be refused.

    Raises:
        ConfigError: when a run of this name exists already, or something else has the folder.
        StoreError: when the store cannot be written.
    """
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    name = config.run_name or f"{name_hint}-{config.schedule.name}-s{config.seed}-{stamp}"
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise ConfigError(
            f"run_name={name!r}: use letters, digits, '.', '_' and '-' only, and a letter or digit to begin with"
        )
    url = join_url(config.store.url, name)
    store = ObjectStore.open(url)
    if not store.exists(RUN_KEY) and (others := store.list(unfinished=True)):
        raise ConfigError(
            f"run_name={name!r}: {url} has other things in it, such as {others[0]}; choose another name or store.url"
        )
    record = {"name": name, "id": uuid.uuid4().hex, "created": stamp, "config": config.model_dump(mode="json")}
    try:
        store.publish(RUN_KEY, json.dumps(record, indent=2).encode(), exclusive=True)
    except FileExistsError:
        raise ConfigError(
            f"run_name={name!r}: {url} exists already; choose another name or resume it with --resume {url}"
        ) from None
    return Run(url, name, config, store)


def open_run(url: str, overrides: Sequence[str] = ()) -> Run:
    """Open a prepared run, its config changed by ``overrides``.

    Raises:
        ConfigError: when there is none at ``url``, or an override does not fit.
    """
    if "://" not in url:
        url = str(Path(url).expanduser().resolve())
    store = ObjectStore.open(url)
    if not store.exists(RUN_KEY):
        raise ConfigError(f"there is no run at {url}: {RUN_KEY} is missing")
    try:
        record = json.loads(store.read(RUN_KEY))
        name, tree = record["name"], record["config"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{url}/{RUN_KEY} is not the record of a run: {type(error).__name__}: {error}") from None
    for override in overrides:
        apply_override(tree, override)
    return Run(url, name, parse_config(tree), store)


def resume_run(url: str, overrides: Sequence[str] = ()) -> Run:
    """Open a run that is to go on.

    Args:
        overrides: how to go on; only what does not change the result may be another, ``parallel``, ``trainer`` and
            ``metrics``.

    Raises:
        ConfigError: when there is none at ``url``, it is finished, or an override changes something else.
    """
    for override in overrides:
        if not override.startswith(("parallel.", "trainer.", "metrics.")):
            raise ConfigError(
                f"override {override!r}: a stopped run goes on as it began; only keys of parallel, trainer and "
                "metrics may change"
            )
    run = open_run(url, overrides)
    if run.store.exists(SUMMARY_KEY):
        raise ConfigError(f"{run.url} is finished, all {run.config.iterations} iterations of it; start a new run")
    return run


@contextmanager
def sole_trainer(run: Run) -> Iterator[None]:
    """Be the only process that trains ``run``; two would publish different weights under one version.

    ``trainer.json`` says who trains. One that a crash left behind is taken over where its process can be seen to be
    gone, which is on its own host only.

    Raises:
        ConfigError: when another process trains the run, or may.
    """
    me = psutil.Process()
    mine = json.dumps({"host": platform.node(), "pid": me.pid, "started": me.create_time()}).encode()
    try:
        run.store.publish(TRAINER_KEY, mine)
    except FileExistsError:
        other = json.loads(run.store.read(TRAINER_KEY))
        if other["host"] != platform.node() or running_process(other["pid"], other["started"]) is not None:
            raise ConfigError(
                f"{run.url} is being trained by process {other['pid']} on {other['host']}; wait for it or stop it. "
                f"If that host is gone for good, remove {TRAINER_KEY} from the run's folder"
            ) from None
        run.store.publish(TRAINER_KEY, mine, exclusive=False)
    try:
        yield
    finally:
        run.store.delete(TRAINER_KEY)
