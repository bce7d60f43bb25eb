"""What Triton's interpreter does not imitate (INT-1): a kernel for each, run by `interpreted.py`.

A function here that raises says that the interpreter has changed, and that a rule for our kernels may go.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from importlib.metadata import version

import torch
import triton
import triton.language as tl
from packaging.version import Version
from torch import Tensor

TRITON, NUMPY = Version(version("triton")), Version(version("numpy"))


@triton.jit
def sum_kernel(x_ptr, y_ptr, out_ptr, WIDE: tl.constexpr):
    x, y = tl.load(x_ptr), tl.load(y_ptr)
    if WIDE:
        x, y = x.to(tl.float32), y.to(tl.float32)
    tl.store(out_ptr, (x + y).to(tl.float32))


@triton.jit
def dot_kernel(x_ptr, y_ptr, out_ptr, PRECISION: tl.constexpr):
    at = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(out_ptr + at, tl.dot(tl.load(x_ptr + at), tl.load(y_ptr + at), input_precision=PRECISION))


@triton.jit
def loop_kernel(bound_ptr, out_ptr):
    total = 0
    for index in range(0, tl.load(bound_ptr)):
        total += index
    tl.store(out_ptr, total)


@triton.jit
def fp8_kernel(x_ptr, out_ptr):
    tl.store(out_ptr, tl.load(x_ptr).to(tl.float8e4nv).to(tl.float32))


@triton.jit
def assembly_kernel(out_ptr):
    one = tl.inline_asm_elementwise("mov.u32 $0, 1;", "=r", [], dtype=tl.int32, is_pure=True, pack=1)
    tl.store(out_ptr, one)


@triton.jit
def assert_kernel(x_ptr, out_ptr):
    tl.device_assert(tl.load(x_ptr) > 0, "not positive")
    tl.store(out_ptr, 1.0)


@triton.jit
def block_kernel(out_ptr, BLOCK: tl.constexpr):
    tl.store(out_ptr + tl.arange(0, BLOCK), 1.0)


def tuned_kernel_body(out_ptr, BLOCK: tl.constexpr):
    tl.store(out_ptr, BLOCK)


@triton.jit
def race_kernel(out_ptr):
    """Each program adds to one number without an atomic: on a GPU some would be lost."""
    tl.store(out_ptr, tl.load(out_ptr) + 1.0)


@triton.jit
def order_kernel(x_ptr, sums_ptr, sorted_ptr, counts_ptr, last_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    x = tl.load(x_ptr + at)
    tl.store(sums_ptr + at, tl.cumsum(x, 0))
    tl.store(sorted_ptr + at, tl.sort(x))
    tl.store(counts_ptr + tl.arange(0, 4), tl.histogram(x, 4))
    tl.store(last_ptr + at, tl.associative_scan(x, 0, largest))


@triton.jit
def largest(a, b):
    return tl.maximum(a, b)


@triton.jit
def table_kernel(table_ptr, like_ptr, out_ptr):
    tl.store(out_ptr + tl.program_id(0), tl.load(tl.load(table_ptr + tl.program_id(0)).to(like_ptr.dtype)))


def ones(dtype: torch.dtype) -> Tensor:
    return torch.ones(1, dtype=dtype)


def bf16_is_not_added() -> None:
    """1 + 1 is not 2 in bf16; it is after a cast."""
    out = torch.zeros(1)
    sum_kernel[(1,)](ones(torch.bfloat16), ones(torch.bfloat16), out, WIDE=True)
    assert out.item() == 2
    sum_kernel[(1,)](ones(torch.bfloat16), ones(torch.bfloat16), out, WIDE=False)
    assert out.item() != 2


def bf16_is_not_multiplied() -> None:
    """`tl.dot` of bf16 is garbage, of fp16 it is right."""
    x, y = torch.randn(2, 16, 16)
    for dtype, good in ((torch.float16, True), (torch.bfloat16, False)):
        out = torch.zeros(16, 16)
        dot_kernel[(1,)](x.to(dtype), y.to(dtype), out, PRECISION="ieee")
        want = x.to(dtype).float() @ y.to(dtype).float()
        assert ((out - want).norm() < 1e-2 * want.norm()) == good, dtype


def tf32_is_exact() -> None:
    """Products under `tf32` are those of fp32, so that nothing shows what TF32 loses."""
    x, y = torch.randn(2, 16, 16)
    out = torch.zeros(2, 16, 16)
    for index, precision in enumerate(("ieee", "tf32")):
        dot_kernel[(1,)](x, y, out[index], PRECISION=precision)
    assert torch.equal(out[0], out[1])


def run_time_bounds_need_an_older_numpy() -> None:
    """triton 3.6 with numpy 2.4 raises at a bound that a kernel reads (triton #9171)."""
    out = torch.zeros(1, dtype=torch.int32)
    fails = raises(Exception, lambda: loop_kernel[(1,)](torch.tensor([4], dtype=torch.int32), out))
    assert fails == (Version("3.7") > TRITON and Version("2.4") <= NUMPY)
    assert fails or out.item() == 6


def fp8_does_not_carry() -> None:
    """0.4952 rounds up to 0.5, whose exponent is another: the interpreter gives 0.25."""
    out = torch.zeros(1)
    fp8_kernel[(1,)](torch.tensor([0.4952]), out)
    assert torch.tensor([0.4952]).to(torch.float8_e4m3fn).item() == 0.5
    assert out.item() == 0.25


def assembly_fails() -> None:
    assert raises(Exception, lambda: assembly_kernel[(1,)](torch.zeros(1, dtype=torch.int32)))


def assertions_are_silent() -> None:
    """On a GPU this ends the process; the environment of this one has TRITON_DEBUG=1."""
    out = torch.zeros(1)
    assert_kernel[(1,)](torch.tensor([-1.0]), out)
    assert out.item() == 1


def blocks_end_at_a_million() -> None:
    for size, good in ((1 << 20, True), (1 << 21, False)):
        out = torch.zeros(size)
        failed = raises(Exception, lambda out=out, size=size: block_kernel[(1,)](out, BLOCK=size))
        assert failed != good, size


def two_configs_want_a_driver() -> None:
    """With one config nothing is timed."""
    for blocks, good in (((16,), True), ((16, 32), False)):
        configs = [triton.Config({"BLOCK": block}) for block in blocks]
        tuned = triton.autotune(configs, key=[])(triton.jit(tuned_kernel_body))
        out = torch.zeros(1)
        failed = raises(Exception, lambda tuned=tuned, out=out: tuned[(1,)](out))
        assert failed != good, blocks
        assert failed or out.item() == 16


def programs_run_one_after_another() -> None:
    """So a race is not seen."""
    out = torch.zeros(1)
    race_kernel[(100,)](out)
    assert out.item() == 100


def scans_sorts_and_histograms_work() -> None:
    x = torch.tensor([3, 0, 2, 3, 1, 1, 3, 0], dtype=torch.int32)
    sums, ordered, last = (torch.zeros_like(x) for _ in range(3))
    counts = torch.zeros(4, dtype=torch.int32)
    order_kernel[(1,)](x, sums, ordered, counts, last, N=8)
    assert torch.equal(sums, x.cumsum(0).int())
    assert torch.equal(ordered, x.sort().values)
    assert torch.equal(counts, torch.bincount(x, minlength=4).int())
    assert torch.equal(last, x.cummax(0).values)


def tables_of_pointers_work() -> None:
    parts = [torch.tensor([float(value)]) for value in (5, 7)]
    out = torch.zeros(2)
    table_kernel[(2,)](torch.tensor([part.data_ptr() for part in parts]), parts[0], out)
    assert out.tolist() == [5, 7]


def raises(kind: type[Exception], call: Callable[[], object]) -> bool:
    with contextlib.suppress(kind):
        call()
        return False
    return True


LIMITS: tuple[Callable[[], None], ...] = (
    bf16_is_not_added,
    bf16_is_not_multiplied,
    tf32_is_exact,
    run_time_bounds_need_an_older_numpy,
    fp8_does_not_carry,
    assembly_fails,
    assertions_are_silent,
    blocks_end_at_a_million,
    two_configs_want_a_driver,
    programs_run_one_after_another,
    scans_sorts_and_histograms_work,
    tables_of_pointers_work,
)
