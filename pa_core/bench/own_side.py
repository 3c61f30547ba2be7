"""Worker of the benchmarks: our training step, shared-prompt or per-sample. Run with ``python -m``."""

from __future__ import annotations

from typing import Any

import torch

from pa_core.bench.gradients import save_gradients
from pa_core.bench.memory import PeakMemory
from pa_core.bench.models import build_model
from pa_core.bench.search import fastest_size
from pa_core.bench.side import serve
from pa_core.bench.workload import Recorded, Step, parts_of
from pa_core.model.host_memory import keep_freed_memory
from pa_core.model.packing import Attention


class OwnSide:
    """A model and the step over one recorded group."""

    def load(
        self,
        model: str,
        attention: Attention,
        dtype: str,
        device: str,
        threads: int,
        group_size: int,
        prompt_len: int,
        response_len: int,
    ) -> None:
        """Load the model, record the group, and warm up on a single sample."""
        torch.set_num_threads(threads)
        where = torch.device(device)
        if where.type == "cpu":
            keep_freed_memory()  # as the trainer has it
        built = build_model(model, getattr(torch, dtype), where)
        vocabulary = built.config.get_text_config().vocab_size
        self._group = Recorded(vocabulary, group_size, prompt_len, response_len).train_group()
        self._step = Step(built, attention)
        self._step.run(parts_of(self._group, 1)[:1])
        built.zero_grad(set_to_none=True)
        # Only now are the weights in memory: until they are used they are pages of a file.
        self._memory = PeakMemory(where)

    def step(self, size: int) -> float:
        """Seconds of the group in micro-batches of ``size`` samples."""
        return self._step.run(parts_of(self._group, size))

    def peak(self, size: int) -> int:
        """Most bytes in use, above the loaded model, over micro-batches of ``size`` samples: its gradients are in it.

        Two micro-batches are enough: every further one meets the gradients of those before it, as the second does.
        """
        self._step.model.zero_grad(set_to_none=True)
        self._memory.restart()
        self._step.run(parts_of(self._group, size)[:2])
        return self._memory.peak()

    def best_size(self) -> dict[str, Any]:
        """The micro-batch size with the least time per sample, and the seconds per sample of every size tried.

        Sizes double until they get slower, reach the whole group, or would take most of the memory that is left.
        """

        def seconds(size: int) -> float:
            self._memory.restart(trim=False)
            return self._step.run(parts_of(self._group, size)[:1])

        return fastest_size(len(self._group.samples), seconds, self._memory.fits_twice)

    def gradients(self, path: str) -> None:
        """Write the gradient of the mean loss per token, by parameter name, as safetensors."""
        save_gradients(self._step.model, path, self._step.tokens)


def main() -> None:
    """Serve one benchmark."""
    side = OwnSide()
    serve(
        {
            "load": side.load,
            "step": side.step,
            "peak": side.peak,
            "best_size": side.best_size,
            "gradients": side.gradients,
        }
    )


if __name__ == "__main__":
    main()
