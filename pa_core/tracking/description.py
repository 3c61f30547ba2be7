"""Texts of a tracked run: its description, its parameters, its tags."""

from __future__ import annotations

import getpass
import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pa_core
from pa_core.config import DataConfig, TrainConfig
from pa_core.tracking.metrics import glossary
from pa_core.tracking.origin import origin_tags

PARAM_LIMIT = 500


def flatten(tree: Any, prefix: str = "") -> dict[str, str]:
    """A config tree as dotted keys and short text values; lists of sections by index, empty sections as ``{}``."""
    if isinstance(tree, Mapping) and tree:
        items = tree.items()
    elif isinstance(tree, list) and any(isinstance(item, Mapping) for item in tree):
        items = {str(index): item for index, item in enumerate(tree)}.items()
    else:
        text = tree if isinstance(tree, str) else json.dumps(tree)
        return {prefix: text if len(text) <= PARAM_LIMIT else text[: PARAM_LIMIT - 1] + "…"}
    return {
        key: value
        for name, child in items
        for key, value in flatten(child, f"{prefix}.{name}" if prefix else str(name)).items()
    }


def git_commit(folder: Path) -> str | None:
    """Commit of the checkout that ``folder`` is in, ``-dirty`` when files differ from it; None outside of git."""
    try:
        commit = _git(folder, "rev-parse", "HEAD")
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{commit}-dirty" if changed else commit


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=True
    )
    return done.stdout.strip()


def data_source(data: DataConfig) -> tuple[str, str, str]:
    """Name, MLflow source type and JSON source of a data set."""
    if data.name is not None:
        facts = {"reasoning_gym": data.name, "options": json.dumps(data.options, sort_keys=True)}
        return data.name, "code", json.dumps({"tags": facts})
    assert data.path is not None
    if "://" in data.path:
        scheme = data.path.partition("://")[0]
        kind, key = ("http", "url") if scheme in ("http", "https") else (scheme, "uri")
        return data.path.rstrip("/").rpartition("/")[2], kind, json.dumps({key: data.path})
    if Path(data.path).suffix in (".jsonl", ".parquet", ".json"):
        return Path(data.path).name, "local", json.dumps({"uri": str(Path(data.path).resolve())})
    return data.path, "hugging_face", json.dumps({"path": data.path, "split": data.split})


def run_tags(
    config: TrainConfig, run_url: str, fingerprints: Mapping[str, str], versions: Mapping[str, str]
) -> dict[str, str]:
    """Tags that runs are filtered and compared by."""
    commit = git_commit(Path(pa_core.__file__).parent)
    tags = {
        "schedule": config.schedule.name,
        "engine": config.engine.kind,
        "model": config.model.path,
        "data": config.data.name or config.data.path or "",
        "seed": str(config.seed),
        "code_version": commit or f"periodic-asynchrony {pa_core.__version__}",
        "package_version": pa_core.__version__,
        "run_url": run_url,
        "mlflow.user": _user(),
        "mlflow.source.name": "pa train",
        "mlflow.source.type": "LOCAL",
        "mlflow.note.content": describe(config, run_url),
    }
    if commit:
        tags["mlflow.source.git.commit"] = commit.removesuffix("-dirty")
    tags |= {f"fingerprint.{name}": value for name, value in fingerprints.items()}
    return tags | {f"version.{name}": value for name, value in versions.items()} | origin_tags()


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # no such user in the password database, as in some containers
        return "unknown"


def describe(config: TrainConfig, run_url: str) -> str:
    """The run's description in Markdown: what it is, how to read it, what the words mean."""
    how = (
        "the trainer consumes each group as soon as it is generated and scored"
        if config.schedule.stream
        else "the trainer waits until all groups of an iteration are generated"
    )
    rewards = ", ".join(f"`{reward.name}` x {reward.weight:g}" for reward in config.rewards)
    return _TEMPLATE.format(
        schedule=config.schedule.name,
        how=how,
        model=config.model.path,
        data=config.data.name or config.data.path,
        rewards=rewards,
        iterations=config.iterations,
        prompts=config.prompts_per_iteration,
        samples=config.group_size,
        replicas=config.engine.replicas,
        engine=config.engine.kind,
        seed=config.seed,
        run_url=run_url,
        glossary=glossary(),
    )


_TEMPLATE = """\
Reinforcement learning of `{model}` on `{data}` (GRPO, **{schedule}** schedule: {how}).

{iterations} iterations of {prompts} prompts x {samples} responses · rewards: {rewards} · \
{replicas} x `{engine}` replica(s) · seed {seed} · run folder `{run_url}`

### How to read this run
1. **Does it learn?** `reward/mean` should rise, and so should `eval/accuracy` (problems it never trains on). \
If only the first rises, the reward is being gamed or memorised: read the sample rollouts below *Artifacts → tables*, \
or below *Traces* what single groups were asked, answered, earned and taught.
2. **Is it healthy?** `train/entropy` far from 0, `reward/zero_variance_groups` well below {prompts}, \
`train/grad_norm` without spikes, `train/logprob_mismatch_mean` near 0, `reward/unscored_share` near 0.
3. **Is it fast?** `perf/idle_generate` and `perf/idle_train` say which side waits; \
`perf/overlap` says how much of the shorter side's work was hidden; `perf/bound` is the best speed-up over the \
synchronous schedule that these times allow, reached at overlap 1. See *Artifacts → timeline*: the picture, and a \
trace to open at [ui.perfetto.dev](https://ui.perfetto.dev).
4. **Can it be repeated?** `config.yaml` with the same seed, code and data (tags `code_version`, `fingerprint.*`).
5. **Which version is best?** The experiment's *Models* (GenAI view: *Agent versions*) compare those that checkpoints \
kept, and the last one, by the reward and accuracy of their own step; the param `weights` says where they are, the tag \
`stored` whether they still are.

### Words
- **iteration**: {prompts} groups generated with one policy version, then one update; the x-axis (*step*) of all \
charts but `system/`; the value at step *t* is about version *t* and what was done with it.
- **group**: one prompt with its {samples} responses; a response earns its advantage relative to its group.
- **policy version**: the weights after so many iterations; iteration *t* generates and trains with version *t*.
- **replica**: a process that generates responses. **publish / load**: making new weights visible, taking them over.
- **idle**: time one side spends waiting for the other. **overlap**: both sides working at once. \
**staleness**: versions between generating a token and training on it; 0 here.

### Metrics
{glossary}
"""
