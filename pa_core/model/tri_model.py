"""Policy, old policy and reference, side by side: three log-probabilities in one micro-step.

Periodic Asynchrony (arXiv 2511.18871) calls this the tri-model. All three run over the same packed batch, so that
they differ by their weights only. With one optimizer step per iteration the old policy *is* the policy, and its
log-probabilities are the policy's own, detached: the ratio is exactly 1 and a forward pass is saved.

With LoRA there is one model: the reference is the policy with its adapter off, the old policy the policy with the
adapter's tensors as they were.

Models stay in evaluation mode, the policy included: log-probabilities must be those of the distribution that was
sampled from, hence no dropout. Gradients flow regardless. Do not call ``train()`` on them.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pa_core.model.checkpointing import checkpoint_layers
from pa_core.model.choice import AttentionChoice, prepare_attention
from pa_core.model.logits import logit_rule
from pa_core.model.logprobs import token_logprobs
from pa_core.model.packing import PackedBatch, TrainGroup, micro_batches, pack
from pa_core.model.rope import rope_limit

if TYPE_CHECKING:  # peft takes seconds to import, which only runs with an adapter should wait for
    from pa_core.model.adapters import Adapter


@dataclass(frozen=True)
class TriLogprobs:
    """Log-probabilities (nats) of the batch's T trained tokens, in batch order.

    Attributes:
        policy: f32[T], with gradient.
        old: f32[T], without; the policy's own values when no snapshot is kept.
        reference: f32[T], without; None when there is no reference (beta 0).
        entropy: f32[T] of the policy's distributions, with gradient.
    """

    policy: Tensor
    old: Tensor
    reference: Tensor | None
    entropy: Tensor


def _frozen_copy(model: PreTrainedModel, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """A copy without gradients; its parameters, but not its buffers, in ``dtype``."""
    # Rotary frequencies are buffers: rounded ones would turn later positions by visible angles.
    converted = {
        id(parameter): nn.Parameter(parameter.detach().to(dtype or parameter.dtype, copy=True), requires_grad=False)
        for parameter in model.parameters()
    }
    duplicate: PreTrainedModel = copy.deepcopy(model, dict(converted)).eval()
    return duplicate


class TriModel:
    """The three models of an update.

    The reference and the snapshot are copies of ``policy`` as it is at construction; so construct from the initial
    model, and load a checkpoint's weights into :attr:`policy` afterwards.

    Attributes:
        attention: the attention it is trained with: ``shared_prompt`` or ``per_sample``.
        policy: the model that is trained.
        reference: the model of the KL term, or None; with an adapter the policy itself.
        old: the model of the old policy, or None while that is the policy; with an adapter the policy itself.
        partial: names of parameters whose gradient has to be summed over processes; none here.
    """

    partial: frozenset[str] = frozenset()

    def __init__(
        self,
        policy: PreTrainedModel,
        attention: AttentionChoice = "shared_prompt",
        *,
        with_reference: bool = False,
        with_old: bool = False,
        self_check: bool = True,
        adapter: Adapter | None = None,
        activation_checkpointing: bool = False,
        reference_dtype: torch.dtype | None = None,
    ) -> None:
        """Prepare ``policy`` in place for the chosen attention and check it against its own forward.

        Args:
            with_reference: keep a frozen copy for the KL term (``objective.beta`` > 0).
            with_old: keep a snapshot as old policy (``optimizer.steps_per_iteration`` > 1).
            adapter: the adapter inside ``policy`` that is trained instead of its weights; nothing is copied then
                but, for the old policy, the adapter's tensors.
            activation_checkpointing: compute the policy's layers again in the backward pass instead of keeping what
                they made.
            reference_dtype: type of the reference's parameters; None: the policy's. Rounding moves its
                log-probabilities by some hundredths of a nat, which the KL term takes smoothly. The old policy has no
                such choice: there, rounding would move every ratio, and with it which tokens are clipped.

        Raises:
            ModelError: when log-probabilities would not be the model's own; names the setting to change.
        """
        self.policy = policy.eval()
        if activation_checkpointing:
            checkpoint_layers(policy)
        self._rope = rope_limit(policy.config)
        self._logits = logit_rule(policy.config)
        self.attention, self.self_check_difference = prepare_attention(
            policy, attention, lambda batch: self._forward(policy, batch, 1.0)[0], self_check=self_check
        )
        kept = policy if adapter is not None else None
        self.reference = (kept or _frozen_copy(policy, reference_dtype)) if with_reference else None
        self.old = (kept or _frozen_copy(policy)) if with_old else None
        self._adapter = adapter
        self._old_adapter: dict[str, Tensor] = {}
        self.snapshot_old()

    def own_micro_batches(self, groups: list[TrainGroup], token_budget: int) -> Sequence[PackedBatch | None]:
        """What this process computes of ``groups``: all of it, since it is the only one."""
        return self.micro_batches(groups, token_budget)

    def idle(self, temperature: float) -> None:
        """Take part in a step that others compute: there are none."""

    def micro_batches(self, groups: list[TrainGroup], token_budget: int) -> list[PackedBatch]:
        """Packed micro-batches of at most ``token_budget`` computed tokens, on the policy's device."""
        parts = micro_batches(groups, token_budget, self.attention, self._rope)
        return [pack(part, self.attention).to(self.policy.device) for part in parts]

    def logprobs(self, batch: PackedBatch, temperature: float) -> TriLogprobs:
        """The three log-probabilities of one micro-batch; ``temperature`` is the sampling temperature."""
        frozen: dict[str, Tensor | None] = {"old": None, "reference": None}
        with torch.no_grad():
            if self.old is not None:
                with self._as_old():
                    frozen["old"] = self._forward(self.old, batch, temperature)[0]
            if self.reference is not None:
                with self._as_reference():
                    frozen["reference"] = self._forward(self.reference, batch, temperature)[0]
        policy, entropy = self._forward(self.policy, batch, temperature)
        old = frozen["old"]
        return TriLogprobs(policy, policy.detach() if old is None else old, frozen["reference"], entropy)

    @torch.no_grad()
    def snapshot_old(self) -> None:
        """Make the old policy equal to the policy, at the start of an iteration. Nothing to do without a snapshot."""
        if self.old is None:
            return
        if self._adapter is not None:
            self._old_adapter = {name: tensor.clone() for name, tensor in self._adapter.tensors().items()}
            return
        for kept, current in zip(self.old.parameters(), self.policy.parameters(), strict=True):
            kept.copy_(current)

    def _as_old(self) -> AbstractContextManager[None]:
        """While open, :attr:`old` is the old policy."""
        return nullcontext() if self._adapter is None else self._adapter.swapped(self._old_adapter)

    def _as_reference(self) -> AbstractContextManager[None]:
        """While open, :attr:`reference` is the reference."""
        return nullcontext() if self._adapter is None else self._adapter.off()

    def _forward(self, model: PreTrainedModel, batch: PackedBatch, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropy, ``[T]`` each."""
        if self._rope is not None:
            self._rope.check(batch.shortest, batch.longest)
        keywords = {}
        if batch.layout is not None:
            keywords = {"shared_prompt": batch.layout, "position_ids": batch.position_ids}
        output = model.base_model(input_ids=batch.input_ids, use_cache=False, **keywords)
        hidden = output.last_hidden_state.flatten(0, 1).index_select(0, batch.predictors)
        return token_logprobs(model.get_output_embeddings(), hidden, batch.targets, temperature, self._logits)
