"""Worker of ``pa bench peers``: the training step with PrefixGrouper's attention. Runs in the peers' environment.

As its documentation has it: attention through ``PrefixGrouper.forward`` with an adapter for the attention function,
``concat_input``, the model's forward with ``prefix_grouper=``, and ``split_output(include_prefix_last=1)``. Two things
are our choice. The attention function is transformers' SDPA, since its own registration is for FlashAttention only,
which needs CUDA; and the output head runs on the response positions only, after the split, which is less work than its
example does. The loss is GRPO's clipped surrogate, mean over tokens.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from prefix_grouper import PrefixGrouper
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from pa_core.bench.gradients import save_gradients
from pa_core.bench.side import serve

_NAME = "prefix_grouper_sdpa"


def _sdpa(
    query: Tensor, key: Tensor, value: Tensor, padding: Tensor, module: torch.nn.Module, **keywords: Any
) -> Tensor:
    """SDPA where FlashAttention would be: causal, aligned at the end when there are more keys than queries."""
    length, keys = query.shape[2], key.shape[2]
    mask = None
    if length != keys:
        causal = torch.ones(length, keys, dtype=torch.bool, device=query.device).tril(keys - length)
        mask = causal & padding[:, None, None, :].bool()
    output: Tensor = sdpa_attention_forward(module, query, key, value, mask, **keywords)[0]
    return output


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    prefix_grouper: PrefixGrouper,
    **keywords: Any,
) -> tuple[Tensor, None]:
    return prefix_grouper.forward(_sdpa, query, key, value, module, **keywords), None


class PrefixGrouperSide:
    """The step over one recorded group, whole."""

    def load(
        self,
        model: str,
        dtype: str,
        device: str,
        threads: int,
        prompt: list[int],
        responses: list[list[int]],
        rewards: list[float],
    ) -> None:
        """Load the model and take one step as warm-up."""
        torch.set_num_threads(threads)
        AttentionInterface.register(_NAME, _attention)
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).to(device).eval()
        self._model.set_attn_implementation(_NAME)
        self._device = torch.device(device)
        self._prompt = torch.tensor([prompt], device=device)
        self._responses = torch.tensor(responses, device=device)
        scores = torch.tensor(rewards, dtype=torch.float64)
        # TRL's convention: unbiased standard deviation, 1e-4 added.
        self._advantages = ((scores - scores.mean()) / (scores.std() + 1e-4)).float().unsqueeze(1).to(device)
        self.step()

    def _logprobs(self) -> Tensor:
        """Log-probabilities ``[K, Lr]`` of the responses."""
        prompt_mask = torch.ones_like(self._prompt, dtype=torch.bool)
        mask = torch.ones_like(self._responses, dtype=torch.bool)
        grouper = PrefixGrouper.from_ungrouped_masks(
            prefix_mask=prompt_mask,
            suffix_mask=mask,
            group_sizes=len(self._responses),
            padding_mode="right",
            device=self._device,
        )
        length, own = self._prompt.shape[1], torch.arange(self._responses.shape[1], device=self._device)
        positions = torch.cat(
            [torch.arange(length, device=self._device), (length + own).repeat(len(self._responses))]
        ).unsqueeze(0)
        hidden = self._model.base_model(
            input_ids=grouper.concat_input(self._prompt, prompt_mask, self._responses, mask),
            position_ids=positions,
            use_cache=False,
            prefix_grouper=grouper,
        ).last_hidden_state
        _, _, suffix, _ = grouper.split_output(hidden, include_prefix_last=1)
        targets = grouper.convert_padding(self._responses, mask, padding_mode="right")
        logits = self._model.get_output_embeddings()(suffix[:, :-1]).float()
        chosen: Tensor = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        logprobs: Tensor = chosen - logits.logsumexp(-1)
        return logprobs

    def step(self) -> float:
        """Seconds of forward, loss and backward over the group."""
        self._model.zero_grad(set_to_none=True)
        started = time.perf_counter()
        logprobs = self._logprobs()
        ratio = torch.exp(logprobs - logprobs.detach())
        surrogate = -torch.minimum(ratio * self._advantages, ratio.clamp(0.8, 1.2) * self._advantages)
        surrogate.mean().backward()
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started

    def gradients(self, path: str) -> None:
        """Write the gradient of the mean loss per token, by parameter name, as safetensors."""
        save_gradients(self._model, path)


def main() -> None:
    """Serve one benchmark."""
    side = PrefixGrouperSide()
    serve({"load": side.load, "step": side.step, "gradients": side.gradients})


if __name__ == "__main__":
    main()
