"""KL estimators against hand-computed values and against the divergence and gradient of a whole distribution."""

from __future__ import annotations

import math

import pytest
import torch

from pa_core.objective.kl import ESTIMATORS, k3, kl_estimate

POLICY = torch.tensor([-1.0, -1.0, -3.0])
REFERENCE = torch.tensor([-1.0, -2.0, -1.0])  # policy - reference: 0, 1, -2


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("k1", [0.0, 1.0, -2.0]),
        ("k2", [0.0, 0.5, 2.0]),
        ("k3", [0.0, math.exp(-1), math.exp(2) - 3]),
    ],
)
def test_estimators_have_their_published_values(estimator: str, expected: list[float]) -> None:
    assert kl_estimate(POLICY, REFERENCE, estimator).tolist() == pytest.approx(expected, rel=1e-6)


def test_k3_is_zero_at_equality_and_never_negative_for_tiny_differences() -> None:
    policy = torch.linspace(-3, -1, 101)
    assert k3(policy, policy).abs().max() == 0
    assert k3(policy, policy + 1e-4).min() >= 0


def test_a_clamp_limits_value_and_gradient_and_survives_huge_differences() -> None:
    policy = torch.tensor([-1.0, -200.0], requires_grad=True)
    kl = kl_estimate(policy, torch.tensor([-2.0, -1.0]), "k3", clamp=10.0)
    assert kl.tolist() == pytest.approx([math.exp(-1), 10.0])
    kl.sum().backward()
    assert policy.grad is not None
    assert policy.grad.tolist() == pytest.approx([1 - math.exp(-1), 0.0])
    assert kl_estimate(POLICY, REFERENCE, "k1", clamp=1.5).tolist() == [0.0, 1.0, -1.5]


@pytest.fixture(scope="module")
def exact() -> tuple[torch.Tensor, torch.Tensor, float, torch.Tensor]:
    """Logits and log-probabilities of two distributions, their reverse KL divergence and its gradient."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, generator=generator, dtype=torch.float64).requires_grad_()
    reference = torch.randn(7, generator=generator, dtype=torch.float64).log_softmax(0)
    policy = logits.log_softmax(0)
    divergence = (policy.exp() * (policy - reference)).sum()
    (gradient,) = torch.autograd.grad(divergence, logits)
    return logits, reference, divergence.item(), gradient


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_are_unbiased_values(
    estimator: str, exact: tuple[torch.Tensor, torch.Tensor, float, torch.Tensor]
) -> None:
    logits, reference, divergence, _ = exact
    policy = logits.detach().log_softmax(0)
    assert float((policy.exp() * ESTIMATORS[estimator](policy, reference)).sum()) == pytest.approx(divergence)


@pytest.mark.parametrize(
    ("estimator", "weighted", "right"),
    [("k2", False, True), ("k1", True, True), ("k3", True, True), ("k1", False, False), ("k3", False, False)],
)
def test_which_loss_terms_have_the_gradient_of_the_divergence(
    estimator: str, weighted: bool, right: bool, exact: tuple[torch.Tensor, torch.Tensor, float, torch.Tensor]
) -> None:
    # The expected gradient over the policy's own samples, summed exactly: what the module's docstring claims.
    logits, reference, _, truth = exact
    policy = logits.log_softmax(0)
    term = ESTIMATORS[estimator](policy, reference)
    if weighted:
        term = term * (policy - policy.detach()).exp()
    (gradient,) = torch.autograd.grad((policy.detach().exp() * term).sum(), logits)
    assert torch.allclose(gradient, truth) == right
    if (estimator, weighted) == ("k1", False):
        assert gradient.abs().max() < 1e-12


def test_k1_in_the_reward_has_the_gradient_of_the_divergence(
    exact: tuple[torch.Tensor, torch.Tensor, float, torch.Tensor],
) -> None:
    logits, reference, _, truth = exact
    policy = logits.log_softmax(0)
    penalty = ESTIMATORS["k1"](policy, reference).detach()
    (gradient,) = torch.autograd.grad((policy.detach().exp() * penalty * policy).sum(), logits)
    assert torch.allclose(gradient, truth)
