"""From a config and its variants to runs with names and places; whatever cannot be trained is refused here."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from pa_core.config import TrainConfig
from pa_core.config_files import apply_override, parse_config
from pa_core.errors import ConfigError
from pa_core.loop.run import RUN_KEY, SUMMARY_KEY, Run, join_url, open_run
from pa_core.store.objects import ObjectStore
from pa_core.study.config import RESERVED, Variant
from pa_core.tracking.description import flatten

RECORD_KEY = "study.json"
NAME = re.compile(r"[A-Za-z0-9._-]+")
LONGEST_NAME = 60
RESUMABLE = ("parallel.", "trainer.", "metrics.")
"""Keys that may change when a stopped run goes on; see :func:`pa_core.loop.run.resume_run`."""


@dataclass(frozen=True)
class Child:
    """One run of a study, before it is trained.

    Attributes:
        name: what tables and pictures call it.
        overrides: what it changes in the study's config.
        config: its own config, with its name and place.
        url: its folder in the store.
        going_on: overrides with which a run that is there already is resumed; None when there is none.
        finished: it was trained to its end by an earlier start of the study.
    """

    name: str
    overrides: tuple[str, ...]
    config: TrainConfig
    url: str
    going_on: tuple[str, ...] | None = None
    finished: bool = False


@dataclass(frozen=True)
class Study:
    """Runs that belong together, in one folder of the store.

    Attributes:
        kind: ``compare`` or ``sweep``.
        name: of the study, and of its folder.
        url: the folder; each run has one of its own below it.
        base: the config that the runs are variants of.
        mlflow_run_id: the parent run that an earlier start made.
    """

    kind: str
    name: str
    url: str
    base: TrainConfig
    children: tuple[Child, ...]
    store: ObjectStore
    mlflow_run_id: str | None = None

    def record(self, mlflow_run_id: str) -> None:
        """Note in the study's folder what an interrupted study needs to go on."""
        record = {"kind": self.kind, "name": self.name, "mlflow_run_id": mlflow_run_id}
        self.store.publish(RECORD_KEY, json.dumps(record, indent=2).encode(), exclusive=False)

    @property
    def as_run(self) -> Run:
        """The study's folder as a run's, for what works on either."""
        return Run(self.url, self.name, self.base, self.store)


def plan(kind: str, name: str | None, hint: str, base: TrainConfig, variants: Sequence[Variant]) -> Study:
    """The study of ``variants`` of ``base``; nothing is written.

    Args:
        kind: ``compare`` or ``sweep``.
        name: of the study; one that exists goes on. None makes one of ``hint`` and the time.

    Raises:
        ConfigError: a name or override that does not fit, or a folder that holds other runs than these.
    """
    prefix = hint if hint == kind else f"{hint}-{kind}"
    name = name or f"{prefix}-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    if not NAME.fullmatch(name):
        raise ConfigError(f"name={name!r}: use letters, digits, '.', '_' and '-' only")
    url = join_url(base.store.url, name)
    store = ObjectStore.open(url)
    labels = [variant.name or label(variant.overrides) for variant in variants]
    if twice := sorted({one for one in labels if labels.count(one) > 1}):
        raise ConfigError(f"{kind} {name}: two runs are called {', '.join(twice)}; give each a name of its own")
    children = [_child(name, url, base, one, variant.overrides) for one, variant in zip(labels, variants, strict=True)]
    return Study(kind, name, url, base, tuple(children), store, _known_parent(store, kind, name))


def label(overrides: Sequence[str]) -> str:
    """A short name made of overrides: ``learning_rate-1e-06.seed-1``; the same ones always give the same."""
    if not overrides:
        return "unchanged"
    parts = []
    for override in overrides:
        key, _, value = override.partition("=")
        parts.append(f"{key.rpartition('.')[2]}-{value.strip()}")
    text = ".".join(parts)
    plain = re.sub(r"[^A-Za-z0-9._-]+", "_", text).strip("_")
    if plain == text and len(plain) <= LONGEST_NAME:
        return plain
    return f"{plain[:LONGEST_NAME]}-{hashlib.sha256(' '.join(overrides).encode()).hexdigest()[:6]}"


def _child(study: str, url: str, base: TrainConfig, name: str, overrides: Sequence[str]) -> Child:
    if not NAME.fullmatch(name):
        raise ConfigError(f"run name {name!r}: use letters, digits, '.', '_' and '-' only")
    tree = base.model_dump(mode="json")
    try:
        for override in overrides:
            key = override.partition("=")[0]
            if key in RESERVED:
                raise ConfigError(f"override {override!r}: {key} is the same for all runs; set it in the config")
            apply_override(tree, override)
        run_name = f"{study}.{name}"
        tree = tree | {"run_name": run_name, "store": {**tree["store"], "url": url}}
        return _known(Child(name, tuple(overrides), parse_config(tree), join_url(url, run_name)))
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None


def _known(child: Child) -> Child:
    """The child with what an earlier start left of it. Raises :class:`ConfigError` when that was trained otherwise."""
    if not ObjectStore.open(child.url).exists(RUN_KEY):
        return child
    run = open_run(child.url)
    there, asked = (flatten(one.model_dump(mode="json")) for one in (run.config, child.config))
    changed = {key: value for key, value in asked.items() if there.get(key) != value}
    changed |= {key: "nothing" for key in there if key not in asked}
    if other := [key for key in changed if not key.startswith(RESUMABLE)]:
        told = ", ".join(f"{key} is {there.get(key, 'nothing')} there and {changed[key]} here" for key in other[:3])
        raise ConfigError(f"{child.url} was trained with other settings: {told}. Choose another name for the study")
    going_on = tuple(f"{key}={value}" for key, value in changed.items())
    return Child(child.name, child.overrides, child.config, child.url, going_on, run.store.exists(SUMMARY_KEY))


def _known_parent(store: ObjectStore, kind: str, name: str) -> str | None:
    """The MLflow run of an earlier start. Raises :class:`ConfigError` when the folder is that of something else."""
    if store.exists(RUN_KEY):
        raise ConfigError(f"name={name!r}: {store.url} is a run; choose another name")
    found = store.find(RECORD_KEY)
    if found is None:
        return None
    record = json.loads(found)
    if record["kind"] != kind:
        raise ConfigError(f"name={name!r}: {store.url} is of a {record['kind']}, not of a {kind}; choose another name")
    return str(record["mlflow_run_id"])
