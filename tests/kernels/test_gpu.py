"""NUM-7: what a CPU does not have, against the fp64 reference on the same rounded inputs (NUM-2, NUM-3)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from src.kernels import (
    accumulate,
    attention,
    grad_norm,
    grouped_mm,
    latent_heads,
    linear_cross_entropy,
    local_experts,
    rope,
    rotary_heads,
    router_linear,
    swiglu,
)
from src.kernels.adamw import Adam, adamw, triton_adamw
from src.kernels.halves import join, split
from src.kernels.registry import implementations
from src.kernels.sort_by_expert import sort_by_expert
from tests.kernels.test_halves import numbers
from tests.models.tools import relative

pytestmark = pytest.mark.gpu
BOUND = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def leaves(*shapes: tuple[int, ...], dtype: torch.dtype, std: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=generator).mul_(std).to("cuda", dtype) for s in shapes]


def outputs(function: Callable[..., Any], inputs: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """First output and the gradients of all inputs, for an upstream gradient that is one and the same."""
    inputs = [x.detach().to(dtype).requires_grad_() for x in inputs]
    out = function(*inputs)
    out = out[0] if isinstance(out, tuple) else out
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to("cuda", out.dtype)
    return [out.detach(), *torch.autograd.grad(out, inputs, upstream)]


def agree(ours: Callable[..., Any], reference: Callable[..., Any], inputs: list[Tensor]) -> None:
    """Within twice the error of plain torch in that dtype, and within the bound of the dtype."""
    dtype = inputs[0].dtype
    exact = outputs(reference, inputs, torch.float64)
    plain = outputs(reference, inputs, dtype)
    for index, found in enumerate(outputs(ours, inputs, dtype)):
        error = relative(found, exact[index])
        assert found.any() or not exact[index].any(), index
        assert error <= BOUND[dtype], (index, error)
        assert error <= 2 * relative(plain[index], exact[index]) + 1e-7, (index, error)


DOCUMENTS = torch.tensor([[0] * 100 + [1] * 29 + [2] * 71, [3] * 1 + [4] * 199], dtype=torch.int32)


@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("widths", [(192, 128), (128, 128), (64, 64)])
def test_op_2_cudnn(widths: tuple[int, int], groups: int) -> None:
    key, value = widths
    inputs = leaves((2, 200, 4, key), (2, 200, groups, key), (2, 200, groups, value), dtype=torch.bfloat16)

    def of(function: Any) -> Callable[..., Any]:
        return lambda q, k, v: function(q, k, v, key**-0.5, None)

    agree(of(attention.sdpa_cudnn), of(attention.attention), inputs)
    with torch.no_grad():
        q, k, v = inputs
        _, lse = attention.sdpa_cudnn(q, k, v, key**-0.5, None)
        _, want = attention.attention(q.double(), k.double(), v.double(), key**-0.5, None)
    assert relative(lse, want) < 1e-3


@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_num_5_efficient_attention_of_packed_samples(dtype: torch.dtype, groups: int) -> None:
    inputs = leaves((2, 200, 4, 24), (2, 200, groups, 24), (2, 200, groups, 16), dtype=dtype)
    documents = DOCUMENTS.cuda()

    def of(function: Any) -> Callable[..., Any]:
        return lambda q, k, v: function(q, k, v, 24**-0.5, documents)

    agree(of(attention.sdpa_efficient), of(attention.attention), inputs)
    changed = [x.clone() for x in inputs]
    for x in changed:
        x[0, :100] += 1
    before, after = (attention.sdpa_efficient(*x, 24**-0.5, documents)[0] for x in (inputs, changed))
    assert torch.equal(before[0, 100:], after[0, 100:])
    assert not torch.equal(before[0, :100], after[0, :100])


LOADS = {
    "balanced": [128] * 8,
    "one expert": [0, 0, 1024, 0, 0, 0, 0, 0],
    "half empty": [256, 0, 256, 0, 256, 0, 256, 0],
    "odd": [1, 300, 7, 0, 200, 501, 14, 1],
    "tail": [1, 100, 7, 0, 100, 301, 14, 1],
}


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("name", ["torch_grouped_mm_cuda", "quack"])
def test_op_1_grouped_products(name: str, load: str) -> None:
    """NUM-4 too: rows past the last offset hold NaN, and reach neither outputs nor gradients."""
    if name == "quack":
        pytest.importorskip("quack", reason="quack-kernels is not installed")
    product = implementations()["grouped_mm"][name].function
    offs = torch.tensor(LOADS[load], device="cuda").cumsum(0).int()
    end = int(offs[-1])
    x, w = leaves((1024, 64), (8, 48, 64), dtype=torch.bfloat16)

    def rows(function: Any) -> Callable[..., Any]:
        return lambda a, b: function(a, b, offs)

    if end == 1024:
        agree(rows(product), rows(grouped_mm.grouped_mm), [x, w])
        return
    x[end:] = float("nan")
    a, b = x.requires_grad_(), w.requires_grad_()
    y = product(a, b, offs)
    y.sum().backward()
    assert a.grad is not None
    assert b.grad is not None
    assert not y[end:].any()
    assert not a.grad[end:].any()
    want = grouped_mm.grouped_mm(x[:end].detach().double(), w.detach().double(), offs)
    assert relative(y[:end], want) < 1e-2
    assert bool(torch.isfinite(b.grad).all())
    assert not b.grad[3].any()


@pytest.mark.parametrize("experts", [8, 3, 1])
def test_op_6_local_experts(experts: int) -> None:
    """Half of the experts or fewer get all rows; gradients of the others are zero, not old memory."""
    pytest.importorskip("quack", reason="quack-kernels is not installed")
    generator = torch.Generator().manual_seed(3)
    ids = torch.rand(257, experts, generator=generator).argsort(1)[:, : min(3, experts)].cuda() * 2
    order = sort_by_expert(ids, 16)
    shapes = ((257, 128), tuple(ids.shape), (257, 128), (16, 192, 128), (16, 128, 96))
    x, w, residual, up, down = leaves(*shapes, dtype=torch.bfloat16)
    scaled = [x, w.float().sigmoid(), residual, up * 128**-0.5, down * 96**-0.5]

    def of(function: Any) -> Callable[..., Any]:
        def call(x: Tensor, w: Tensor, residual: Tensor, up: Tensor, down: Tensor) -> Tensor:
            out: Tensor = function(x, w if x.dtype == torch.float64 else w.float(), residual, order, up, down)
            return out

        return call

    ours, reference = of(local_experts.quack_local_experts), of(local_experts.local_experts)
    agree(ours, reference, [x, scaled[1].bfloat16(), *scaled[2:]])
    leaf = scaled[3].requires_grad_()
    torch.full((1 << 28,), float("nan"), device="cuda")
    local_experts.quack_local_experts(*scaled[:3], order, leaf, scaled[4]).sum().backward()
    assert leaf.grad is not None
    unused = ~torch.isin(torch.arange(16, device="cuda"), ids)
    assert not leaf.grad[unused].any()
    assert bool(torch.isfinite(leaf.grad).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "ids"), [(1000, 1031), (5000, 4099)])
def test_op_3_loss_of_the_head(dtype: torch.dtype, rows: int, ids: int) -> None:
    h, w = leaves((rows, 64), (ids, 64), dtype=dtype)
    labels = torch.randint(0, ids, (rows,), generator=torch.Generator().manual_seed(2)).cuda()
    labels[::7] = -100
    scale = torch.tensor(1 / rows, device="cuda")
    exact, plain, found = (
        _loss(function, [h, w], kind, labels, scale)
        for function, kind in (
            (linear_cross_entropy.linear_cross_entropy, torch.float64),
            (_bf16_loss, dtype),
            (linear_cross_entropy.triton_linear_cross_entropy, dtype),
        )
    )
    for index, (ours, theirs, want) in enumerate(zip(found, plain, exact, strict=True)):
        assert relative(ours, want) <= 2 * relative(theirs, want) + BOUND[dtype] / 10, index


def _loss(function: Any, inputs: list[Tensor], dtype: torch.dtype, *rest: Tensor) -> list[Tensor]:
    inputs = [x.detach().to(dtype).requires_grad_() for x in inputs]
    loss = function(*inputs, *rest)
    return [loss.detach(), *torch.autograd.grad(loss, inputs)]


def _bf16_loss(h: Tensor, w: Tensor, labels: Tensor, scale: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy((h @ w.T).float(), labels, reduction="sum") * scale


@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16])
def test_op_4_adamw(state: torch.dtype) -> None:
    """Bitwise twice; equal to torch's fused step to rounding; the copy is the parameter, rounded."""
    adam = Adam(
        1e-2, (0.9, 0.95), 1e-8, torch.tensor(3.0).cuda(), torch.tensor(0.5).cuda(), torch.tensor(0.0).cuda()
    )
    p, m, v = leaves((3001, 70), (3001, 70), (3001, 70), dtype=state)
    (g,) = leaves((3001, 70), dtype=torch.bfloat16)
    runs = []
    for function in (triton_adamw, triton_adamw, adamw):
        a, b, c, copy = p.clone(), m.clone(), v.clone().abs_(), torch.empty_like(p, dtype=torch.bfloat16)
        function(a, g.clone(), b, c, copy, 0.1, adam)
        assert torch.equal(copy, a.bfloat16())
        runs.append((a, b, c))
    assert all(torch.equal(x, y) for x, y in zip(runs[0], runs[1], strict=True))
    limit = 1e-6 if state == torch.float32 else 2**-8
    assert all(relative(x, y) < limit for x, y in zip(runs[0], runs[2], strict=True))


@pytest.mark.parametrize("moment", [torch.float32, torch.bfloat16])
def test_op_4_halves(moment: torch.dtype) -> None:
    """Bitwise the update of a whole master; moments of two dtypes differ by one rounding alone."""
    shape = (3001, 70)
    (p, v), (m,) = leaves(shape, shape, dtype=torch.float32), leaves(shape, dtype=torch.bfloat16)
    (g,) = leaves(shape, dtype=torch.bfloat16, std=0.1)
    v.abs_()
    scalars = (torch.tensor(x).cuda() for x in (3.0, 0.5, 0.0))
    adam = Adam(1e-2, (0.9, 0.95), 1e-8, *scalars)
    high, low = split(p)
    whole, first, second = p.clone(), m.float(), v.clone()
    triton_adamw(whole, g.clone(), first, second, None, 0.1, adam)
    m = m.to(moment)
    triton_adamw(high, g.clone(), m, v, None, 0.1, adam, low)
    assert torch.equal(join(high, low), whole)
    assert torch.equal(m, first.to(moment))
    assert torch.equal(v, second)
    assert not torch.equal(whole, p)


def test_op_4_every_number_comes_back_through_the_kernel() -> None:
    """An update of nothing leaves both halves as they are: denormals, zeros and the largest number too."""
    x = numbers().cuda()
    zero = torch.zeros((), device="cuda")
    high, low = split(x)
    rest = (torch.ones_like(x), torch.ones_like(x), torch.ones_like(x))
    triton_adamw(high, *rest, None, 0.3, Adam(0.0, (0.9, 0.95), 1e-8, zero, None, zero), low)
    assert torch.equal(join(high, low).view(torch.int32), x.view(torch.int32))
    assert torch.equal(split(x)[0].view(torch.int16), high.view(torch.int16))


def test_op_4_grad_norm() -> None:
    """Of both dtypes, all sizes and alignments, against fp64; twice the same bits; nothing is nothing."""
    sizes = [(3001, 70), (1,), (0,), (65536 * 3 + 16,), (65536,), (17, 33), *[(128,)] * 150]
    tensors = leaves(*sizes, dtype=torch.bfloat16) + leaves((64, 2048), (5,), dtype=torch.float32)
    tensors += [tensors[0].T, tensors[3][1:]]
    found = grad_norm.triton_square_sum(tensors, torch.float32)
    assert torch.equal(found, grad_norm.triton_square_sum(tensors, torch.float32))
    want = sum(float(t.double().square().sum()) for t in tensors)
    assert float(found) == pytest.approx(want, rel=1e-6)
    assert float(grad_norm.triton_square_sum(tensors[2:3], torch.float32)) == 0.0
    tensors[1].fill_(torch.inf)
    assert not grad_norm.triton_square_sum(tensors, torch.float32).isfinite()


def test_op_11_latent_heads() -> None:
    q, kv, k = leaves((2, 33, 4, 192), (2, 33, 4, 256), (2, 33, 64), dtype=torch.bfloat16)
    angles = torch.randn(2, 33, 32, device="cuda")

    def of(function: Any) -> Callable[..., Any]:
        def joined(*inputs: Tensor) -> Tensor:
            wide = inputs[0].dtype if inputs[0].dtype == torch.float64 else torch.float32
            return torch.cat(function(*inputs, angles.cos().to(wide), angles.sin().to(wide)), -1)

        return joined

    agree(of(latent_heads.triton_latent_heads), of(partial(latent_heads.latent_heads, rope.rope)), [q, kv, k])


def test_eng_15_gradients_add_up_as_torch_adds_them() -> None:
    parts = [leaves((1000, 77), dtype=torch.bfloat16, std=0.1**i)[0] for i in range(3)]
    found, want = None, None
    for part in parts:
        found = accumulate.triton_accumulate(found, part, torch.float32)
        want = accumulate.accumulate(want, part, torch.float32)
    assert found is not None
    assert want is not None
    assert torch.equal(found, want)


@pytest.mark.parametrize("normed", [True, False])
def test_op_11_rotary_heads(normed: bool) -> None:
    inputs = leaves((2, 33, 8, 128), (2, 33, 2, 128), (128,), (128,), dtype=torch.bfloat16)[
        : 4 if normed else 2
    ]
    angles = torch.randn(2, 33, 64, device="cuda")

    def of(function: Any) -> Callable[..., Any]:
        def joined(*inputs: Tensor) -> Tensor:
            wide = inputs[0].dtype if inputs[0].dtype == torch.float64 else torch.float32
            gains = (inputs[2:], 1e-6) if normed else ()
            return torch.cat(function(*inputs[:2], angles.cos().to(wide), angles.sin().to(wide), *gains), 2)

        return joined

    reference = partial(rotary_heads.rotary_heads, rope.rope)
    agree(of(rotary_heads.triton_rotary_heads), of(reference), inputs)


@pytest.mark.parametrize("kind", [{}, {"limit": 1.5, "alpha": 1.702}], ids=["plain", "clamped"])
def test_op_5_swiglu(kind: dict[str, float]) -> None:
    both = (partial(f, **kind) for f in (swiglu.triton_swiglu, swiglu.swiglu))
    agree(*both, leaves((1001, 2 * 1409), dtype=torch.bfloat16))


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_op_9_split_router_is_as_exact_as_fp32(weights: torch.dtype) -> None:
    (x,), (w,) = leaves((4096, 512), dtype=torch.bfloat16), leaves((64, 512), dtype=weights, std=0.02)
    up = torch.randn(4096, 64, device="cuda")

    def of(function: Any, dtype: torch.dtype | None) -> list[Tensor]:
        a, b = (t.detach().to(dtype or t.dtype).requires_grad_() for t in (x, w))
        logits = function(a, b)
        return [logits.detach(), *torch.autograd.grad(logits, (a, b), up.to(logits.dtype))]

    ours = of(router_linear.split_router_linear, None)
    plain, exact = of(router_linear.router_linear, None), of(router_linear.router_linear, torch.float64)
    assert [t.dtype for t in ours] == [torch.float32, torch.bfloat16, weights]
    for index, (found, usual, want) in enumerate(zip(ours, plain, exact, strict=True)):
        error, limit = relative(found, want), 2 * relative(usual, want)
        assert error <= max(limit, 5e-6), (index, error, limit)


def test_att_2_real_rope_equals_the_complex_one() -> None:
    (x,) = leaves((2, 33, 4, 64), dtype=torch.bfloat16)
    angles = torch.randn(2, 33, 32, device="cuda")

    agree(
        lambda x: rope.real_rope(x, angles.cos(), angles.sin(), interleaved=True),
        lambda x: rope.rope(x, angles.cos().double(), angles.sin().double(), interleaved=True).to(x.dtype),
        [x],
    )
