"""``pa bench mfu``: FLOP/s of the training step against what this machine's matrix products reach, and where time goes.

MFU is (operations by formula, :mod:`pa_core.bench.flops`) / time / peak. The peak is measured in the same run and
dtype, of two kinds: a large square product, and the products of the step's own shapes one after the other, which is
what a step could reach if everything but matrix products were free.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pa_core.bench.flops import GroupWork, ModelShape, shared_work
from pa_core.bench.grid import Point
from pa_core.bench.kinds import KINDS, seconds_by_kind
from pa_core.bench.models import build_model
from pa_core.bench.shared_prompt import Settings
from pa_core.bench.workload import Recorded, Step, synchronize

log = logging.getLogger(__name__)

_SQUARE = {"cpu": 2048, "cuda": 8192}
# Rows of the head's products: a chunk of logits, as the step has it.
_HEAD_ROWS = 256
_ENOUGH_S = 3.0


def run(settings: Settings, point: Point, dtypes: list[str]) -> dict[str, Any]:
    """Measure every dtype in turn; the result's ``dtypes`` holds one entry each."""
    torch.set_num_threads(settings.threads)
    entries = {}
    for dtype in dtypes:
        log.info("%s", dtype)
        entries[dtype] = _measure(settings, point, getattr(torch, dtype), torch.device(settings.device))
    common = {key: value for key, value in vars(settings).items() if key != "dtype"}
    return {**common, **vars(point), "dtypes": entries}


def _measure(settings: Settings, point: Point, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    model = build_model(settings.model, dtype, device)
    config = model.config.get_text_config()
    shape, work = ModelShape.of(config), shared_work(*point.sizes)
    group = [Recorded(config.vocab_size, *point.sizes).train_group()]
    step = Step(model, "shared_prompt")
    # As the trainer has it; the learning rate is of no consequence for time.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-9, fused=True)
    update = _Update(model, optimizer, device)
    step.run(group)
    update.run()
    log.info("warm; timing %d steps", settings.repeats)
    steps, updates = [], []
    for _ in range(settings.repeats):
        steps.append(step.run(group))
        updates.append(update.run())
    peaks = {"square": _square_peak(dtype, device), "own_shapes": _own_shapes_peak(model, work, dtype, device)}

    def whole() -> float:
        return step.run(group) + update.run()

    profiled, kinds = seconds_by_kind(whole, config.vocab_size, device)
    seconds = {"forward_backward": statistics.median(steps), "optimizer": statistics.median(updates)}
    flops = work.flops(shape)
    rate = sum(flops.values()) / seconds["forward_backward"]
    return {
        "seconds": seconds,
        "all_seconds": {"forward_backward": steps, "optimizer": updates},
        "flops": flops,
        "flops_per_s": rate,
        "peak_flops_per_s": peaks,
        "mfu": rate / peaks["square"],
        "mfu_with_optimizer": sum(flops.values()) / sum(seconds.values()) / peaks["square"],
        "share_of_own_shapes": rate / peaks["own_shapes"],
        "profiled_seconds": profiled,
        "seconds_by_kind": kinds,
    }


class _Update:
    """Clipping and the optimizer's step, timed."""

    def __init__(self, model: PreTrainedModel, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self._model, self._optimizer, self._device = model, optimizer, device

    def run(self) -> float:
        """Seconds."""
        synchronize(self._device)
        started = time.perf_counter()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        synchronize(self._device)
        return time.perf_counter() - started


def _best(work: Callable[[], object], device: torch.device, repeats: int = 3) -> float:
    """Least seconds of ``work``: a peak is what can be reached. The first run warms up; a long one is not repeated."""
    seconds: list[float] = []
    while len(seconds) <= repeats and sum(seconds) < _ENOUGH_S:
        synchronize(device)
        started = time.perf_counter()
        work()
        synchronize(device)
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def _product(rows: int, inner: int, columns: int, dtype: torch.dtype, device: torch.device, kind: str) -> float:
    """Seconds of one product with operands laid out as in a linear layer's ``kind`` of pass."""

    def random(*sizes: int) -> Tensor:
        return torch.randn(sizes, dtype=dtype, device=device)

    x, weight, grad = random(rows, inner), random(columns, inner), random(rows, columns)
    if kind == "forward":
        return _best(lambda: torch.mm(x, weight.t(), out=grad), device)
    if kind == "input":
        return _best(lambda: torch.mm(grad, weight, out=x), device)
    return _best(lambda: torch.mm(grad.t(), x, out=weight), device)


def _square_peak(dtype: torch.dtype, device: torch.device) -> float:
    """FLOP/s of a large square product."""
    size = _SQUARE[device.type]
    return 2 * size**3 / _product(size, size, size, dtype, device, "forward")


def _own_shapes_peak(model: PreTrainedModel, work: GroupWork, dtype: torch.dtype, device: torch.device) -> float:
    """FLOP/s over the products of forward and backward of all linear layers, each in its own shape."""
    head = model.get_output_embeddings()
    counts: dict[tuple[int, int, int], float] = {}
    for module in model.modules():
        if isinstance(module, nn.Linear) and module is not head:
            key = (work.tokens, module.in_features, module.out_features)
            counts[key] = counts.get(key, 0) + 1
    rows = min(_HEAD_ROWS, work.trained)
    counts[(rows, model.config.get_text_config().hidden_size, head.weight.shape[0])] = work.trained / rows
    flops = seconds = 0.0
    for (number, inner, columns), count in counts.items():
        for kind in ("forward", "input", "weight"):
            flops += count * 2 * number * inner * columns
            seconds += count * _product(number, inner, columns, dtype, device, kind)
    return flops / seconds


def render(result: dict[str, Any]) -> str:
    """Per dtype: the step against both peaks, and seconds by kind."""
    lines = [
        f"{result['model']}, K={result['group_size']} Lp={result['prompt_len']} Lr={result['response_len']}, "
        f"{result['device']}, {result['threads']} threads, median of {result['repeats']}"
    ]
    for dtype, entry in result["dtypes"].items():
        peaks, seconds = entry["peak_flops_per_s"], entry["seconds"]
        lines += [
            f"{dtype}: {entry['flops_per_s'] / 1e9:.1f} GFLOP/s in forward and backward "
            f"({sum(entry['flops'].values()) / 1e12:.3f} TFLOP in {seconds['forward_backward']:.3f} s; optimizer "
            f"{seconds['optimizer']:.3f} s)",
            f"  against a square product   {peaks['square'] / 1e9:8.1f} GFLOP/s: MFU {entry['mfu']:.1%}, with the "
            f"optimizer's step {entry['mfu_with_optimizer']:.1%}",
            f"  against its own products   {peaks['own_shapes'] / 1e9:8.1f} GFLOP/s: "
            f"{entry['share_of_own_shapes']:.1%}",
            f"  profiled step of {entry['profiled_seconds']:.3f} s:",
        ]
        for kind, meaning in KINDS.items():
            spent = entry["seconds_by_kind"][kind]
            rate = entry["flops"].get(kind, 0.0) / spent / 1e9 if spent else 0.0
            speed = f"{rate:8.1f} GFLOP/s" if rate else " " * 16
            lines.append(f"    {kind:<12}{spent:8.3f} s {spent / entry['profiled_seconds']:6.1%} {speed}  {meaning}")
    return "\n".join(lines)
