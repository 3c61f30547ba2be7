"""The tri-model on several devices: policy, old policy and reference, all laid out alike on one mesh.

Every process calls the same methods with the same arguments. The leading process has the initial model whole, in its
host's memory; the others get their parts from it, tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from pa_core.config import TrainConfig
from pa_core.errors import ModelError
from pa_core.model.attention import ATTENTION_NAME
from pa_core.model.checkpointing import checkpoint_layers
from pa_core.model.choice import prepare_attention
from pa_core.model.dtensors import local
from pa_core.model.loading import load_structure
from pa_core.model.logits import logit_rule
from pa_core.model.packing import Attention, PackedBatch, TrainGroup, TrainSample, micro_batches, pack
from pa_core.model.parallel import Layout, Spread, fill
from pa_core.model.rope import rope_limit
from pa_core.model.selfcheck import check_logprobs, own_implementation, probe_groups
from pa_core.model.shares import shares
from pa_core.model.tri_model import TriLogprobs, TriModel


class ParallelTriModel(TriModel):
    """A :class:`TriModel` whose three models are spread over the processes of ``layout``.

    Attributes:
        partial: names of parameters that every process along ``tp`` has whole, with a gradient of its heads only.
    """

    def __init__(
        self,
        config: TrainConfig,
        layout: Layout,
        initial: PreTrainedModel | None,
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        """Lay out the models that ``config`` needs and check them against ``initial``'s own forward.

        Args:
            initial: the whole initial model, on the leading process only; it is left as it is, but for the attention
                that it is switched to.
            progress: called now and then.

        Raises:
            ModelError: the model cannot be laid out so, or its log-probabilities would not be its own.
        """
        self._layout = layout
        self._adapter = None
        self._old_adapter = {}
        self.attention = _agreed_attention(config, initial)
        structure = load_structure(config.model)
        self._rope, self._logits = rope_limit(structure.config), logit_rule(structure.config)
        self._spread: dict[int, Spread] = {}
        self.policy = self._laid_out(structure, config.trainer.activation_checkpointing)
        self.partial = self._spread[id(self.policy)].partial
        self.reference = self._frozen(config, config.model.reference_dtype) if config.objective.beta > 0 else None
        self.old = self._frozen(config, "model") if config.optimizer.steps_per_iteration > 1 else None
        models = [model for model in (self.policy, self.reference, self.old) if model is not None]
        source = None if initial is None else dict(initial.named_parameters()) | dict(initial.named_buffers())
        names = [name for name, _ in [*self.policy.named_parameters(), *self.policy.named_buffers()]]
        fill(models, names, source, layout, progress)
        self.self_check_difference = self._check(initial)

    def _laid_out(self, structure: PreTrainedModel, checkpointing: bool = False) -> PreTrainedModel:
        if self.attention == "shared_prompt":
            structure.set_attn_implementation(ATTENTION_NAME)
        else:
            structure.set_attn_implementation(own_implementation(structure))
        structure.eval()
        if checkpointing:
            checkpoint_layers(structure)
        spread = Spread(structure, super()._forward, self._layout)
        self._spread[id(structure)] = spread
        return structure

    def _frozen(self, config: TrainConfig, dtype: str) -> PreTrainedModel:
        structure = load_structure(config.model)
        structure.requires_grad_(False)
        if dtype != "model":
            # Parameters alone: rotary frequencies are buffers, and rounded ones would turn later positions.
            for parameter in structure.parameters():
                parameter.data = parameter.data.to(getattr(torch, dtype))
        return self._laid_out(structure)

    def _check(self, initial: PreTrainedModel | None) -> float | None:
        """Log-probabilities of the laid-out policy against those of the whole model, on the leading process."""

        @torch.no_grad()
        def ours(batch: PackedBatch) -> Tensor:
            logprobs = self._forward(self.policy, batch.to(self._layout.device), 1.0)[0]
            self._spread[id(self.policy)].free()
            return logprobs.cpu()

        if initial is not None:
            try:
                return check_logprobs(initial, self.attention, ours)
            except ModelError as error:
                raise ModelError(f"{error}; or the model cannot be split so: try parallel.tp=1") from None
        ours(pack(probe_groups(self.policy), self.attention))
        return None

    def logprobs(self, batch: PackedBatch, temperature: float) -> TriLogprobs:
        """As :meth:`TriModel.logprobs`; without gradient it gives back what it gathered, as a backward pass would."""
        found = super().logprobs(batch, temperature)
        if not torch.is_grad_enabled():
            self._spread[id(self.policy)].free()
        return found

    def own_micro_batches(self, groups: list[TrainGroup], token_budget: int) -> list[PackedBatch | None]:
        """This process's share of ``groups`` in micro-batches; None where it has none while others still compute.

        All processes get equally many, since each of them is a step of all: see :meth:`idle`.
        """
        assigned = [
            micro_batches(share, token_budget, self.attention, self._rope)
            for share in shares(groups, self._layout.size("fsdp"), self.attention)
        ]
        own = assigned[self._layout.rank("fsdp")]
        packed = [pack(part, self.attention).to(self._layout.device) for part in own]
        return [*packed, *[None] * (max(map(len, assigned)) - len(packed))]

    def idle(self, temperature: float) -> None:
        """Take part in a forward-backward pass of the others without adding anything."""
        token = torch.zeros(1, dtype=torch.int32).numpy()
        sample = TrainSample(token, torch.zeros(1).numpy(), torch.ones(1, dtype=torch.bool).numpy(), 0.0)
        batch = pack([TrainGroup("idle", token, (sample,))], self.attention).to(self._layout.device)
        logprobs = self.logprobs(batch, temperature)
        ((logprobs.policy.sum() + logprobs.entropy.sum()) * 0).backward()

    def snapshot_old(self) -> None:
        """Make the old policy equal to the policy, part by part."""
        if self.old is None:
            return
        for kept, current in zip(self.old.parameters(), self.policy.parameters(), strict=True):
            local(kept.detach()).copy_(local(current.detach()))

    def _forward(self, model: PreTrainedModel, batch: PackedBatch, temperature: float) -> tuple[Tensor, Tensor]:
        logprobs, entropy = self._spread[id(model)](batch, temperature)
        return logprobs, entropy


def _agreed_attention(config: TrainConfig, initial: PreTrainedModel | None) -> Attention:
    """The attention that the leading process finds possible for ``initial``, told to all."""
    choices: list[Attention] = ["shared_prompt", "per_sample"]
    chosen = torch.zeros(1, dtype=torch.int64)
    if initial is not None:
        attention, _ = prepare_attention(initial, config.model.attention, _no_logprobs, self_check=False)
        chosen += choices.index(attention)
    dist.broadcast(chosen, src=0)
    return choices[int(chosen)]


def _no_logprobs(_: Any) -> Tensor:
    raise ModelError("the attention is checked once the model is laid out")
