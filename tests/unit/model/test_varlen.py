"""Attention without padding, for CUDA and NPUs: against dense softmax and against the library's own forward.

Where there is no device, stand-ins answer its calls (``varlen_devices.py``); the last tests run on the device itself.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
import torch
from model_truth import gradients, per_sample_logprobs, random_groups, relative
from tiny_families import WINDOW, tiny_family
from torch import Tensor
from varlen_devices import FakeTorchNpu, flash_on_cpu

from pa_core.errors import ModelError
from pa_core.model import attention, npu_fusion
from pa_core.model.attention import backend_for
from pa_core.model.backend import AttentionRule, Backend
from pa_core.model.block_attention import BlockAttention
from pa_core.model.kernels import MatmulKernel
from pa_core.model.layout import PromptLayout, build_layout
from pa_core.model.npu_fusion import NpuFusionKernel
from pa_core.model.packing import pack
from pa_core.model.tri_model import TriModel
from pa_core.model.varlen import VarlenAttention
from pa_core.model.varlen_kernels import CudaFlashKernel, Sequences

SHAPES = {
    "ragged groups": [(5, (4, 1, 0, 12)), (1, (3, 3)), (23, (2, 11, 4, 0))],
    "one group": [(7, (3, 5))],
    "a group without responses": [(4, (0,)), (3, (2,))],
    "no response at all": [(4, (0, 0)), (3, ())],
    "single tokens": [(1, (1,)), (1, (1,))],
}
HEADS, KV_HEADS, SIZE = 4, 2, 8


class _Refuses:
    """For layers that must not get here."""

    name = "refuses"

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layout: PromptLayout, rule: AttentionRule) -> Tensor:
        raise AssertionError("not computed by the kernel")


@pytest.fixture(params=["cuda", "npu"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    """The backend of each device, its device calls answered on the CPU."""
    if request.param == "npu":
        monkeypatch.setattr(npu_fusion, "_torch_npu", FakeTorchNpu)
        yield VarlenAttention(NpuFusionKernel(), _Refuses())
    else:
        with flash_on_cpu():
            yield VarlenAttention(CudaFlashKernel(), _Refuses())


def _dense(q: Tensor, k: Tensor, v: Tensor, layout: PromptLayout, sinks: Tensor, window: int | None) -> Tensor:
    """Softmax over all scores of the row at once, the sinks among them."""
    visible = torch.zeros(layout.tokens, layout.tokens, dtype=torch.bool)
    positions = torch.zeros(layout.tokens, dtype=torch.long)
    for group in layout.groups:
        prompt = slice(group.prompt.start, group.prompt.end)
        for segment in (group.prompt, *group.responses):
            rows = slice(segment.start, segment.end)
            positions[rows] = torch.arange(segment.length)
            visible[rows, rows] = torch.ones(segment.length, segment.length, dtype=torch.bool).tril()
            if segment is not group.prompt:
                positions[rows] += group.prompt.length
                visible[rows, prompt] = True
    if window is not None:
        visible &= positions[None, :] > positions[:, None] - window
    k, v = (rows.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for rows in (k, v))
    scores = (torch.einsum("qhd,khd->hqk", q, k) * 0.3).masked_fill(~visible, -torch.inf)
    scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(q), 1)], dim=-1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :-1], v)


def _operands(tokens: int, dtype: torch.dtype = torch.float32, size: int = SIZE) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(tokens, HEADS, size), (tokens, KV_HEADS, size), (tokens, KV_HEADS, size), (HEADS,)]
    return [torch.randn(shape).to(dtype) for shape in shapes]


def _with_gradients(
    backend: Backend | None, layout: PromptLayout, operands: list[Tensor], window: int | None = None
) -> list[Tensor]:
    """Output and gradients of q, k, v and the sinks; by dense softmax where ``backend`` is None."""
    q, k, v, sinks = leaves = [operand.detach().clone().requires_grad_() for operand in operands]
    if backend is None:
        out = _dense(q, k, v, layout, sinks, window)
    else:
        out = backend.attend(q, k, v, layout, AttentionRule(0.3, window, sinks=sinks))
    weights = torch.linspace(-1, 1, out.numel()).to(out).view_as(out)
    (out * weights).sum().backward()
    found = [leaf.grad for leaf in leaves]
    return [out.detach(), *(grad for grad in found if grad is not None)]


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES.keys())
def test_output_and_gradients_are_those_of_dense_softmax(backend: Backend, shapes: list) -> None:
    layout = build_layout(shapes)
    operands = _operands(layout.tokens)
    expected = _with_gradients(None, layout, operands)
    ours = _with_gradients(backend, layout, operands)
    assert len(ours) == len(expected) == 5
    for got, truth in zip(ours, expected, strict=True):
        torch.testing.assert_close(got, truth, rtol=1e-5, atol=1e-5)


def _worst(kind: str, device: str = "cpu", dtype: torch.dtype = torch.float32) -> tuple[float, float, float, float]:
    """Relative distance of log-probabilities and of all gradients from float32 per sample: ours, then the library's."""
    groups = random_groups([(5, (4, 1, 0, 12)), (1, (3, 3)), (23, (2, 11, 4, 0)), (3, (25, 6))])
    models = [tiny_family(kind).to(dtype) for _ in range(3)]
    truth_model = models[0].float()
    expected, _ = per_sample_logprobs(truth_model, groups)
    weights = torch.linspace(-1, 1, len(expected))
    (expected * weights).sum().backward()
    truth = torch.cat([grad.flatten() for grad in gradients(truth_model).values()])
    found = []
    for model, shared in zip(models[1:], (True, False), strict=True):
        model.to(device)
        if shared:
            batch = pack(groups).to(torch.device(device))
            logprobs = TriModel(model, "shared_prompt", self_check=False).logprobs(batch, 1.0).policy
        else:
            with torch.device(device):
                logprobs, _ = per_sample_logprobs(model, groups)
        (logprobs.float() * weights.to(device)).sum().backward()
        ours = torch.cat([grad.float().cpu().flatten() for grad in gradients(model).values()])
        found += [relative(logprobs.float().cpu(), expected), relative(ours, truth)]
    return found[0], found[1], found[2], found[3]


@pytest.mark.parametrize("kind", ["llama", "gpt_oss"])
def test_logprobs_and_all_gradients_equal_the_librarys_own_per_sample_forward(
    backend: VarlenAttention, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "gpt_oss":  # every other layer has a window, which another backend computes
        backend._otherwise = BlockAttention(MatmulKernel())
    monkeypatch.setattr(attention, "backend_for", lambda device, dtype, softcap: backend)
    logprobs, grads, *_ = _worst(kind)
    assert logprobs < 1e-5 and grads < 1e-5, (logprobs, grads)


def test_a_window_and_a_cap_are_computed_elsewhere(backend: VarlenAttention) -> None:
    layout = build_layout([(5, (4, 1))])
    q, k, v, _ = _operands(layout.tokens)
    whole = backend.attend(q, k, v, layout, AttentionRule(0.3))
    fitting = backend.attend(q, k, v, layout, AttentionRule(0.3, window=9))
    assert torch.equal(whole, fitting), "a window that no sample exceeds hides nothing"
    for rule in (AttentionRule(0.3, window=WINDOW), AttentionRule(0.3, softcap=2.0)):
        with pytest.raises(AssertionError, match="not computed by the kernel"):
            backend.attend(q, k, v, layout, rule)


def test_a_row_of_more_segments_than_the_npu_takes_is_computed_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeTorchNpu()
    monkeypatch.setattr(npu_fusion, "_torch_npu", lambda: fake)
    monkeypatch.setattr(npu_fusion, "_MOST_SEQUENCES", 3)
    backend = VarlenAttention(NpuFusionKernel(), BlockAttention(MatmulKernel()))
    outs = []
    for responses, calls in (((2, 1), 2), ((1, 1, 1), 0)):
        layout = build_layout([(4, responses)])
        q, k, v, _ = _operands(layout.tokens)
        outs.append(backend.attend(q, k, v, layout, AttentionRule(0.3)))
        assert len(fake.calls) == calls
        fake.calls.clear()
    torch.testing.assert_close(outs[0][:5], outs[1][:5])  # the prompt and the first response's first token


def test_pytorchs_own_shapes_of_the_flash_operators_are_those_expected() -> None:
    """The stand-in's log-sum-exp has the shape that PyTorch itself gives it, by its meta kernels."""
    q, k, v, _ = (operand.to("meta", torch.bfloat16) for operand in _operands(9))
    sequences = Sequences.of([4, 5], torch.device("meta"))
    out, lse = CudaFlashKernel().forward(q, k, v, sequences, sequences, True, 0.3)
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, (9, HEADS), torch.float32)
    grads = CudaFlashKernel().backward(out, q, k, v, out, lse, sequences, sequences, True, 0.3)
    assert [grad.shape for grad in grads] == [q.shape, k.shape, v.shape]


@pytest.mark.parametrize(("size", "taken"), [(64, True), (80, True), (100, False), (208, False), (256, True)])
def test_the_flash_kernel_takes_head_sizes_that_have_a_backward_pass_everywhere(size: int, taken: bool) -> None:
    assert CudaFlashKernel().takes(torch.empty(3, HEADS, size), 2) == taken


def test_the_choice_by_device_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "cuda_flash_runs", lambda device, dtype: dtype == torch.bfloat16)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    cuda = torch.device("cuda")
    windows = "for sliding windows and unusual head sizes"
    assert backend_for(cuda, torch.bfloat16, None).name == f"varlen-flash (flex {windows})"
    assert backend_for(cuda, torch.float32, None).name == "flex"
    assert backend_for(cuda, torch.bfloat16, 50.0).name == "flex"
    assert backend_for(cuda, torch.float64, None).name == "matmul"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert backend_for(cuda, torch.bfloat16, None).name == f"varlen-flash (matmul {windows})"
    assert backend_for(torch.device("cpu"), torch.bfloat16, None).name == "cpu-flash"


class _Npu:
    """``torch.device("npu")`` exists only where torch_npu does."""

    type = "npu"


def test_an_npu_gets_its_own_attention_or_an_error_that_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("torch_npu") is None:
        with pytest.raises(ModelError, match=r"torch-npu.*model\.device=cpu"):
            backend_for(_Npu(), torch.bfloat16, None)  # type: ignore[arg-type]
    monkeypatch.setattr(npu_fusion, "_torch_npu", FakeTorchNpu)
    name = backend_for(_Npu(), torch.bfloat16, None).name  # type: ignore[arg-type]
    assert name == "npu-fusion (matmul for sliding windows and more than 2048 segments in a row)"
    assert backend_for(_Npu(), torch.bfloat16, 50.0).name == "matmul"  # type: ignore[arg-type]


@pytest.fixture(params=["cuda", "npu"])
def accelerator(request: pytest.FixtureRequest) -> torch.device:
    """A device that is really there."""
    if request.param == "npu" and importlib.util.find_spec("torch_npu") is not None:
        importlib.import_module("torch_npu")
    module = getattr(torch, request.param, None)
    if module is None or not module.is_available():
        pytest.skip(f"no {request.param} device here")
    return torch.device(request.param, 0)


@pytest.mark.parametrize(
    ("dtype", "window", "tolerance"),
    [(torch.bfloat16, None, 4e-2), (torch.bfloat16, WINDOW, 4e-2), (torch.float32, None, 1e-3)],
    ids=["bfloat16", "bfloat16-window", "float32"],
)
def test_on_the_device_output_and_gradients_are_those_of_dense_softmax(
    accelerator: torch.device, dtype: torch.dtype, window: int | None, tolerance: float
) -> None:
    for shapes in SHAPES.values():
        layout = build_layout(shapes)
        operands = _operands(layout.tokens, dtype, size=64)
        expected = _with_gradients(None, layout, [operand.float() for operand in operands], window)
        on_device = [operand.to(accelerator) for operand in operands]
        ours = _with_gradients(backend_for(accelerator, dtype, None), layout.to(accelerator), on_device, window)
        for got, truth in zip(ours, expected, strict=True):
            assert relative(got.float().cpu(), truth) < tolerance


def test_on_the_device_rounding_is_about_that_of_the_librarys_own_forward(accelerator: torch.device) -> None:
    logprobs, grads, own_logprobs, own_grads = _worst("llama", str(accelerator), torch.bfloat16)
    assert logprobs < 1.5 * own_logprobs + 1e-3 and grads < 1.5 * own_grads + 1e-3
