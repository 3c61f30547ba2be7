"""Record what TRL's own trainers make of fixed rewards and log-probabilities: writes trl_recording.json beside itself.

Needs trl==1.16.0 and what that requires: ``python tests/unit/objective/record_trl.py``. The trainers are real ones
around a tiny random model that is never run: only what a model would compute (completions, their log-probabilities and
entropies) is replaced by fixed numbers. Advantages, masks, importance weights and losses are TRL's.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

GROUP_SIZE = 4
LENGTHS = [6, 3, 1, 5, 2, 6, 4, 3]
TRUNCATED = [0, 5]
MASKED_TOKENS = [(0, 2), (3, 0), (5, 4)]  # (sample, position): tokens that the environment wrote
REWARDS = [1.0, 0.0, 0.5, 1.0, 0.25, 2.0, -1.0, 0.25]
END = 1

VLLM = {"use_vllm": True, "vllm_importance_sampling_clip_max": 1.3}
MASK = VLLM | {"vllm_importance_sampling_clip_min": 1 / 1.3}
PLAIN_KL = {"beta": 0.1, "use_bias_correction_kl": False}

CASES: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo"},
    "bnpo": {"loss_type": "bnpo"},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "batch_std": {"loss_type": "dapo", "scale_rewards": "batch"},
    "two_sided": {"loss_type": "grpo", "delta": 1.5},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
    "gspo_token_mean": {"loss_type": "dapo", "importance_sampling_level": "sequence", "epsilon": 0.1},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.4},
    "sequence_sum": {"loss_type": "luspo"},
    "kl": {"loss_type": "grpo"} | PLAIN_KL,
    "kl_dr_grpo": {"loss_type": "dr_grpo"} | PLAIN_KL,
    "kl_weighted": {"loss_type": "dapo", "beta": 0.1},
    "entropy": {"loss_type": "dapo", "entropy_coef": 0.05},
    "truncated": {"loss_type": "dapo", "mask_truncated_completions": True},
    "truncated_grpo": {"loss_type": "grpo", "mask_truncated_completions": True},
    "token_truncate": {"loss_type": "dapo", "vllm_importance_sampling_mode": "token_truncate"} | VLLM,
    "token_mask": {"loss_type": "grpo", "vllm_importance_sampling_mode": "token_mask"} | MASK | PLAIN_KL,
    "sequence_truncate": {"loss_type": "dapo", "vllm_importance_sampling_mode": "sequence_truncate"} | VLLM,
    "sequence_mask": {"loss_type": "grpo", "vllm_importance_sampling_mode": "sequence_mask"} | MASK,
}


def fixed_numbers() -> dict[str, list[list[float]]]:
    """Log-probabilities and entropies ``[8, 6]``; ratios reach beyond every clip bound."""
    generator = torch.Generator().manual_seed(20)
    shape = (len(LENGTHS), max(LENGTHS))

    def normal(scale: float) -> torch.Tensor:
        return scale * torch.randn(shape, generator=generator, dtype=torch.float64)

    old = -torch.rand(shape, generator=generator, dtype=torch.float64) * 3
    numbers = {
        "old": old,
        "policy": old + normal(0.3),
        "reference": old + normal(0.4),
        # Completions' log-probabilities pass through float32 in TRL.
        "engine": (old + normal(0.2)).float().double(),
        "entropy": torch.rand(shape, generator=generator, dtype=torch.float64),
    }
    return {name: tensor.tolist() for name, tensor in numbers.items()}


NUMBERS = fixed_numbers()


def completions() -> list[list[int]]:
    """Token ids: arbitrary ones, with an end token unless the sample was truncated."""
    rows = [[2 + position % 5 for position in range(length)] for length in LENGTHS]
    for number, row in enumerate(rows):
        if number not in TRUNCATED:
            row[-1] = END
    return rows


def loss_mask() -> list[list[int]]:
    """1 where the policy chose the token, ragged."""
    rows = [[1] * length for length in LENGTHS]
    for sample, position in MASKED_TOKENS:
        rows[sample][position] = 0
    return rows


class _Fixed:
    """Replaces what a model computes."""

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        rows = completions()
        engine = [values[: len(row)] for values, row in zip(NUMBERS["engine"], rows, strict=True)]
        return [[2, 3]] * len(rows), rows, loss_mask(), ["text"] * len(rows), engine, {}, None, None

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **keywords: Any) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            return self.policy, torch.tensor(NUMBERS["entropy"], dtype=torch.float64), None  # type: ignore[attr-defined]
        name = "reference" if model is self.ref_model else "old"  # type: ignore[attr-defined]
        return torch.tensor(NUMBERS[name], dtype=torch.float64), None, None


class FixedGrpo(_Fixed, GRPOTrainer):
    """GRPOTrainer on fixed numbers."""


def reward(completions: list[str], **keywords: Any) -> list[float]:
    """The fixed rewards."""
    return REWARDS


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<end>", *"abcdef"]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="a"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")


def save_tiny_model(folder: str) -> None:
    config = LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, eos_token_id=END
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def trainer_of(kind: Any, config: Any, settings: dict[str, Any], folder: str) -> Any:
    """A real trainer with the given settings; vLLM's part is switched on afterwards, since no server is needed."""
    settings = dict(settings)
    use_vllm = settings.pop("use_vllm", False)
    trainer = kind(
        model=folder,
        reward_funcs=reward,
        processing_class=tiny_tokenizer(),
        train_dataset=Dataset.from_dict({"prompt": ["a", "b"]}),
        args=config(
            output_dir=f"{folder}/out",
            per_device_train_batch_size=len(LENGTHS),
            num_generations=GROUP_SIZE,
            max_completion_length=max(LENGTHS),
            num_iterations=2,  # so that the old policy's log-probabilities are used
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to="none",
            **settings,
        ),
    )
    trainer.use_vllm = use_vllm
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    trainer.policy = torch.tensor(NUMBERS["policy"], dtype=torch.float64, requires_grad=True)
    return trainer


def record(settings: dict[str, Any], folder: str) -> dict[str, Any]:
    """Advantages, loss and the loss's gradient with respect to the policy's log-probabilities."""
    trainer = trainer_of(FixedGrpo, GRPOConfig, settings, folder)
    inputs = trainer._generate_and_score_completions([{"prompt": "a"}] * GROUP_SIZE + [{"prompt": "b"}] * GROUP_SIZE)
    loss = trainer._compute_loss(trainer.model, inputs)
    (gradient,) = torch.autograd.grad(loss, trainer.policy)
    return {"advantages": inputs["advantages"].tolist(), "loss": loss.item(), "gradient": gradient.tolist()}


class FixedRloo(_Fixed, RLOOTrainer):
    """RLOOTrainer on fixed numbers."""

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        rows = completions()
        return [[2, 3]] * len(rows), rows, ["text"] * len(rows)


def record_rloo(beta: float, folder: str) -> dict[str, Any]:
    """Leave-one-out advantages with the KL divergence in the reward."""
    trainer = trainer_of(FixedRloo, RLOOConfig, {"beta": beta}, folder)
    inputs = trainer._generate_and_score_completions([{"prompt": "a"}] * GROUP_SIZE + [{"prompt": "b"}] * GROUP_SIZE)
    return {"advantages": inputs["advantages"].tolist()}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        save_tiny_model(folder)
        cases = {name: record(settings, folder) for name, settings in CASES.items()}
        rloo = {name: record_rloo(beta, folder) for name, beta in (("rloo", 0.0), ("rloo_kl", 0.05))}
    inputs = {
        "group_size": GROUP_SIZE,
        "rewards": REWARDS,
        "truncated": TRUNCATED,
        "loss_mask": loss_mask(),
        "max_completion_length": max(LENGTHS),
        **NUMBERS,
    }
    recording = {"trl": trl.__version__, "inputs": inputs, "grpo_trainer": cases, "rloo_trainer": rloo}
    Path(__file__).with_name("trl_recording.json").write_text(json.dumps(recording) + "\n")


if __name__ == "__main__":
    main()
