"""ATT-5, ATT-6, OP-2: sinks with their gradient and windows, dense and packed, in every implementation."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

from src.kernels.attention import attention, sdpa_cpu
from tests.kernels.test_attention import SCALE, H, documents
from tests.models.tools import relative

C, G, S = 10, 2, 25
Function = Callable[..., tuple[Tensor, Tensor]]
BOTH = pytest.mark.parametrize("function", [attention, sdpa_cpu])
PACKED = pytest.mark.parametrize("packed", [False, True])


def inputs(dtype: torch.dtype) -> list[Tensor]:
    """Queries, keys, values and sinks; these are of the size that scores have."""
    generator = torch.Generator().manual_seed(1)
    shapes = ((2, S, H, C), (2, S, G, C), (2, S, G, C), (H,))
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def reference(leaves: list[Tensor], packed: bool, window: int | None) -> tuple[Tensor, Tensor]:
    """Attention over the keys alone, times σ(lse - a); who sees whom is said pair by pair."""
    q, k, v, a = leaves
    ids = documents()
    seen = torch.zeros(2, 1, S, S, dtype=torch.bool)
    for b, i, j in product(range(2), range(S), range(S)):
        near = j <= i and (window is None or i - window < j)
        seen[b, 0, i, j] = near and (not packed or ids[b, i] == ids[b, j])
    share = torch.arange(H) // (H // G)
    scores = SCALE * torch.einsum("bihc,bjhc->bhij", q, k[:, :, share]).masked_fill(~seen, -torch.inf)
    keys = scores.logsumexp(-1)
    alone = torch.einsum("bhij,bjhc->bihc", scores.softmax(-1), v[:, :, share])
    out = alone * torch.sigmoid(keys - a[:, None]).transpose(1, 2)[..., None]
    return out, torch.logaddexp(keys, a[:, None])


def run(function: Function, leaves: list[Tensor], packed: bool, window: int | None) -> list[Tensor]:
    """Output, log-sum-exp and the four gradients."""
    ids = documents() if packed else None
    out, lse = function(*leaves[:3], SCALE, ids, window=window, sinks_H=leaves[3])
    assert not lse.requires_grad
    return [out.detach(), lse, *torch.autograd.grad((out * upstream(out)).sum(), leaves)]


def upstream(out: Tensor) -> Tensor:
    return torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(
        out.dtype
    )


@BOTH
@PACKED
@pytest.mark.parametrize("window", [None, 1, 4, S])
def test_att_5_values_and_gradients(function: Function, packed: bool, window: int | None) -> None:
    """fp32 against fp64; the sinks' gradient is there, for every head, with window and packing."""
    found = run(function, inputs(torch.float32), packed, window)
    double = [x.detach().double().requires_grad_() for x in inputs(torch.float32)]
    out, lse = reference(double, packed, window)
    wanted = [out, lse, *torch.autograd.grad((out * upstream(out)).sum(), double)]
    if window == 1:  # The query itself is the only key: a change of scores comes in by the sink alone.
        assert all(bool(grad.any()) for grad in wanted[2:])
    assert [e for x, y in zip(found, wanted, strict=True) if (e := relative(x, y.detach())) > 2e-6] == []
    assert bool((found[5] != 0).all())


@PACKED
def test_att_5_the_closed_form_of_the_gradient(packed: bool) -> None:
    """da = -Σ exp(a - lse')·(dO·O) over batch and queries, in fp64 to rounding."""
    leaves = inputs(torch.float64)
    out, lse, *_, da = run(attention, leaves, packed, 4)
    pulled_BHS = (upstream(out) * out).sum(-1).transpose(1, 2)
    want = -((leaves[3].detach()[:, None] - lse).exp() * pulled_BHS).sum((0, 2))
    assert relative(da, want) < 1e-14


def detached(q: Tensor, k: Tensor, v: Tensor, *rest: object, window: object, sinks_H: Tensor) -> object:
    """As implementations that forget the gradient of what is no key."""
    out, lse = attention(q, k, v, *rest, window=window, sinks_H=sinks_H.detach())  # type: ignore[arg-type]
    return out + 0 * sinks_H.sum(), lse


def outer_grad(q: Tensor, k: Tensor, v: Tensor, *rest: object, window: object, sinks_H: Tensor) -> object:
    """The output of a kernel scaled afterwards, whose log-sum-exp has no gradient."""
    out, lse = attention(q, k, v, *rest, window=window)  # type: ignore[arg-type]
    factor = torch.sigmoid(lse - sinks_H[:, None]).transpose(1, 2)[..., None]
    return out * factor, torch.logaddexp(lse, sinks_H[:, None].detach())


def wider(*rest: object, window: int, sinks_H: Tensor) -> object:
    return attention(*rest, window=window + 1, sinks_H=sinks_H)  # type: ignore[arg-type]


def narrower(*rest: object, window: int, sinks_H: Tensor) -> object:
    return attention(*rest, window=window - 1, sinks_H=sinks_H)  # type: ignore[arg-type]


@pytest.mark.parametrize("mutant", [detached, outer_grad, wider, narrower])
@PACKED
def test_num_6_mutations_are_noticed(mutant: Function, packed: bool) -> None:
    with pytest.raises(AssertionError):
        test_att_5_values_and_gradients(mutant, packed, 4)


@BOTH
def test_att_6_the_window_ends_at_its_last_key_bitwise(function: Function) -> None:
    """W keys with the query's own: of i - W and i - W + 1 only the second matters."""
    window, i = 6, 17
    q, k, v, a = (x.detach() for x in inputs(torch.float32))
    before, _ = function(q, k, v, SCALE, None, window=window, sinks_H=a)
    for j, matters in ((i - window, False), (i - window + 1, True), (i + 1, False)):
        other_k, other_v = k.clone(), v.clone()
        other_k[:, j] += 3.0
        other_v[:, j] -= 2.0
        after, _ = function(q, other_k, other_v, SCALE, None, window=window, sinks_H=a)
        assert torch.equal(before[:, i], after[:, i]) != matters


@BOTH
def test_bf16_rounds_once(function: Function) -> None:
    found = run(function, inputs(torch.bfloat16), True, 4)
    double = [x.detach().double().requires_grad_() for x in inputs(torch.bfloat16)]
    out, lse = reference(double, True, 4)
    wanted = [out, lse, *torch.autograd.grad((out * upstream(out)).sum(), double)]
    assert {x.dtype for x in (found[0], *found[2:])} == {torch.bfloat16}
    assert found[1].dtype == torch.float32
    assert [e for x, y in zip(found, wanted, strict=True) if (e := relative(x, y.detach())) > 1e-2] == []
