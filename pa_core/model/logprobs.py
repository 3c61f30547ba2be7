"""Hidden states to log-probabilities of given tokens, without ever holding tokens x vocabulary at once.

The output head runs on the positions that predict a trained token only, in chunks whose logits fit a fixed memory
budget; the backward pass recomputes each chunk's logits. Temperature divides the logits, so that log-probabilities
are those of the distribution that was sampled from.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

# Memory of one chunk's logits. Larger chunks are no faster once the matrix product is large enough.
_CHUNK_BYTES = 64 << 20


def _chunk_rows(vocabulary: int) -> int:
    return max(16, _CHUNK_BYTES // (4 * vocabulary))


def _statistics(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of ``targets[c]``, entropy and log-sum-exp, each ``[c]``, of ``logits[c, V]``."""
    lse = logits.logsumexp(-1)
    logprobs = logits.gather(1, targets.unsqueeze(1)).squeeze(1) - lse
    probabilities = (logits - lse.unsqueeze(1)).exp_()
    entropy = lse - torch.linalg.vecdot(probabilities, logits)
    return logprobs, entropy, lse


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    wide = torch.promote_types(hidden.dtype, torch.float32)
    logits = nn.functional.linear(hidden, weight, bias).to(wide)
    return logits if temperature == 1.0 else logits.div_(temperature)


class _HeadLogprobs(torch.autograd.Function):
    """``hidden[T, D], weight[V, D], bias[V]|None, targets[T] -> logprobs[T], entropy[T]``."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        rows = _chunk_rows(weight.shape[0])
        parts = [
            _statistics(_logits(hidden_chunk, weight, bias, temperature), target_chunk)
            for hidden_chunk, target_chunk in zip(hidden.split(rows), targets.split(rows), strict=True)
        ]
        logprobs, entropy, lse = (torch.cat(column) for column in zip(*parts, strict=True))
        ctx.save_for_backward(hidden, weight, bias, targets, entropy, lse)
        ctx.temperature = temperature
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, entropy, lse = ctx.saved_tensors
        if grad_logprobs is None and grad_entropy is None:
            return None, None, None, None, None
        rows = _chunk_rows(weight.shape[0])
        needs_weight = ctx.needs_input_grad[1]
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight) if needs_weight else None
        grad_bias = torch.zeros_like(bias) if bias is not None else None
        for start in range(0, len(targets), rows):
            part = slice(start, start + rows)
            grad = _logits(hidden[part], weight, bias, ctx.temperature)
            _logits_to_grad_(
                grad,
                targets[part],
                lse[part],
                None if grad_logprobs is None else grad_logprobs[part],
                None if grad_entropy is None else grad_entropy[part],
                entropy[part],
            )
            if ctx.temperature != 1.0:
                grad.div_(ctx.temperature)
            grad = grad.to(hidden.dtype)
            grad_hidden[part] = grad @ weight
            if grad_weight is not None:
                grad_weight.addmm_(grad.T, hidden[part])
            if grad_bias is not None:
                grad_bias += grad.sum(0)
        return grad_hidden, grad_weight, grad_bias, None, None


def _logits_to_grad_(
    logits: Tensor,
    targets: Tensor,
    lse: Tensor,
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    entropy: Tensor,
) -> None:
    """Turn ``logits[c, V]`` into the gradient of the logits, in place.

    d logp_y / d z = onehot(y) - p and dH / d z = -p (log p + H).
    """
    logits.sub_(lse.unsqueeze(1))
    if grad_entropy is None:
        assert grad_logprobs is not None
        logits.exp_().mul_(-grad_logprobs.unsqueeze(1))
    else:
        probabilities = logits.exp()
        slope = grad_entropy.unsqueeze(1)
        level = grad_entropy * entropy if grad_logprobs is None else grad_entropy * entropy + grad_logprobs
        logits.mul_(-slope).sub_(level.unsqueeze(1)).mul_(probabilities)
    if grad_logprobs is not None:
        logits.scatter_add_(1, targets.unsqueeze(1), grad_logprobs.unsqueeze(1))


def token_logprobs(head: nn.Module, hidden: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of each distribution, in nats, differentiable.

    Args:
        head: the output embedding; a plain linear layer takes the fused path.
        hidden: ``[T, D]``, hidden states after the final norm.
        targets: i64[T].
        temperature: > 0.

    Returns:
        ``logprobs[T]``, ``entropy[T]``, float32 (float64 for a float64 model).
    """
    if not len(targets):
        empty = hidden.sum(-1).to(torch.promote_types(hidden.dtype, torch.float32))
        return empty, empty.clone()
    if type(head) is nn.Linear:
        logprobs, entropy = _HeadLogprobs.apply(hidden, head.weight, head.bias, targets, temperature)
        return logprobs, entropy

    def chunk_statistics(hidden_chunk: Tensor, target_chunk: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = head(hidden_chunk)
        return _statistics(logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature, target_chunk)

    rows = _chunk_rows(int(getattr(head, "out_features", 1 << 17)))
    parts = [
        checkpoint(chunk_statistics, hidden_chunk, target_chunk, use_reentrant=False)
        for hidden_chunk, target_chunk in zip(hidden.split(rows), targets.split(rows), strict=True)
    ]
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
