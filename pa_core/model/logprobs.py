"""Hidden states to log-probabilities of given tokens, without ever holding tokens x vocabulary at once.

The output head runs on the positions that predict a trained token only, in chunks whose logits fit a fixed memory
budget; the backward pass recomputes each chunk's logits. What the model does to its logits (a factor, a soft cap) is
done here too, values and gradients. Temperature divides the logits, so that log-probabilities are those of the
distribution that was sampled from.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from pa_core.model.dtensors import local
from pa_core.model.logits import LogitRule
from pa_core.model.vocabulary import VocabularyShard

# Memory of one chunk's logits. Larger chunks are no faster once the matrix product is large enough.
_CHUNK_BYTES = 64 << 20


def _chunk_rows(vocabulary: int) -> int:
    return max(16, _CHUNK_BYTES // (4 * vocabulary))


def _statistics(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of ``targets[c]``, entropy and log-sum-exp, each ``[c]``, of ``logits[c, V]``."""
    probabilities = logits.softmax(-1)
    largest, where = logits.max(-1)
    # The largest probability is at least 1/V, so this log-sum-exp is as good as one from another pass over V.
    lse = largest - probabilities.gather(1, where.unsqueeze(1)).squeeze(1).log()
    logprobs = logits.gather(1, targets.unsqueeze(1)).squeeze(1) - lse
    expected = torch.bmm(probabilities.unsqueeze(1), logits.unsqueeze(2)).flatten()
    return logprobs, lse - expected, lse


class _Logits:
    """Logits of one chunk after another in the same memory: fresh pages for every chunk cost more than they are worth.

    ``weight[V, D]``, ``bias[V]`` or None. ``z = factor · h W``, or ``cap · tanh(factor · h W / cap)`` with a soft cap;
    temperature is part of both numbers. The result of a call holds until the next call.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, factor: float, cap: float | None, rows: int) -> None:
        self._weight, self._bias, self._factor, self._cap = weight, bias, factor, cap
        wide = torch.promote_types(weight.dtype, torch.float32)
        self._buffer = torch.empty(rows, weight.shape[0], dtype=wide, device=weight.device)

    def __call__(self, hidden: Tensor) -> Tensor:
        logits = self._buffer[: len(hidden)]
        if hidden.dtype == logits.dtype:
            torch.mm(hidden, self._weight.t(), out=logits)
        else:
            logits.copy_(hidden @ self._weight.t())
        if self._bias is not None:
            logits.add_(self._bias)
        if self._cap is not None:
            return logits.mul_(self._factor / self._cap).tanh_().mul_(self._cap)
        return logits if self._factor == 1.0 else logits.mul_(self._factor)

    def cap_slope(self, logits: Tensor) -> Tensor | None:
        """``1 - tanh²`` at ``logits[c, V]``, which they lose when they are worked on in place; None without a cap."""
        return None if self._cap is None else (logits / self._cap).square_().neg_().add_(1)


class _HeadLogprobs(torch.autograd.Function):
    """``hidden[T, D], weight[V, D], bias[V]|None, targets[T] -> logprobs[T], entropy[T]``.

    With ``shard``, V is this process's part of the vocabulary; values and gradients are those of the whole one.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        factor: float,
        cap: float | None,
        shard: VocabularyShard | None,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        here = None
        if shard is not None:
            targets, here = shard.own(targets)
        rows = min(_chunk_rows(weight.shape[0]), len(targets))
        logits = _Logits(weight, bias, factor, cap, rows)
        parts = [
            _statistics(logits(hidden_chunk), target_chunk)
            for hidden_chunk, target_chunk in zip(hidden.split(rows), targets.split(rows), strict=True)
        ]
        logprobs, entropy, lse = (torch.cat(column) for column in zip(*parts, strict=True))
        if shard is not None and here is not None:
            logprobs, entropy, lse = shard.joined(logprobs, entropy, lse, here)
        ctx.save_for_backward(hidden, weight, bias, targets, entropy, lse, here)
        ctx.factor, ctx.cap, ctx.shard = factor, cap, shard
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, entropy, lse, here = ctx.saved_tensors
        if grad_logprobs is None and grad_entropy is None:
            return None, None, None, None, None, None, None
        rows = min(_chunk_rows(weight.shape[0]), len(targets))
        logits = _Logits(weight, bias, ctx.factor, ctx.cap, rows)
        # d logits / d (hidden W) has this factor, applied to the T weights instead of T x V numbers.
        slope = None if grad_entropy is None else grad_entropy * ctx.factor
        level = None if grad_logprobs is None else grad_logprobs * ctx.factor
        hit = level if level is None or here is None else level * here
        grad_hidden = torch.empty_like(hidden)
        grad_weight: Tensor | None = None
        grad_bias = torch.zeros_like(bias) if bias is not None else None
        for start in range(0, len(targets), rows):
            part = slice(start, start + rows)
            chunk = logits(hidden[part])
            cap_slope = logits.cap_slope(chunk)
            _logits_to_grad_(
                chunk,
                targets[part],
                lse[part],
                entropy[part],
                None if level is None else level[part],
                None if slope is None else slope[part],
                None if hit is None else hit[part],
            )
            grad = (chunk if cap_slope is None else chunk.mul_(cap_slope)).to(hidden.dtype)
            torch.mm(grad, weight, out=grad_hidden[part])
            if grad_weight is not None:
                grad_weight.addmm_(grad.T, hidden[part])
            elif ctx.needs_input_grad[1]:
                grad_weight = grad.T @ hidden[part]
            if grad_bias is not None:
                grad_bias += grad.sum(0)
        if ctx.shard is not None:
            grad_hidden = ctx.shard.summed(grad_hidden)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None


def _logits_to_grad_(
    logits: Tensor,
    targets: Tensor,
    lse: Tensor,
    entropy: Tensor,
    level: Tensor | None,
    slope: Tensor | None,
    hit: Tensor | None,
) -> Tensor:
    """Turn ``logits[c, V]`` into the gradient of the logits, in place.

    d logp_y / d z = onehot(y) - p, weighted by ``level[c]``; d H / d z = -p (log p + H), weighted by ``slope[c]``.
    ``hit[c]`` is the weight of onehot(y): ``level``, but 0 where y is in another process's part of the vocabulary.
    """
    logits.sub_(lse.unsqueeze(1))
    if slope is None:
        assert level is not None
        logits.exp_().mul_(-level.unsqueeze(1))
    else:
        probabilities = logits.exp()
        offset = slope * entropy if level is None else slope * entropy + level
        logits.mul_(-slope.unsqueeze(1)).sub_(offset.unsqueeze(1)).mul_(probabilities)
    if hit is not None:
        logits.scatter_add_(1, targets.unsqueeze(1), hit.unsqueeze(1))
    return logits


def token_logprobs(
    head: nn.Module, hidden: Tensor, targets: Tensor, temperature: float, rule: LogitRule | None = None
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of each distribution, in nats, differentiable.

    Args:
        head: the output embedding; a plain linear layer takes the fused path.
        hidden: ``[T, D]``, hidden states after the final norm.
        targets: i64[T].
        temperature: > 0.
        rule: what the model does between head and logits; None: nothing.

    Returns:
        ``logprobs[T]``, ``entropy[T]``, float32 (float64 for a float64 model).
    """
    if not len(targets):
        # The head takes part all the same: FSDP adds up gradients of the same parameters on every process.
        nothing = sum(local(parameter).sum() * 0 for parameter in head.parameters())
        empty = (hidden.sum(-1) + nothing).to(torch.promote_types(hidden.dtype, torch.float32))
        return empty, empty.clone()
    rule = rule or LogitRule()
    factor = rule.multiplier / temperature
    cap = None if rule.softcap is None else rule.softcap / temperature
    if type(head) is nn.Linear:
        weight, bias = local(head.weight), None if head.bias is None else local(head.bias)
        shard = VocabularyShard.of(head.weight)
        logprobs, entropy = _HeadLogprobs.apply(hidden, weight, bias, targets, factor, cap, shard)
        return logprobs, entropy

    def chunk_statistics(hidden_chunk: Tensor, target_chunk: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = head(hidden_chunk)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) * factor
        return _statistics(logits if cap is None else torch.tanh(logits / cap) * cap, target_chunk)

    rows = _chunk_rows(int(getattr(head, "out_features", 1 << 17)))
    parts = [
        checkpoint(chunk_statistics, hidden_chunk, target_chunk, use_reentrant=False)
        for hidden_chunk, target_chunk in zip(hidden.split(rows), targets.split(rows), strict=True)
    ]
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
