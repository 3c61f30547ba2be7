"""Worker of ``pa bench iteration``: whole iterations of TRL's GRPOTrainer. Runs in the peers' environment."""

from __future__ import annotations

import tempfile
import time
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from pa_core.bench.side import serve
from pa_core.bench.trl_side import OPTIONS
from pa_core.rewards import arithmetic


class _Clock(TrainerCallback):
    """When every optimizer step ended, in seconds of a steady clock."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Called by the trainer."""
        self.ends.append(time.perf_counter())


class TrlIterationSide:
    """Trains the same model from the start in every call of :meth:`train`."""

    def load(
        self,
        model: str,
        dtype: str,
        threads: int,
        prompts: list[str],
        token_ids: list[list[int]],
        answers: list[str],
        expressions: list[str],
        rewards: dict[str, float],
    ) -> None:
        """Take the task.

        Args:
            prompts: texts with the chat template applied; ``token_ids`` is what they must be to the tokenizer.
            rewards: weights of the functions of :mod:`pa_core.rewards.arithmetic`, by name.

        Raises:
            ValueError: TRL would see other tokens than we do.
        """
        torch.set_num_threads(threads)
        self._model, self._dtype = model, getattr(torch, dtype)
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        if self._tokenizer(text=prompts)["input_ids"] != token_ids:
            raise ValueError("the prompts' text does not give their tokens back; this task cannot be compared")
        rows = zip(prompts, answers, expressions, strict=True)
        self._data = Dataset.from_list(
            [{"prompt": prompt, "answer": answer, "expression": expression} for prompt, answer, expression in rows]
        )
        self._rewards = rewards

    def train(
        self,
        size: int,
        iterations: int,
        prompts: int,
        samples: int,
        max_tokens: int,
        learning_rate: float,
        continuous_batching: bool,
    ) -> dict[str, list[float]]:
        """Iterations of ``prompts`` x ``samples`` completions, trained on in micro-batches of ``size`` samples.

        Returns:
            ``ends``, when every iteration ended (s), and ``tokens``, its completion tokens, end-of-sequence included.
        """
        tokens: list[float] = []

        def score(
            completions: list[str], completion_ids: list[list[int]], answer: list[str], expression: list[str], **_: Any
        ) -> list[float]:
            tokens.append(sum(map(len, completion_ids)))
            return [self._score(*row) for row in zip(completions, answer, expression, strict=True)]

        clock = _Clock()
        with tempfile.TemporaryDirectory(prefix="pa-bench-trl-") as folder:
            GRPOTrainer(
                model=AutoModelForCausalLM.from_pretrained(self._model, dtype=self._dtype),
                reward_funcs=score,
                args=GRPOConfig(
                    output_dir=folder,
                    max_steps=iterations,
                    per_device_train_batch_size=size,
                    gradient_accumulation_steps=prompts * samples // size,
                    num_generations=samples,
                    max_completion_length=max_tokens,
                    learning_rate=learning_rate,
                    use_cpu=True,
                    use_transformers_continuous_batching=continuous_batching,
                    **OPTIONS,
                ),
                train_dataset=self._data,
                processing_class=self._tokenizer,
                callbacks=[clock],
            ).train()
        return {"ends": clock.ends, "tokens": tokens}

    def _score(self, completion: str, answer: str, expression: str) -> float:
        metadata = {"expression": expression}
        values = {name: getattr(arithmetic, name)(completion, answer, metadata=metadata) for name in self._rewards}
        return float(sum(self._rewards[name] * value for name, value in values.items()))


def main() -> None:
    """Serve one benchmark."""
    side = TrlIterationSide()
    serve({"load": side.load, "train": side.train})


if __name__ == "__main__":
    main()
