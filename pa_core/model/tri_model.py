"""Policy, old policy and reference, side by side: three log-probabilities in one micro-step.

Periodic Asynchrony (arXiv 2511.18871) calls this the tri-model. All three run over the same packed batch, so that
they differ by their weights only. With one optimizer step per iteration the old policy *is* the policy, and its
log-probabilities are the policy's own, detached: the ratio is exactly 1 and a forward pass is saved.

Models stay in evaluation mode, the policy included: log-probabilities must be those of the distribution that was
sampled from, hence no dropout. Gradients flow regardless. Do not call ``train()`` on them.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from pa_core.errors import ModelError
from pa_core.model.attention import ATTENTION_NAME, require_exact, require_window
from pa_core.model.logprobs import token_logprobs
from pa_core.model.packing import Attention, PackedBatch, TrainGroup, micro_batches, pack
from pa_core.model.selfcheck import check_logprobs


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


def _frozen_copy(model: PreTrainedModel) -> PreTrainedModel:
    duplicate = copy.deepcopy(model)
    duplicate.requires_grad_(False)
    duplicate.eval()
    return duplicate


class TriModel:
    """The three models of an update.

    The reference and the snapshot are copies of ``policy`` as it is at construction; so construct from the initial
    model, and load a checkpoint's weights into :attr:`policy` afterwards.
    """

    def __init__(
        self,
        policy: PreTrainedModel,
        attention: Attention = "shared_prompt",
        *,
        with_reference: bool = False,
        with_old: bool = False,
        self_check: bool = True,
    ) -> None:
        """Prepare ``policy`` in place for the chosen attention and check it against its own forward.

        Args:
            with_reference: keep a frozen copy for the KL term (``objective.beta`` > 0).
            with_old: keep a snapshot as old policy (``optimizer.steps_per_iteration`` > 1).

        Raises:
            ModelError: when log-probabilities would not be the model's own; names the setting to change.
        """
        self.attention = attention
        self.policy = policy.eval()
        if attention == "shared_prompt":
            require_exact(policy.config)
            policy.set_attn_implementation(ATTENTION_NAME)
            if policy.config._attn_implementation != ATTENTION_NAME:
                raise ModelError(
                    f"model.attention=shared_prompt: {type(policy).__name__} does not take an attention function; "
                    "set model.attention=per_sample"
                )
        elif policy.config._attn_implementation == ATTENTION_NAME:
            policy.set_attn_implementation("sdpa")
        self.self_check_difference: float | None = None
        if self_check:
            self.self_check_difference = check_logprobs(
                policy, attention, lambda batch: self._forward(policy, batch, 1.0)[0]
            )
        self.reference = _frozen_copy(policy) if with_reference else None
        self.old = _frozen_copy(policy) if with_old else None

    def micro_batches(self, groups: list[TrainGroup], token_budget: int) -> list[PackedBatch]:
        """Packed micro-batches of at most ``token_budget`` computed tokens, on the policy's device."""
        parts = micro_batches(groups, token_budget, self.attention)
        return [pack(part, self.attention).to(self.policy.device) for part in parts]

    def logprobs(self, batch: PackedBatch, temperature: float) -> TriLogprobs:
        """The three log-probabilities of one micro-batch; ``temperature`` is the sampling temperature."""
        frozen: dict[str, Tensor | None] = {"old": None, "reference": None}
        with torch.no_grad():
            for name, model in (("old", self.old), ("reference", self.reference)):
                if model is not None:
                    frozen[name] = self._forward(model, batch, temperature)[0]
        policy, entropy = self._forward(self.policy, batch, temperature)
        old = frozen["old"]
        return TriLogprobs(policy, policy.detach() if old is None else old, frozen["reference"], entropy)

    @torch.no_grad()
    def snapshot_old(self) -> None:
        """Make the old policy equal to the policy, at the start of an iteration. Nothing to do without a snapshot."""
        if self.old is None:
            return
        for kept, current in zip(self.old.parameters(), self.policy.parameters(), strict=True):
            kept.copy_(current)

    def _forward(self, model: PreTrainedModel, batch: PackedBatch, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropy, ``[T]`` each."""
        keywords = {}
        if batch.layout is not None:
            require_window(model.config, batch.layout)
            keywords = {"shared_prompt": batch.layout, "position_ids": batch.position_ids}
        output = model.base_model(input_ids=batch.input_ids, use_cache=False, **keywords)
        hidden = output.last_hidden_state.flatten(0, 1).index_select(0, batch.predictors)
        return token_logprobs(model.get_output_embeddings(), hidden, batch.targets, temperature)
