"""The learner: accumulates the gradient of an iteration's groups and takes its optimizer steps.

Gradients are accumulated as sums and divided once, before the step, because a streamed iteration knows its token
count only when its last group has arrived. That division is also what makes the order of arrival irrelevant.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pa_core.config import OptimizerConfig, TrainConfig
from pa_core.errors import TrainingError
from pa_core.model.packing import TrainGroup, train_group
from pa_core.model.tri_model import TriModel
from pa_core.objective.advantages import batch_advantages
from pa_core.objective.conventions import resolve_advantage
from pa_core.objective.losses import MetricSums, denominator, grpo_loss, needs_forward
from pa_core.records import Group

if TYPE_CHECKING:
    from pa_core.model.adapters import Adapter


def learning_rate_factor(config: OptimizerConfig, steps: int, step: int) -> float:
    """Share of the peak learning rate at optimizer step ``step`` of ``steps``: warm-up, then the chosen decay."""
    warmup = config.warmup_iterations * config.steps_per_iteration
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    if config.decay == "linear":
        return max(0.0, 1 - progress)
    if config.decay == "cosine":
        return 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return 1.0


def _adapter(config: TrainConfig, policy: Any) -> Adapter | None:
    """The adapter that ``config.lora`` asks for, now part of ``policy``."""
    if config.lora is None:
        return None
    # Imported here because peft takes seconds, which other runs need not wait for.
    from pa_core.model.adapters import Adapter

    return Adapter(policy, config.lora, config.seed)


class Learner:
    """Policy, optimizer and the running sums of one iteration.

    Attributes:
        version: policy version that the weights are.
        steps: optimizer steps since the run began, those without a gradient included.
        adapter: what is trained with LoRA; None when all weights are.
        torn: whether the weights lie between two versions, because an iteration of several steps is under way.
    """

    def __init__(self, config: TrainConfig, policy: Any) -> None:
        self.config = config
        self.version = 0
        self.torn = False
        self.adapter = _adapter(config, policy)
        self.tri = TriModel(
            policy,
            config.model.attention,
            with_reference=config.objective.beta > 0,
            with_old=config.optimizer.steps_per_iteration > 1,
            adapter=self.adapter,
        )
        settings = config.optimizer
        self._convention = resolve_advantage(config.objective.advantage)
        self._parameters: dict[str, torch.nn.Parameter] = (
            dict(self.tri.policy.named_parameters()) if self.adapter is None else self.adapter.parameters
        )
        self._optimizer = torch.optim.AdamW(
            self._parameters.values(),
            lr=settings.learning_rate,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self.steps = 0
        self.begin_iteration()

    def begin_iteration(self) -> None:
        """Forget the last iteration's sums; the old policy becomes the policy as it is now."""
        self.tri.snapshot_old()
        self._optimizer.zero_grad(set_to_none=True)
        self._sums = MetricSums()
        self._loss = self._denominator = self._total_denominator = 0.0
        self._grad_norms: list[float] = []
        self.advantages: dict[str, list[float]] = {}

    def accumulate(self, groups: Sequence[Group]) -> None:
        """Add the gradient of ``groups``, unnormalised, in micro-batches of the token budget."""
        objective = self.config.objective
        rewards = [
            torch.tensor([math.nan if sample.reward is None else sample.reward for sample in group.samples])
            for group in groups
        ]
        computed: list[TrainGroup] = []
        for group, found in zip(groups, batch_advantages(rewards, self._convention), strict=True):
            self.advantages[group.id] = found.values.tolist()
            if not found.trainable:
                continue
            part = train_group(group, found.values)
            if needs_forward(found.values, objective):
                computed.append(part)
            else:
                self._denominator += denominator(
                    objective.loss_normalization, samples=len(part.samples), tokens=part.tokens
                )
        for batch in self.tri.micro_batches(computed, self.config.trainer.micro_batch_tokens):
            logprobs = self.tri.logprobs(batch, self.config.sampling.temperature)
            sums = grpo_loss(
                logprobs.policy,
                logprobs.old,
                logprobs.reference,
                logprobs.entropy,
                advantages=batch.advantages,
                engine_logprobs=batch.engine_logprobs,
                sample_index=batch.sample_index,
                sample_tokens=batch.sample_tokens,
                config=objective,
                max_tokens=self.config.sampling.max_tokens,
            )
            sums.loss.backward()
            self._loss += float(sums.loss.detach())
            self._denominator += sums.denominator
            self._sums.add(sums.metrics)

    def step(self) -> None:
        """Normalise the accumulated gradient, clip it and step; without any gradient the weights stay as they are.

        Raises:
            TrainingError: when the gradient is not finite; the weights are untouched.
        """
        gradients = [parameter.grad for parameter in self._parameters.values() if parameter.grad is not None]
        if gradients:
            torch._foreach_div_(gradients, max(self._denominator, 1.0))
            norm = float(torch.nn.utils.clip_grad_norm_(self._parameters.values(), self.config.optimizer.max_grad_norm))
            if not math.isfinite(norm):
                raise TrainingError(
                    f"the gradient of version {self.version} has norm {norm}; the version itself is intact in the "
                    "store. Lower optimizer.learning_rate, or look for a reward with huge values"
                )
            self._grad_norms.append(norm)
            for group in self._optimizer.param_groups:
                group["lr"] = self._learning_rate()
            self._optimizer.step()
        self.steps += 1
        self._optimizer.zero_grad(set_to_none=True)
        self._total_denominator += self._denominator
        self._denominator = 0.0
        self.torn = True

    def _learning_rate(self) -> float:
        """Learning rate of the next step."""
        settings = self.config.optimizer
        planned = self.config.iterations * settings.steps_per_iteration
        return settings.learning_rate * learning_rate_factor(settings, planned, self.steps)

    def advance(self) -> None:
        """Call the weights the next version, once the iteration's steps are taken."""
        self.version += 1
        self.torn = False

    def weights(self) -> Mapping[str, Tensor]:
        """What is trained, by name: the policy's state or its adapter's; tensors are the live ones."""
        if self.adapter is not None:
            return self.adapter.tensors()
        state: dict[str, Tensor] = self.tri.policy.state_dict()
        return state

    def metrics(self) -> dict[str, float]:
        """The ``train/`` metrics of the iteration that just ended."""
        advantages = torch.tensor([value for values in self.advantages.values() for value in values])
        metrics = {
            "train/loss": self._loss / max(self._total_denominator, 1.0),
            "train/grad_norm": max(self._grad_norms, default=0.0),
            "train/learning_rate": self._learning_rate(),
            "train/advantage_std": float(advantages.std()) if len(advantages) > 1 else 0.0,
        }
        if self._sums.tokens:  # an iteration of zero-variance groups computes nothing, so it has no means
            means = self._sums.means()
            metrics |= {
                "train/entropy": means["entropy"],
                "train/ratio": means["ratio"],
                "train/clip_fraction": means["clipped"],
                "train/logprob_mismatch_mean": means["mismatch"],
                "train/logprob_mismatch_max": means["mismatch_max"],
            }
            if self.tri.reference is not None:
                metrics["train/kl"] = means["kl"]
        return metrics

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """The optimizer's state by ``parameter/field``, and the random generator's."""
        tensors = {
            f"{name}/{field}": value
            for name, parameter in self._parameters.items()
            for field, value in self._optimizer.state.get(parameter, {}).items()
        }
        return tensors | {"rng": torch.get_rng_state()}

    def restore(self, version: int, weights: Mapping[str, Tensor], tensors: Mapping[str, Tensor], steps: int) -> None:
        """Continue from a checkpoint: policy, optimizer, schedule and random generator."""
        if self.adapter is not None:
            self.adapter.load(weights)
        else:
            self.tri.policy.load_state_dict(weights)
        for name, parameter in self._parameters.items():
            prefix = f"{name}/"
            state = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
            if state:
                self._optimizer.state[parameter] = state
        torch.set_rng_state(tensors["rng"])
        self.version, self.steps = version, steps
