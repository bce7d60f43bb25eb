"""INT-1: each Triton kernel against its reference, on the CPU in Triton's interpreter.

bf16 arithmetic is not imitated there, so everything is fp32; `test_gpu.py` has the rest. The interpreter is
switched on when a kernel is made, so all run in a process of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.kernels.fused_mixture import MIXTURE

pytest.importorskip("triton", reason="Triton is there on Linux only")

ADAMW = """
from src.kernels.adamw import Adam, adamw, triton_adamw
torch.manual_seed(0)
for n, clip, skip, steps in ((1, 0.5, 0.0, 0.0), (2500, None, 0.0, 3.0), (2500, 0.25, 1.0, 7.0)):
    t = [torch.randn(n), torch.randn(n), torch.randn(n), torch.rand(n)]
    clip = None if clip is None else torch.tensor(clip)
    adam = Adam(0.1, (0.9, 0.999), 1e-8, torch.tensor(steps), clip, torch.tensor(skip))
    ours, theirs = [x.clone() for x in t], [x.clone() for x in t]
    copies = torch.full((n,), 7.0), torch.full((n,), 7.0)
    triton_adamw(*ours, copies[0], 0.3, adam)
    adamw(*theirs, copies[1], 0.3, adam)
    for a, b in zip(ours[:1] + ours[2:], theirs[:1] + theirs[2:]):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=1e-7)
    assert skip == 1.0 or torch.equal(copies[0], ours[0])
    assert skip == 0.0 or all(torch.equal(a, b) for a, b in zip(ours[2:], t[2:]))
"""

HALVES = """
from src.kernels.adamw import Adam, adamw, triton_adamw
from src.kernels.halves import join, split
from tests.kernels.test_halves import numbers
torch.manual_seed(0)
x = numbers()[:, ::331].flatten()
nothing = Adam(0.0, (0.9, 0.95), 1e-8, torch.tensor(0.0), None, torch.tensor(0.0))
high, low = split(x)
triton_adamw(high, *(torch.ones_like(x) for _ in range(3)), None, 0.3, nothing, low)
assert all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip((high, low), split(x)))
for dtype, skip in ((torch.float32, 0.0), (torch.bfloat16, 0.0), (torch.bfloat16, 1.0)):
    t = [torch.randn(2500), torch.randn(2500), torch.randn(2500).to(dtype), torch.rand(2500)]
    adam = Adam(0.1, (0.9, 0.999), 1e-8, torch.tensor(3.0), torch.tensor(0.25), torch.tensor(skip))
    whole, halves, theirs = ([y.clone() for y in t] for _ in range(3))
    triton_adamw(*whole, None, 0.3, adam)
    for f, (p, *rest) in ((triton_adamw, halves), (adamw, theirs)):
        high, low = split(p)
        f(high, *rest, None, 0.3, adam, low)
        p.copy_(join(high, low))
    assert all(torch.equal(a, b) for a, b in zip(whole, halves))
    assert torch.equal(halves[0], t[0]) == bool(skip)
    torch.testing.assert_close(halves[0], theirs[0], rtol=2e-6, atol=1e-7)
    rtol = 2e-6 if dtype == torch.float32 else 2**-7  # The interpreter's casts to bf16 cut off.
    torch.testing.assert_close(halves[2], theirs[2], rtol=rtol, atol=1e-7)
"""

GRAD_NORM = """
from src.kernels import grad_norm as op
op.CHUNK, op.BLOCK = 64, 16
torch.manual_seed(0)
for sizes in ((0,), (1,), (1, 0, 37), (64, 65, 130, 5), (160, 16, 33, 64, 48)):
    tensors = [torch.randn(n + 1)[1:] if n % 2 else torch.randn(n) for n in sizes]
    tensors += [torch.randn(7, 5).half().T, torch.randn(80).half()] if len(sizes) > 1 else []
    found = op.triton_square_sum(tensors, torch.float32)
    assert torch.equal(found, op.triton_square_sum(tensors, torch.float32)), sizes
    want = sum(t.double().square().sum() for t in tensors)
    torch.testing.assert_close(found.double(), want, rtol=1e-6, atol=0)
assert op.triton_square_sum([torch.ones(3), torch.full((99,), torch.nan)], torch.float32).isnan()
"""

CROSS_ENTROPY = """
from src.kernels import linear_cross_entropy as op
op.FUSED_ROWS, op.FUSED_BLOCK = 4, 16
torch.manual_seed(0)
for T, V in ((0, 5), (2, 5), (7, 33), (9, 16)):
    h, w = torch.randn(T, 6).mul_(3), torch.randn(V, 6)
    labels = torch.randint(0, V, (T,))
    labels[::3] = -100
    found = []
    for f in (op.triton_linear_cross_entropy, op.linear_cross_entropy):
        a, b = h.clone().requires_grad_(), w.clone().requires_grad_()
        loss = f(a, b, labels, torch.tensor(0.25))
        (loss * 3).backward()
        found.append((loss.detach(), a.grad, b.grad))
        with torch.no_grad():
            torch.testing.assert_close(f(a, b, labels, torch.tensor(0.25)), loss.detach())
    for x, y in zip(*found):
        assert (x - y).norm() <= 1e-5 * y.norm() and (y.any() or not T), (T, V)
"""

TAIL = """
from src.kernels.fused.tail import tail_kernel
for end in (0, 3, 64, 65, 130):
    y = torch.full((130, 40), float("nan"))
    y[:end] = 1.0
    offs = torch.tensor([0, min(end, 2), end], dtype=torch.int32)
    tail_kernel[(3,)](y, offs, 3, 130, WIDTH=40, ROWS=64, BLOCK=16)
    assert torch.equal(y, torch.cat((torch.ones(end, 40), torch.zeros(130 - end, 40)))), end
"""

LATENT_HEADS = """
from functools import partial
from src.kernels.latent_heads import latent_heads, triton_latent_heads
from src.kernels.rope import rope
torch.manual_seed(0)
for H, nope, rotated, value in ((3, 5, 6, 7), (4, 8, 4, 8), (1, 16, 2, 3)):
    whole = torch.randn(2, 3, 8 + rotated)
    inputs = torch.randn(2, 3, H, nope + rotated), torch.randn(2, 3, H, nope + value), whole[..., 8:]
    angles = torch.randn(2, 3, rotated // 2)
    ups = [torch.randn(2, 3, H, width) for width in (nope + rotated, nope + rotated, value)]
    found = []
    for f in (triton_latent_heads, partial(latent_heads, rope)):
        leaves = [x.detach().requires_grad_() for x in inputs]
        out = f(*leaves, angles.cos(), angles.sin())
        found.append([*out, *torch.autograd.grad(out, leaves, ups)])
    for x, y in zip(*found):
        torch.testing.assert_close(x, y)
        assert x.any()
"""


ROTARY_HEADS = """
from functools import partial
from src.kernels import rotary_heads as op
from src.kernels.rope import rope
op.TOKENS = 4
torch.manual_seed(0)
for sizes in ((2, 3, 3, 1, 6, True), (1, 9, 4, 2, 8, True), (2, 3, 5, 5, 10, False), (0, 3, 2, 1, 4, True)):
    B, S, H, G, C, normed = sizes
    q, k, gains = torch.randn(B, S, H, C), torch.randn(B, S, G, C), [torch.randn(C), torch.randn(C)]
    angles, ups = torch.randn(B, S, C // 2), [torch.randn(B, S, H, C), torch.randn(B, S, G, C)]
    found = []
    for f in (op.triton_rotary_heads, partial(op.rotary_heads, rope)):
        leaves = [x.detach().requires_grad_() for x in (q, k, *gains)][: None if normed else 2]
        out = f(*leaves[:2], angles.cos(), angles.sin(), *((tuple(leaves[2:]), 1e-5) if normed else ()))
        found.append([*out, *torch.autograd.grad(out, leaves, ups)])
    for x, y in zip(*found):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)
        assert x.any() or not B
"""

ACCUMULATE = """
from src.kernels import accumulate as op
op.BLOCK = 16
torch.manual_seed(0)
for n in (0, 1, 37):
    parts = [torch.randn(n).half() for _ in range(3)]
    totals = [None, None]
    for part in parts:
        totals = [f(t, part, torch.float32) for f, t in zip((op.triton_accumulate, op.accumulate), totals)]
    assert torch.equal(*totals) and totals[0].dtype == torch.float32, n
"""

SWIGLU = """
from src.kernels import swiglu as op
op.BLOCK = 16
torch.manual_seed(0)
clamped = {"limit": 1.5, "alpha": 1.702}
for N, F, kind in ((0, 8, {}), (3, 16, {}), (5, 37, {}), (0, 8, clamped), (5, 37, clamped)):
    x, up = torch.randn(N, 2 * F).mul_(3), torch.randn(N, F)
    x.view(-1)[: 3 * N] = torch.tensor([1.5, -1.5, 1.6]).repeat(N)
    found = []
    for f in (op.triton_swiglu, op.swiglu):
        leaf = x.clone().requires_grad_()
        out = f(leaf, **kind)
        found.append((out, *torch.autograd.grad(out, leaf, up)))
    for a, b in zip(*found):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
assert op.triton_swiglu(torch.full((1, 4), torch.nan), **clamped).isnan().all()
"""

CODES = {
    "adamw": ADAMW,
    "halves": HALVES,
    "grad_norm": GRAD_NORM,
    "linear_cross_entropy": CROSS_ENTROPY,
    "tail": TAIL,
    "latent_heads": LATENT_HEADS,
    "rotary_heads": ROTARY_HEADS,
    "accumulate": ACCUMULATE,
    "swiglu": SWIGLU,
    **MIXTURE,
}


ALL = """
import sys, torch, traceback
for name, code in CODES.items():
    try:
        exec(code, {"torch": torch})
    except Exception:
        traceback.print_exc()
        print(name)
"""


@pytest.fixture(scope="module")
def failed() -> tuple[list[str], str]:
    """The kernels that differ from their reference, of one process for all, and what it wrote."""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    code = f"CODES = {CODES!r}\n{ALL}"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.split(), done.stderr[-3000:]


@pytest.mark.parametrize("kernel", CODES)
def test_int_1_kernels_equal_their_reference_in_the_interpreter(
    kernel: str, failed: tuple[list[str], str]
) -> None:
    names, told = failed
    assert kernel not in names, told
