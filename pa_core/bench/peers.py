"""``pa bench peers``: the same training step by us, by TRL's GRPOTrainer and by PrefixGrouper, side by side.

Same model, recorded group, rewards, dtype and threads; forward, loss and backward. Every side is a process of its
own, the peers' in their environment (``make peers``), which has the same torch and transformers as ours. They are
timed alternately. That they do the same work is shown by their gradients, which must agree.
"""

from __future__ import annotations

import contextlib
import logging
import os
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from pa_core.bench.flops import ModelShape, flop_ratio, shared_work, token_ratio
from pa_core.bench.grid import Point
from pa_core.bench.models import model_config
from pa_core.bench.shared_prompt import Settings, gradient_distance
from pa_core.bench.side import Side
from pa_core.bench.workload import Recorded
from pa_core.errors import ConfigError
from pa_core.model.loading import resolve_source

log = logging.getLogger(__name__)

PYTHON_VARIABLE = "PA_PEERS_PYTHON"
DEFAULT_PYTHON = ".venv-peers/bin/python"
_PROBE = (
    "import pa_core.bench.side, importlib.metadata as m; "
    "print(*(m.version(n) for n in ('trl', 'prefix_grouper', 'torch', 'transformers')))"
)
_PROBE_LIMIT_S = 120
PEERS = {"trl": "pa_core.bench.trl_side", "prefix_grouper": "pa_core.bench.prefix_grouper_side"}


def peers_python() -> Path:
    """The interpreter of the peers' environment.

    Raises:
        ConfigError: there is none where it should be.
    """
    path = Path(os.environ.get(PYTHON_VARIABLE) or DEFAULT_PYTHON).expanduser().absolute()
    if not path.is_file():
        raise ConfigError(
            f"the peers' environment has no interpreter {path}; make it with `make peers`, or name one that has trl, "
            f"prefix-grouper and this package with ${PYTHON_VARIABLE}"
        )
    return path


def peer_versions() -> dict[str, str]:
    """Versions of ``trl``, ``prefix_grouper``, ``torch`` and ``transformers`` in the peers' environment.

    Raises:
        ConfigError: it lacks one of them, or torch or transformers differ from ours.
    """
    python = peers_python()
    probe = subprocess.run(
        [str(python), "-c", _PROBE], capture_output=True, text=True, timeout=_PROBE_LIMIT_S, check=False
    )
    if probe.returncode:
        reason = (probe.stderr.strip().splitlines() or ["no message"])[-1]
        raise ConfigError(f"the peers' environment {python} is incomplete: {reason}; `make peers` makes one")
    versions = dict(zip(("trl", "prefix_grouper", "torch", "transformers"), probe.stdout.split(), strict=True))
    import torch
    import transformers

    for name, ours in (("torch", torch.__version__), ("transformers", transformers.__version__)):
        if versions[name].partition("+")[0] != ours.partition("+")[0]:
            raise ConfigError(
                f"the peers' environment {python} has {name} {versions[name]}, here it is {ours}: the comparison "
                "would be of versions; `make peers` makes one with the same"
            )
    return versions


def run(settings: Settings, point: Point, peers: list[str] | None = None) -> dict[str, Any]:
    """Time the step of all sides.

    Args:
        peers: names in :data:`PEERS`; default all.

    Raises:
        ConfigError: the peers' environment is missing or not comparable.
        UserError: a side failed.
    """
    versions = peer_versions()
    folder_of_model = resolve_source(settings.model)
    config = model_config(folder_of_model)
    recorded = Recorded(config.get_text_config().vocab_size, *point.sizes)
    common: dict[str, Any] = {
        "model": folder_of_model,
        "dtype": settings.dtype,
        "device": settings.device,
        "threads": settings.threads,
    }
    group = {
        "prompt": recorded.prompt.tolist(),
        "responses": recorded.responses.tolist(),
        "rewards": recorded.rewards.tolist(),
    }
    details: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        sides = {"ours": stack.enter_context(Side("pa_core.bench.own_side", threads=settings.threads))}
        sides["ours"].ask("load", attention="shared_prompt", **common, **vars(point))
        # A whole step as warm-up: memory that a process has for the first time is slow.
        sides["ours"].ask("step", size=point.group_size)
        for name in peers or list(PEERS):
            log.info("loading %s and finding its best setting", name)
            sides[name] = stack.enter_context(Side(PEERS[name], python=peers_python(), threads=settings.threads))
            details[name] = sides[name].ask("load", **common, **group)
        times = _alternate(sides, point, settings.repeats)
        distances = _distances(sides)
    seconds = {name: statistics.median(values) for name, values in times.items()}
    shape = ModelShape.of(config)
    return {
        **vars(settings),
        **vars(point),
        "versions": versions,
        "seconds": seconds,
        "all_seconds": times,
        "ratio": {name: seconds[name] / seconds["ours"] for name in details},
        "gradient_distance": distances,
        "trl_micro_batch": (details.get("trl") or {}).get("size"),
        "trl_seconds_per_sample": (details.get("trl") or {}).get("seconds_per_sample"),
        "rho": token_ratio(*point.sizes),
        "flop_ratio": flop_ratio(shape, *point.sizes),
        "ours_flops_per_s": shared_work(*point.sizes).total(shape) / seconds["ours"],
    }


def _alternate(sides: dict[str, Side], point: Point, repeats: int) -> dict[str, list[float]]:
    """Seconds of every side, one after the other, ``repeats`` times."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(repeats):
        for name, side in sides.items():
            size = {"size": point.group_size} if name == "ours" else {}
            times[name].append(side.ask("step", **size))
        log.info("round %d: %s", number + 1, ", ".join(f"{name} {times[name][-1]:.2f} s" for name in sides))
    return times


def _distances(sides: dict[str, Side]) -> dict[str, float]:
    """Relative distance of our gradient from every peer's."""
    with tempfile.TemporaryDirectory(prefix="pa-bench-") as folder:
        for name, side in sides.items():
            side.ask("gradients", path=f"{folder}/{name}")
        return {name: gradient_distance(Path(folder) / "ours", Path(folder) / name) for name in sides if name != "ours"}


def render(result: dict[str, Any]) -> str:
    """All sides, their ratios, and how far the gradients agree."""
    versions = result["versions"]
    names = {"ours": "ours", "trl": f"TRL {versions['trl']}", "prefix_grouper": "PrefixGrouper"}
    lines = [
        f"one training step, K={result['group_size']} Lp={result['prompt_len']} Lr={result['response_len']}, "
        f"{result['model']}, {result['dtype']}, {result['device']}, {result['threads']} threads, median of "
        f"{result['repeats']} (rho {result['rho']:.2f}, FLOP ratio {result['flop_ratio']:.2f}):"
    ]
    for name, seconds in result["seconds"].items():
        line = f"  {names[name]:<16}{seconds:>9.3f} s"
        if name != "ours":
            line += f"  {result['ratio'][name]:6.2f}x ours; gradients differ by {result['gradient_distance'][name]:.1e}"
        if name == "trl":
            line += f"; micro-batches of {result['trl_micro_batch']}"
        lines.append(line)
    return "\n".join(lines)
