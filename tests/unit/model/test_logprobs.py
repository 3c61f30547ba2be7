"""The chunked output head against log_softmax on all positions at once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pa_core.model import logprobs
from pa_core.model.logits import LogitRule
from pa_core.model.logprobs import token_logprobs


class Wrapped(nn.Linear):
    """Any head that is not a plain linear layer takes the checkpointed path."""


def _plain(
    head: nn.Linear, hidden: Tensor, targets: Tensor, temperature: float, rule: LogitRule
) -> tuple[Tensor, Tensor]:
    logits = head(hidden) * rule.multiplier
    if rule.softcap is not None:
        logits = torch.tanh(logits / rule.softcap) * rule.softcap
    distribution = torch.distributions.Categorical(logits=logits / temperature)
    return distribution.log_prob(targets), distribution.entropy()


@pytest.mark.parametrize("head_class", [nn.Linear, Wrapped])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("use", ["both", "logprobs", "entropy"])
@pytest.mark.parametrize("rule", [LogitRule(), LogitRule(3.0), LogitRule(3.0, 0.8)], ids=["plain", "scaled", "capped"])
def test_values_and_gradients_equal_the_unchunked_head(
    monkeypatch: pytest.MonkeyPatch,
    head_class: type[nn.Linear],
    bias: bool,
    temperature: float,
    use: str,
    rule: LogitRule,
) -> None:
    monkeypatch.setattr(logprobs, "_chunk_rows", lambda vocabulary: 5)
    torch.manual_seed(0)
    head = head_class(8, 30, bias=bias).double()
    hidden = torch.randn(17, 8, dtype=torch.double, requires_grad=True)
    targets = torch.randint(0, 30, (17,))
    weights = torch.randn(2, 17, dtype=torch.double)
    leaves = [hidden, *head.parameters()]

    def grads(values: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        terms = [
            (w * v).sum()
            for w, v, name in zip(weights, values, ("logprobs", "entropy"), strict=True)
            if use in ("both", name)
        ]
        return torch.autograd.grad(torch.stack(terms).sum(), leaves)

    ours, truth = (f(head, hidden, targets, temperature, rule) for f in (token_logprobs, _plain))
    torch.testing.assert_close(ours, truth)
    torch.testing.assert_close(grads(ours), grads(truth))


def test_no_tensor_of_tokens_by_vocabulary_is_kept_for_the_backward_pass() -> None:
    head = nn.Linear(4, 5000, bias=False)
    hidden = torch.randn(2000, 4, requires_grad=True)
    largest = 0

    def note(tensor: Tensor) -> Tensor:
        nonlocal largest
        largest = max(largest, tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        token_logprobs(head, hidden, torch.zeros(2000, dtype=torch.long), 1.0)
    assert largest == head.weight.numel()
