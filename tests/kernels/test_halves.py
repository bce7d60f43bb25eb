"""OP-4: an fp32 number in two halves, over every lower half."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from src.kernels.adamw import Adam, adamw
from src.kernels.halves import join, split

UPPER = (0x0000, 0x0001, 0x0012, 0x007F, 0x0080, 0x0101, 0x3F7F, 0x3F80, 0x4049, 0x7E81, 0x7F7E, 0x7F7F)
"""Upper halves: zero and denormals, the smallest normal numbers, one, others, the largest."""


def numbers() -> Tensor:
    """fp32 with each of these upper halves, of both signs, before every lower half; all finite."""
    upper = torch.tensor([*UPPER, *(u - 0x8000 for u in UPPER)], dtype=torch.int32)
    return ((upper[:, None] << 16) | torch.arange(0x10000, dtype=torch.int32)).view(torch.float32)


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two fp32 tensors are equal in every bit, the signs of zeros included."""
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def is_exact(joined: Callable[[Tensor, Tensor], Tensor]) -> bool:
    """Whether all numbers come back."""
    return same(joined(*split(numbers())), numbers())


def test_every_number_comes_back() -> None:
    """Denormals, both zeros, the largest, infinities. A join that takes no round-up back is found out."""
    x = numbers()
    assert x.isfinite().all()
    assert (x.abs() == torch.finfo(torch.float32).max).sum() == 2
    assert is_exact(join)

    def forgetful(high: Tensor, low: Tensor) -> Tensor:
        return ((high.view(torch.int16).int() << 16) | (low.int() & 0xFFFF)).view(torch.float32)

    assert not is_exact(forgetful)
    infinite = torch.tensor([float("inf"), -float("inf")])
    assert same(join(*split(infinite)), infinite)


def test_the_upper_half_is_the_nearest_bf16() -> None:
    """As torch rounds, infinities beyond the largest included, but for ties: these go away from zero."""
    x = numbers()
    high, low = split(x)
    assert high.dtype == torch.bfloat16
    nearest, tie = x.bfloat16(), low == -0x8000
    assert torch.equal(high[~tie], nearest[~tie])
    assert high[~tie].isinf().any()
    assert (high[tie].abs() >= x[tie].abs()).all()
    assert 0 < (high[tie] != nearest[tie]).sum() < tie.sum()


def test_nan_stays_nan() -> None:
    """Also those whose rounding would carry into the sign, as the one that a GPU makes."""
    bits = torch.tensor([0x7FFFFFFF, -1, 0x7F800001, 0x7FC00000, 0x7FFF8000, -0x8000], dtype=torch.int32)
    high, low = split(bits.view(torch.float32))
    assert high.isnan().all()
    assert join(high, low).isnan().all()


def test_an_update_of_halves_is_that_of_the_master() -> None:
    """Bitwise, moments too, skipped or not; the first moment in bf16 steps before it is rounded."""
    x = torch.cat([numbers()[:, ::997].flatten(), torch.randn(300)])
    g, m, v = torch.randn_like(x).bfloat16(), torch.randn_like(x).bfloat16().float(), torch.rand_like(x)
    for skip in (0.0, 1.0):
        adam = Adam(1e-2, (0.9, 0.95), 1e-8, torch.tensor(3.0), torch.tensor(0.5), torch.tensor(skip))
        whole, first, second = x.clone(), m.clone(), v.clone()
        adamw(whole, g.clone(), first, second, None, 0.1, adam)
        assert torch.equal(whole, x) == bool(skip)
        for dtype in (torch.float32, torch.bfloat16):
            high, low = split(x)
            half, other = m.to(dtype, copy=True), v.clone()
            adamw(high, g.clone(), half, other, None, 0.1, adam, low)
            assert same(join(high, low), whole)
            assert torch.equal(half, first.to(dtype))
            assert same(other, second)


def test_a_first_moment_in_bf16_is_not_biased() -> None:
    """Rounded to nearest at each of 100 updates: off by half a percent at random, by nothing on average."""
    torch.manual_seed(0)
    n, size = 20000, torch.rand(20000) + 0.5
    zero = torch.zeros(())
    adam = Adam(0.0, (0.9, 0.95), 1e-8, zero, None, zero)
    found = {dtype: torch.zeros(n, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)}
    for _ in range(100):
        g = (torch.randn(n) + 0.5) * size
        for m in found.values():
            adamw(torch.ones(n), g.clone(), m, torch.zeros(n), None, 0.0, adam)
    error = found[torch.bfloat16].float() - found[torch.float32]
    scale = found[torch.float32].square().mean().sqrt()
    assert 1e-3 < error.square().mean().sqrt() / scale < 1e-2
    assert error.mean().abs() / scale < 2e-4
