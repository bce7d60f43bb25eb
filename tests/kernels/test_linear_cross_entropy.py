"""OP-3: the fused head and loss against the two operations in fp64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from src.kernels import linear_cross_entropy as module
from src.kernels.linear_cross_entropy import linear_cross_entropy
from tests.models.tools import relative

T, D, V = 37, 11, 53
SCALE = torch.tensor(1 / 29)


def inputs(size: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, V, (T,), generator=generator)
    labels[[0, 5, 6, 36]] = -100
    h = (size * torch.randn(T, D, generator=generator)).requires_grad_()
    return h, torch.randn(V, D, generator=generator).requires_grad_(), labels


def reference(h: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    loss = F.cross_entropy(h.double() @ w.double().T, labels, ignore_index=-100, reduction="sum")
    return loss * SCALE.double()


@pytest.mark.parametrize("rows", [1, 8, 37, 2048])
@pytest.mark.parametrize("size", [1.0, 100.0])
def test_loss_and_gradients_for_any_chunk(rows: int, size: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_ROWS", rows)
    h, w, labels = inputs(size)
    loss = linear_cross_entropy(h, w, labels, SCALE)
    grads = torch.autograd.grad(loss * 3, (h, w))
    want = reference(h, w, labels)
    wants = torch.autograd.grad(want * 3, (h, w))
    assert loss.item() == pytest.approx(want.item(), rel=1e-6)
    for grad, expected in zip(grads, wants, strict=True):
        assert relative(grad, expected) < 2e-6
    assert not grads[0][labels == -100].any()


def test_no_label_gives_zero_and_a_zero_gradient() -> None:
    h, w, labels = inputs()
    loss = linear_cross_entropy(h, w, torch.full_like(labels, -100), SCALE)
    grads = torch.autograd.grad(loss, (h, w))
    assert loss.item() == 0
    assert not any(grad.any() for grad in grads)


def test_evaluation_computes_no_gradient() -> None:
    h, w, labels = inputs()
    with torch.no_grad():
        loss = linear_cross_entropy(h, w, labels, SCALE)
    assert not loss.requires_grad
    assert loss.item() == pytest.approx(reference(h, w, labels).item(), rel=1e-6)


def test_bf16_keeps_an_fp32_loss_and_bf16_gradients() -> None:
    h, w, labels = inputs()
    h16, w16 = (x.detach().bfloat16().requires_grad_() for x in (h, w))
    loss = linear_cross_entropy(h16, w16, labels, SCALE)
    grads = torch.autograd.grad(loss, (h16, w16))
    assert loss.dtype == torch.float32
    assert {grad.dtype for grad in grads} == {torch.bfloat16}
    assert loss.item() == pytest.approx(reference(h16, w16, labels).item(), rel=1e-5)
