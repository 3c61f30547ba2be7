"""``pa verify``: does the periodic schedule make the weights that the synchronous one makes?

The same rollouts are trained on twice, by the loop's own schedule, buffer and learner: synchronously, all groups of an
iteration at once and in prompt order; and periodically, as they arrive in a shuffled order and in random portions.
With ``deterministic: true`` the weights of every iteration must be bitwise equal. Without, sums in another order are
rounded otherwise, and the weights may differ by that much.

The two runs follow each other, so that memory holds one learner; weights wait in a temporary folder meanwhile, one
model for each iteration.
"""

from __future__ import annotations

import logging
import random
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pa_core.config import TrainConfig
from pa_core.config_files import load_config, parse_config
from pa_core.errors import ConfigError, Stopped, TrainingError
from pa_core.loop.draws import Quota
from pa_core.loop.launch import train_alone
from pa_core.loop.learner import Learner
from pa_core.loop.run import Run, open_run, prepare_run
from pa_core.loop.schedule import Selection, between_steps, deliveries
from pa_core.loop.signals import StopSignals
from pa_core.model.fixed_point import deterministic_kernels
from pa_core.model.loading import load_policy
from pa_core.records import Group
from pa_core.store.ledger import Ledger
from pa_core.store.objects import ObjectStore
from pa_core.store.rollouts import RolloutBuffer
from pa_core.tracking.timeline import Timeline

log = logging.getLogger(__name__)

TOLERANCES = {"float32": 1e-2, "bfloat16": 2e-1}
"""Largest norm of the difference, relative to the norm of the movement, that rounding explains.

Not the largest entry: Adam divides each gradient entry by its own size, so the few entries whose gradient is nearly
zero move by rounding alone, as far as any; in a 30-layer model the worst one differed by 12 % of the largest movement.
In the norm, rounding was seen to make 3e-5 to 1e-4 in float32 and 7e-2 in bfloat16, one of six groups left out 0.7.
"""

_NAMED = 5
_TIMEOUT_S = 1.0


@dataclass(frozen=True)
class Comparison:
    """Weights after one iteration, periodic against synchronous.

    Attributes:
        version: number of the version that the iteration made.
        largest_difference: of any weight between the two. largest_movement: of any weight since the initial model.
        relative_difference: norm of the difference over that of the movement; 0 where nothing moved or differs.
        differing: names of the parameters that are not bitwise equal.
    """

    version: int
    largest_difference: float
    largest_movement: float
    relative_difference: float
    differing: tuple[str, ...]

    @classmethod
    def of(
        cls, version: int, periodic: Mapping[str, Tensor], sync: Mapping[str, Tensor], initial: Mapping[str, Tensor]
    ) -> Comparison:
        """Compare tensors of the same names and shapes."""
        difference = movement = 0.0
        squares = {"difference": 0.0, "movement": 0.0}
        differing = []
        for name, ours in periodic.items():
            ours = ours.detach().cpu()
            if not torch.equal(_bits(ours), _bits(sync[name])):
                differing.append(name)
            apart = (ours.double() - sync[name].double()).abs_()
            moved = (sync[name].double() - initial[name].double()).abs_()
            difference, movement = max(difference, float(apart.max())), max(movement, float(moved.max()))
            squares["difference"] += float(apart.square_().sum())
            squares["movement"] += float(moved.square_().sum())
        relative = (
            (squares["difference"] / squares["movement"]) ** 0.5 if squares["movement"] else float(difference > 0)
        )
        return cls(version, difference, movement, relative, tuple(differing))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def verify(target: str, overrides: Sequence[str], iterations: int, store: str | None = None) -> dict[str, Any]:
    """Train twice on the same rollouts and compare the weights after every iteration.

    Args:
        target: a YAML config, which is trained to get rollouts, or the URL of a run that has kept its own.
        overrides: ``key=value``, for either.
        iterations: how many, from the initial model on.
        store: folder or URL for the run of a config; default: a temporary one.

    Returns:
        What ``pa verify --json`` prints; ``passed`` is the verdict.

    Raises:
        ConfigError: no such file or run, a wrong key, or a run with fewer iterations.
    """
    for override in overrides:
        if override.startswith("iterations="):
            raise ConfigError(f"override {override!r}: pa verify compares as many as --iterations={iterations} says")
    with tempfile.TemporaryDirectory(prefix="pa-verify-") as folder:
        scratch = Path(folder)
        if target.endswith((".yaml", ".yml")):
            source = _generate(target, overrides, iterations, store, scratch)
        elif store is not None:
            raise ConfigError(f"--store={store} is for the rollouts of a config; {target} is a run and has its own")
        else:
            source = open_run(target, overrides)
        schedules = _schedules(source.config)
        rollouts = [_rollouts(source, version, iterations) for version in range(iterations)]
        with StopSignals():
            try:
                compared = _compare(schedules, rollouts, scratch)
            except Stopped as stop:
                raise Stopped(f"{stop}; nothing was changed, run it again") from None
    kept = store is not None or not target.endswith((".yaml", ".yml"))
    return _result(source.url if kept else None, source.config, compared)


def _schedules(config: TrainConfig) -> dict[str, TrainConfig]:
    """The config on both schedules. Raises :class:`ConfigError` for one that cannot stream, or needs more processes."""
    if config.parallel.processes > 1:
        raise ConfigError(
            f"parallel.fsdp={config.parallel.fsdp}, parallel.tp={config.parallel.tp}: pa verify trains in one process; "
            "add parallel.fsdp=1 parallel.tp=1"
        )
    tree = config.model_dump(mode="json")
    streams = {"sync": False, "periodic": True}
    try:
        return {
            name: parse_config(tree | {"schedule": tree["schedule"] | {"stream": stream}})
            for name, stream in streams.items()
        }
    except ConfigError as error:
        raise ConfigError(f"there are not two schedules to compare: {error}") from None


def _generate(target: str, overrides: Sequence[str], iterations: int, store: str | None, scratch: Path) -> Run:
    """Train the config for real and return the run, which keeps its rollouts."""
    tree = load_config(target, list(overrides)).model_dump(mode="json")
    _schedules(parse_config(tree))
    config = parse_config(
        tree
        | {
            "run_name": None,
            "iterations": iterations,
            "evaluation": {"enabled": False},
            "checkpoint": {"every": 0},
            "store": tree["store"] | {"url": store or str(scratch / "runs")},
            "tracking": {"uri": f"sqlite:///{scratch / 'mlflow.db'}", "log_model": False},
        }
    )
    run = prepare_run(config, f"verify-{Path(target).stem}")
    try:
        train_alone(run)
    except Stopped:
        if store is not None:
            raise
        raise TrainingError(
            "stopped while generating; nothing was kept. Run it again, with --store to keep the rollouts"
        ) from None
    return run


def _rollouts(source: Run, version: int, iterations: int) -> list[Group]:
    """All groups of iteration ``version``, in the order of the prompt stream."""
    entry = Ledger(source.store).read(version)
    ids = [] if entry is None else [*entry.group_ids, *entry.facts.get("uninformative", [])]
    groups = RolloutBuffer(source.store).stored(version, ids)
    if not ids or len(groups) < len(ids):
        fix = f"ask for at most {version}" if version else "give a config instead, which is trained to get some"
        raise ConfigError(
            f"--iterations={iterations}: {source.url} has kept no complete iteration {version + 1}; {fix}"
        )
    return sorted(groups, key=lambda group: group.prompt.index)


class Arrivals(RolloutBuffer):
    """A rollout buffer whose groups arrive portion by portion, the next one whenever the trainer asks for more."""

    def open(self, version: int, portions: Sequence[Sequence[Group]]) -> None:
        """Open iteration ``version``, in which ``portions`` will arrive."""
        self.expect(version, [group.id for portion in portions for group in portion])
        self._portions = deque(portions)

    def take(self, version: int, timeout_s: float) -> list[Group]:
        """See :meth:`RolloutBuffer.take`."""
        for group in self._portions.popleft() if self._portions else ():
            self.put(group)
        return super().take(version, timeout_s)


def shuffled(groups: Sequence[Group], quota: Quota, arrival: random.Random) -> list[list[Group]]:
    """An iteration's groups as they might have finished: in a random order and in portions of one to three.

    A group that was drawn to replace another one comes after that one.
    """
    running, later = list(groups[: quota.groups]), deque(groups[quota.groups :])
    order: list[Group] = []
    while running:
        order.append(running.pop(arrival.randrange(len(running))))
        if later and not quota.counts(order[-1]):
            running.append(later.popleft())
    portions: list[list[Group]] = []
    while order:
        size = arrival.randint(1, 3)
        portions.append(order[:size])
        order = order[size:]
    return portions


def train(
    config: TrainConfig, rollouts: Sequence[Sequence[Group]], store: ObjectStore
) -> Iterator[Mapping[str, Tensor]]:
    """Yield the initial weights, then those after every iteration on ``rollouts``; tensors are the live ones.

    Groups arrive in prompt order on the synchronous schedule, shuffled by the config's seed on the periodic one.
    """
    learner = Learner(config, load_policy(config.model).model)
    yield learner.weights()
    buffer = Arrivals(store, config.schedule.max_staleness)
    quota, arrival = Quota.of(config), random.Random(config.seed)
    for version, groups in enumerate(rollouts):
        buffer.open(version, shuffled(groups, quota, arrival) if config.schedule.stream else [groups])
        selection = Selection(quota, groups[0].prompt.index, config.optimizer.steps_per_iteration)
        learner.begin_iteration()
        arrivals = deliveries(buffer, Timeline(), config.schedule, version, selection, _TIMEOUT_S)
        for arrived in between_steps(arrivals, learner.step):
            if arrived:
                learner.accumulate(arrived)
        learner.step()
        learner.advance()
        log.info("%s: iteration %d of %d", config.schedule.name, version + 1, len(rollouts))
        yield learner.weights()


def _compare(
    schedules: Mapping[str, TrainConfig], rollouts: Sequence[Sequence[Group]], scratch: Path
) -> list[Comparison]:
    """The synchronous weights go to files, the periodic ones are compared with them."""
    config = schedules["sync"]
    if config.deterministic:
        deterministic_kernels()
    if config.trainer.threads is not None:
        torch.set_num_threads(config.trainer.threads)
    files: list[Path] = []
    for weights in train(config, rollouts, ObjectStore.open(str(scratch / "sync"))):
        files.append(scratch / f"weights-{len(files)}.pt")
        torch.save(dict(weights), files[-1])
    initial = torch.load(files[0], mmap=True, map_location="cpu")
    compared = []
    periodic = train(schedules["periodic"], rollouts, ObjectStore.open(str(scratch / "periodic")))
    for version, weights in enumerate(periodic):
        if version:
            sync = torch.load(files[version], mmap=True, map_location="cpu")
            compared.append(Comparison.of(version, weights, sync, initial))
    return compared


def _result(run_url: str | None, config: TrainConfig, compared: Sequence[Comparison]) -> dict[str, Any]:
    """The verdict and the figures behind it."""
    tolerance = 0.0 if config.deterministic else TOLERANCES[config.model.dtype]
    differing = next((row.differing for row in compared if row.differing), ())
    relative = max(row.relative_difference for row in compared)
    trained = any(row.largest_movement for row in compared)
    passed = trained and (not differing if config.deterministic else relative <= tolerance)
    rows = [{**vars(row), "differing": len(row.differing)} for row in compared]
    return {
        "run_url": run_url,
        "deterministic": config.deterministic,
        "iterations": rows,
        "largest_difference": max(row.largest_difference for row in compared),
        "relative_difference": relative,
        "tolerance": tolerance,
        "trained": trained,
        "bitwise_equal": not differing,
        "first_differing": list(differing[:_NAMED]),
        "passed": passed,
    }


def render(result: Mapping[str, Any]) -> str:
    """One line per iteration, then the verdict in words."""
    lines = ["version   largest difference   largest movement   relative (norms)"]
    for row in result["iterations"]:
        lines.append(
            f"{row['version']:>7}{row['largest_difference']:>21.3e}{row['largest_movement']:>19.3e}"
            f"{row['relative_difference']:>19.1e}"
        )
    names = ", ".join(result["first_differing"])
    if not result["trained"]:
        verdict = (
            "NOTHING COMPARED: no iteration moved any weight, because all samples of each group earned the same; give "
            "more --iterations, or a reward that tells samples apart"
        )
    elif result["bitwise_equal"]:
        verdict = "bitwise equal after every iteration"
    elif result["deterministic"]:
        verdict = f"NOT EQUAL, which deterministic=true promises; the first to differ: {names}"
    elif result["passed"]:
        verdict = (
            f"equal up to rounding: {result['relative_difference']:.1e} of the movement, {result['tolerance']:g} "
            "allowed; deterministic=true makes it bitwise"
        )
    else:
        verdict = (
            f"NOT EQUAL: they differ by {result['relative_difference']:.1e} of the movement, {result['tolerance']:g} "
            f"allowed; the first to differ: {names}"
        )
    return "\n".join([*lines, verdict])
