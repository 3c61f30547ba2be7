"""Worker of ``pa bench peers``: the training step of TRL's GRPOTrainer. Runs in the peers' environment.

The trainer is given a recorded group through its own ``rollout_func``, scores it by a reward function that returns
the recorded rewards, and prepares its micro-batches (``_prepare_inputs``). Timed are, per micro-batch, its
``compute_loss`` and ``accelerator.backward``: forward, loss and backward, as ``training_step`` calls them.
"""

from __future__ import annotations

import tempfile
import time
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from pa_core.bench.gradients import save_gradients
from pa_core.bench.memory import PeakMemory
from pa_core.bench.search import fastest_size
from pa_core.bench.side import serve

#: What differs from TRL's defaults, and why.
OPTIONS: dict[str, Any] = {
    "gradient_checkpointing": False,  # it would compute every block twice
    "bf16": False,  # the model's own dtype, no autocast
    "beta": 0.0,  # no reference model, as on our side
    "loss_type": "dapo",  # its default: mean over the tokens of the step
    "report_to": "none",
    "save_strategy": "no",
    "logging_strategy": "no",
    "disable_tqdm": True,
}


class TrlSide:
    """GRPOTrainer over one recorded group."""

    def load(
        self,
        model: str,
        dtype: str,
        device: str,
        threads: int,
        prompt: list[int],
        responses: list[list[int]],
        rewards: list[float],
    ) -> dict[str, Any]:
        """Load the model and find the micro-batch size that is fastest, which is also the warm-up."""
        torch.set_num_threads(threads)
        self._prompt, self._responses, self._rewards = prompt, responses, rewards
        self._cpu = device == "cpu"
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).to(device)
        self._prepare(1)
        self._run(self._batches[:1])
        self._memory = PeakMemory(torch.device(device))
        found = fastest_size(len(responses), self._try, self._memory.fits_twice)
        self._prepare(found["size"])
        return found

    def _prepare(self, size: int) -> None:
        """A trainer with micro-batches of ``size`` samples, and the micro-batches it makes of the recorded group."""
        samples = len(self._responses)

        def rollouts(prompts: list[Any], trainer: Any) -> dict[str, Any]:
            return {"prompt_ids": [self._prompt] * samples, "completion_ids": self._responses, "logprobs": None}

        def recorded(**_: Any) -> list[float]:
            return self._rewards

        with tempfile.TemporaryDirectory(prefix="pa-bench-trl-") as folder:
            self._trainer = GRPOTrainer(
                model=self._model,
                reward_funcs=recorded,
                args=GRPOConfig(
                    output_dir=folder,
                    per_device_train_batch_size=size,
                    gradient_accumulation_steps=samples // size,
                    num_generations=samples,
                    max_completion_length=len(self._responses[0]),
                    use_cpu=self._cpu,
                    **OPTIONS,
                ),
                train_dataset=Dataset.from_list([{"prompt": "recorded"}] * samples),
                processing_class=self._tokenizer,
                rollout_func=rollouts,
            )
        self._trainer.current_gradient_accumulation_steps = samples // size
        self._model.train()
        self._trainer._prepare_inputs([{"prompt": "recorded"}] * samples)
        self._batches: list[dict[str, Any]] = self._trainer._buffered_inputs

    def _try(self, size: int) -> float:
        self._prepare(size)
        self._memory.restart(trim=False)
        return self._run(self._batches[:1])

    def _run(self, batches: list[dict[str, Any]]) -> float:
        self._model.zero_grad(set_to_none=True)
        started = time.perf_counter()
        for batch in batches:
            self._trainer.accelerator.backward(self._trainer.compute_loss(self._model, batch))
        if not self._cpu:
            torch.cuda.synchronize()
        return time.perf_counter() - started

    def step(self) -> float:
        """Seconds of forward, loss and backward over the group."""
        return self._run(self._batches)

    def gradients(self, path: str) -> None:
        """Write the gradient of the mean loss per token, by parameter name, as safetensors."""
        save_gradients(self._model, path)


def main() -> None:
    """Serve one benchmark."""
    side = TrlSide()
    serve({"load": side.load, "step": side.step, "gradients": side.gradients})


if __name__ == "__main__":
    main()
