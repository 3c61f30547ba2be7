"""What is to be evaluated, on which problems: from the words of a command line or a form to a run and its config."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pa_core.config import TrainConfig
from pa_core.config_files import apply_override, load_config, parse_config
from pa_core.errors import ConfigError
from pa_core.evaluation.request import EvaluationRequest
from pa_core.evaluation.sets import BOXED, NAMED_SETS
from pa_core.loop.run import RUN_KEY, Run, open_run, prepare_run
from pa_core.store.objects import ObjectStore
from pa_core.store.weights import WeightStore

_VERSION = re.compile(r"(?P<run>.+)/(?:checkpoints|weights)/v(?P<version>\d+)/?")
_SAME_MEASURE = ("engine.", "scoring.", "store.", "tracking.")
"""Keys that do not change what an evaluation measures."""


@dataclass(frozen=True)
class Target:
    """What a request means.

    Attributes:
        run: where weights and results are; its config is that of the evaluation.
        version: the version to evaluate; None for the latest, whichever that is once replicas can load it.
        name: the set of problems; None for the run's own held-out ones, measured as the run measures them.
        fresh: the run was made for this evaluation and has no weights yet.
    """

    run: Run
    version: int | None
    name: str | None
    fresh: bool


def find_target(request: EvaluationRequest) -> Target:
    """The run, version and config that a request means; a model or config becomes a run of its own at version 0.

    Raises:
        ConfigError: there is no such run or version, or the problems are not said.
    """
    given = [one for one in request.overrides if one.startswith("data.")]
    others = [one for one in request.overrides if not one.startswith("data.")]
    if request.path is not None:
        given = [f"data.path={json.dumps(request.path)}", *given]
    if request.problems in NAMED_SETS and not any(one.startswith("data.path=") for one in given):
        example = NAMED_SETS[request.problems].example
        raise ConfigError(
            f"{request.problems} needs its problems: data.path=FILE, URL or hub id, for example {example}"
        )
    if request.target.endswith((".yaml", ".yml")):
        return _of_config(request, given, others)
    if not request.target.startswith("wheel://"):
        url, version = _split(request)
        if ObjectStore.open(url).exists(RUN_KEY):
            return _of_run(request, url, version, given, others)
    return _of_model(request, given, others)


def _split(request: EvaluationRequest) -> tuple[str, int | None]:
    """The run's URL and the version, which may be part of it."""
    match = _VERSION.fullmatch(request.target)
    if match is None:
        return _absolute(request.target), request.version
    version = int(match["version"])
    if request.version not in (None, version):
        raise ConfigError(f"{request.target} is version {version}, and --version says {request.version}; drop one")
    return _absolute(match["run"]), version


def _absolute(url: str) -> str:
    return url.rstrip("/") if "://" in url else str(Path(url).expanduser().resolve())


def _of_run(request: EvaluationRequest, url: str, version: int | None, given: list[str], others: list[str]) -> Target:
    run = open_run(url)
    tree = run.config.model_dump(mode="json")
    name = _set_problems(request, tree, given, tree["data"])
    _override(tree, others)
    run = Run(run.url, run.name, parse_config(tree), run.store)
    if name is None and any(not one.startswith(_SAME_MEASURE) for one in others):
        name = f"held_out-k{run.config.evaluation.samples}-t{run.config.evaluation.temperature:g}"
    weights = WeightStore(run.store)
    latest = weights.latest()
    if latest is None or (version is not None and weights.manifest(version) is None):
        raise ConfigError(f"{run.url}: version {version} is not published, or not kept any more (latest: {latest})")
    return Target(run, version, name, fresh=False)


def _of_config(request: EvaluationRequest, given: list[str], others: list[str]) -> Target:
    if request.problems == "held_out":
        config, name = load_config(request.target, [*given, *others]), None
    else:
        tree = load_config(request.target).model_dump(mode="json")
        name = _set_problems(request, tree, given, tree["data"])
        _override(tree, others)
        config = parse_config(tree)
    return _fresh(request, config, name, Path(request.target).stem)


def _of_model(request: EvaluationRequest, given: list[str], others: list[str]) -> Target:
    if not given:
        raise ConfigError(
            f"there is no run at {request.target}: {RUN_KEY} is missing. If it is a model, say which problems to "
            "evaluate it on: data.path=FILE, URL or hub id (with --set gsm8k, aime24 or mawps for the columns of those)"
        )
    tree: dict[str, Any] = {"model": {"path": request.target}, "evaluation": {}}
    name = _set_problems(request, tree, given, {})
    tree["data"] = tree["evaluation"]["data"]
    _override(tree, others)
    return _fresh(request, parse_config(tree), name, re.split(r"[/\\]", request.target.rstrip("/"))[-1])


def _fresh(request: EvaluationRequest, config: TrainConfig, name: str | None, stem: str) -> Target:
    if request.version not in (None, 0):
        raise ConfigError(f"{request.target} is no run, so it has no version {request.version}; drop --version")
    return Target(prepare_run(config, f"eval-{_word(stem)}"), 0, name, fresh=True)


def _set_problems(
    request: EvaluationRequest, tree: dict[str, Any], given: list[str], asked: dict[str, Any]
) -> str | None:
    """Put the request's problems into ``evaluation.data`` of a config tree; returns the name of the set.

    Args:
        asked: ``data`` of the run; the policy is asked in the words that it was trained with.
    """
    if request.problems == "held_out" and not given:
        return None
    evaluation = tree["evaluation"]
    data = {key: asked[key] for key in ("system_prompt", "prompt_template") if asked.get(key) is not None}
    named = NAMED_SETS.get(request.problems)
    if named is not None:
        if not asked:
            data["prompt_template"] = BOXED
            tree["sampling"] = {"max_tokens": named.max_tokens}
        data |= named.data
        tree["rewards"], evaluation["metric"] = named.rewards, named.rewards[0]["name"]
    evaluation["data"], evaluation["limit"] = data, None
    _override(evaluation, given)
    if named is not None:
        return request.problems
    return _word(Path(str(data.get("path") or data.get("name"))).stem)


def _override(tree: dict[str, Any], overrides: list[str]) -> None:
    for override in overrides:
        apply_override(tree, override)


def _word(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.") or "model"
