"""The learner: accumulates the gradient of an iteration's groups and takes its optimizer steps.

Gradients are accumulated as sums and divided once, before the step, because a streamed iteration knows its token
count only when its last group has arrived. That division is also what makes the order of arrival irrelevant.

On several devices every process has a learner with its parts of the models (:mod:`pa_core.loop.ranks`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import astuple
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pa_core.config import OptimizerConfig, TrainConfig
from pa_core.errors import TrainingError
from pa_core.loop.optimizer import Optimizer
from pa_core.loop.penalties import group_rewards, without_truncated
from pa_core.loop.ranks import Ranks, collective
from pa_core.model.dtensors import local, whole
from pa_core.model.fixed_point import FixedPointSum
from pa_core.model.host_memory import keep_freed_memory
from pa_core.model.packing import PackedBatch, TrainGroup, train_group
from pa_core.model.parallel import Layout, fill, training_device
from pa_core.model.parallel_tri import ParallelTriModel
from pa_core.model.tri_model import TriModel
from pa_core.objective.advantages import batch_advantages
from pa_core.objective.conventions import resolve_advantage
from pa_core.objective.losses import denominator, needs_forward, policy_loss
from pa_core.objective.metrics import MetricSums
from pa_core.records import Group
from pa_core.store.objects import ObjectStore
from pa_core.store.shards import DeferredTensor, Storable, StoredFile, memory_of
from pa_core.store.weights import WeightStore

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


def _fixed_sum(config: TrainConfig, parameters: Mapping[str, torch.nn.Parameter]) -> FixedPointSum:
    """The order-free gradient sum of an iteration, sized for its longest responses."""
    per_sample = config.objective.loss_normalization in ("sequence", "constant")  # else a sum over tokens
    units = config.group_size * (1 if per_sample else config.sampling.max_tokens)
    return FixedPointSum(parameters, config.prompts_per_iteration, units)


class Learner:
    """Policy, optimizer and the running sums of one iteration.

    Attributes:
        version: policy version that the weights are.
        steps: optimizer steps since the run began, those without a gradient included.
        adapter: what is trained with LoRA; None when all weights are.
        torn: whether the weights lie between two versions, because an iteration of several steps is under way.
        ranks: the processes that train together; None for a single one.
    """

    def __init__(
        self, config: TrainConfig, policy: Any, layout: Layout | None = None, ranks: Ranks | None = None
    ) -> None:
        """Make the models that training needs out of ``policy``, the initial one.

        Args:
            policy: the whole model; on several devices only the first process has it, and it is copied.
            layout: this process's place; default: a single process on the configured device.
        """
        self.config = config
        self.version = self.steps = 0
        self.torn = False
        self.ranks = ranks
        self._layout = layout or Layout(training_device(config.trainer.device))
        with nullcontext() if ranks is None else ranks.joint("build"):
            self._build(policy)

    def _build(self, policy: Any) -> None:
        config = self.config
        if self._layout.device.type == "cpu":
            keep_freed_memory()
        self.adapter: Adapter | None = None
        if self.ranks is not None:
            self.tri: TriModel = ParallelTriModel(config, self._layout, policy, self.ranks.progress)
        else:
            self._build_alone(policy.to(self._layout.device))
        self._convention = resolve_advantage(config.objective.advantage)
        self._parameters: dict[str, torch.nn.Parameter] = (
            dict(self.tri.policy.named_parameters()) if self.adapter is None else self.adapter.parameters
        )
        self._state: dict[str, Tensor] = self.tri.policy.state_dict()
        self._optimizer = Optimizer(config.optimizer, self._parameters, self._layout, self.tri.partial)
        self._fixed_sum = _fixed_sum(config, self._parameters) if config.deterministic else None
        self.begin_iteration()

    def _build_alone(self, policy: Any) -> None:
        config = self.config
        self.adapter = _adapter(config, policy)
        self.tri = TriModel(
            policy,
            config.model.attention,
            with_reference=config.objective.beta > 0,
            with_old=config.optimizer.steps_per_iteration > 1,
            adapter=self.adapter,
            activation_checkpointing=config.trainer.activation_checkpointing,
            reference_dtype=torch.bfloat16 if config.model.reference_dtype == "bfloat16" else None,
        )

    @collective
    def begin_iteration(self) -> None:
        """Forget the last iteration's sums; the old policy becomes the policy as it is now."""
        self.tri.snapshot_old()
        self._optimizer.clear()
        if self._fixed_sum is not None:
            self._fixed_sum.begin()
        self._sums = MetricSums()
        self._loss = self._denominator = self._total_denominator = 0.0
        self._grad_norms: list[float] = []
        self.advantages: dict[str, list[float]] = {}

    @collective
    def accumulate(self, groups: Sequence[Group]) -> None:
        """Add the gradient of ``groups``, unnormalised, in micro-batches of the token budget."""
        objective = self.config.objective
        if self._fixed_sum is not None:
            groups = sorted(groups, key=lambda group: group.id)  # statistics over several groups are in float
        rewards = [group_rewards(group, self.tri, self.config) for group in groups]
        computed: list[TrainGroup] = []
        for group, found in zip(groups, batch_advantages(rewards, self._convention), strict=True):
            self.advantages[group.id] = found.values.tolist()
            if not found.trainable:
                continue
            part = train_group(without_truncated(group) if objective.mask_truncated else group, found.values)
            if part.tokens and needs_forward(found.values, objective):
                computed.append(part)
            elif self._layout.rank("fsdp") == 0:
                self._denominator += denominator(
                    objective.loss_normalization, samples=len(part.samples), tokens=part.tokens
                )
        for batch in self._micro_batches(computed):
            if self.ranks is not None and self.ranks.interrupted():
                return  # the first process stops as soon as it is out of here, and with it the iteration
            if batch is None:
                self.tri.idle(self.config.sampling.temperature)
                continue
            logprobs = self.tri.logprobs(batch, self.config.sampling.temperature)
            sums = policy_loss(batch, logprobs, objective, self.config.sampling.max_tokens)
            sums.loss.backward()
            self._loss += float(sums.loss.detach())
            self._denominator += sums.denominator
            self._sums.add(sums.metrics)

    def _micro_batches(self, groups: list[TrainGroup]) -> Iterator[PackedBatch | None]:
        """Micro-batches of ``groups``, as far as they are this process's; None: only the others compute.

        Deterministically, of one group each, whose gradient then joins the others'.
        """
        budget = self.config.trainer.micro_batch_tokens
        if self._fixed_sum is None:
            yield from self.tri.own_micro_batches(groups, budget)
            return
        for group in groups:
            yield from self.tri.micro_batches([group], budget)
            self._fixed_sum.take(group.id)

    @collective
    def step(self) -> None:
        """Normalise the accumulated gradient, clip it and step; without any gradient the weights stay as they are.

        Raises:
            TrainingError: when the gradient is not finite; the weights are untouched.
        """
        if self._fixed_sum is not None:
            self._fixed_sum.give()
        total = sum(own for (own,) in self._layout.gathered([self._denominator]))
        norm = self._optimizer.normalise(max(total, 1.0))
        if norm is not None:
            if not math.isfinite(norm):
                raise TrainingError(
                    f"the gradient of version {self.version} has norm {norm}; the version itself is intact in the "
                    "store. Lower optimizer.learning_rate, or look for a reward with huge values"
                )
            self._grad_norms.append(norm)
            self._optimizer.step(self._learning_rate())
        self.steps += 1
        self._optimizer.clear()
        self._total_denominator += total
        self._denominator = 0.0
        self.torn = True

    def _learning_rate(self) -> float:
        """Learning rate of the next step."""
        settings = self.config.optimizer
        planned = self.config.iterations * settings.steps_per_iteration
        return settings.learning_rate * learning_rate_factor(settings, planned, self.steps)

    @collective
    def advance(self) -> None:
        """Call the weights the next version, once the iteration's steps are taken."""
        self.version += 1
        self.torn = False

    def weights(self) -> Mapping[str, Tensor]:
        """What is trained, by name: the policy's state or its adapter's; tensors are the live ones.

        On several devices they are DTensors.
        """
        return self._state if self.adapter is None else self.adapter.tensors()

    def whole_weights(self) -> Mapping[str, Storable]:
        """:meth:`weights` for publication, in the first process; on several devices gathered one by one, on demand."""
        if self.ranks is None:
            return self.weights()
        return {
            name: DeferredTensor(tensor.shape, tensor.dtype, memory_of(local(tensor)), partial(self.gather, name))
            for name, tensor in self._state.items()
        }

    @collective
    def gather(self, name: str) -> Tensor:
        """One tensor of the policy whole, in the first process in its host's memory."""
        tensor = whole(self._state[name])
        return tensor.cpu() if self._layout.leads else tensor

    @collective
    def metrics(self) -> dict[str, float]:
        """The ``train/`` metrics of the iteration that just ended."""
        advantages = torch.tensor([value for values in self.advantages.values() for value in values])
        self._join_sums()
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
            if self.config.objective.correction.kind != "none":
                metrics["train/correction_weight"] = means["weight"]
                metrics["train/corrected_share"] = means["corrected"]
        return metrics

    def _join_sums(self) -> None:
        """Add up the iteration's sums over the processes that had different samples; nothing to do for one."""
        if self.ranks is None:
            return
        parts = self._layout.gathered([self._loss, *astuple(self._sums)])
        self._loss, self._sums = sum(part[0] for part in parts), MetricSums()
        for part in parts:
            self._sums.add(MetricSums(*part[1:]))

    @collective
    def save_optimizer(self, url: str, folder: str) -> list[StoredFile]:
        """Store the optimizer's state, and the random generator's; the files, in the first process.

        Args:
            url, folder: a store, and a key prefix below which nothing is yet.
        """
        return self._optimizer.save(ObjectStore.open(url), folder)

    @collective
    def restore(
        self, run_url: str, version: int, url: str, folder: str, files: list[dict[str, Any]], steps: int
    ) -> None:
        """Continue from a checkpoint: policy, optimizer, schedule and random generator.

        Args:
            run_url: the run whose published ``version`` has the policy's weights.
            url, folder, files: where :meth:`save_optimizer` has stored the rest, in this or another layout, and the
                fields of its files.
            steps: optimizer steps taken.
        """
        weights = WeightStore(ObjectStore.open(run_url)).load(version) if self._layout.leads else None
        if self.adapter is not None:
            self.adapter.load(weights or {})
        elif self.ranks is None:
            self.tri.policy.load_state_dict(weights)
        else:
            names = [name for name, _ in self.tri.policy.named_parameters()]
            buffers = [name for name, _ in self.tri.policy.named_buffers() if name in self._state]
            fill([self.tri.policy], [*names, *buffers], weights, self._layout, self.ranks.progress)
        self._optimizer.load(ObjectStore.open(url), folder, [StoredFile(**file) for file in files])
        self.version, self.steps = version, steps
