"""OP-2, NUM-5 on a GPU: every kernel of attention against the reference in fp64 on the same rounded inputs.

`pytest -m gpu tests/kernels/test_attention_gpu.py` skips what is not installed or cannot, with its reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from src.kernels.attention import attention
from src.kernels.declaration import EAGER, Implementation, Need
from src.kernels.registry import describe, implementations
from tests.models.tools import relative

pytestmark = pytest.mark.gpu
B, S, DTYPE = 2, 333, torch.bfloat16
LENGTHS = [130, 1, 202, 1, 1, 299, 32]
"""Of the documents of both samples; none is a multiple of a tile."""
BOUND = 1e-2
HEADS = {"mla": (4, 4, 192, 128), "gqa": (8, 2, 128, 128), "narrow": (16, 2, 64, 64)}
Found = list[Tensor]


@dataclass(frozen=True)
class Ask:
    """What a call asks for."""

    heads: str
    packed: bool = False
    window: int | None = None
    sinks: bool = False

    def need(self) -> Need:
        H, G, C, U = HEADS[self.heads]
        has = {"packed": self.packed, "window": self.window is not None, "sinks": self.sinks}
        has |= {"gqa": H != G, "unequal_widths": C != U}
        return Need(frozenset(name for name, is_so in has.items() if is_so), {"key": C, "value": U})

    def leaves(self, dtype: torch.dtype = DTYPE) -> list[Tensor]:
        """Queries, keys, values and perhaps sinks, rounded to bf16 whatever the dtype."""
        H, G, C, U = HEADS[self.heads]
        shapes = [(B, S, H, C), (B, S, G, C), (B, S, G, U), *([(H,)] if self.sinks else [])]
        draws = torch.Generator().manual_seed(3)
        drawn = [torch.randn(shape, generator=draws).to("cuda", DTYPE).to(dtype) for shape in shapes]
        return [x.requires_grad_() for x in drawn]

    def options(self) -> dict[str, Any]:
        """What comes after the scale."""
        found: dict[str, Any] = {"documents_BS": documents() if self.packed else None}
        found |= {"cu_seqlens": starts()} if self.packed else {}
        return found | ({"window": self.window} if self.window else {})

    def call(self, function: Any, leaves: list[Tensor]) -> tuple[Tensor, Tensor]:
        sinks = {"sinks_H": leaves[3]} if self.sinks else {}
        found: tuple[Tensor, Tensor]
        found = function(*leaves[:3], HEADS[self.heads][2] ** -0.5, **self.options(), **sinks)
        return found

    def __str__(self) -> str:
        window = f"window{self.window}" if self.window else ""
        words = (self.heads, "packed" if self.packed else "", window, "sinks" if self.sinks else "")
        return "-".join(word for word in words if word)


ASKS = [
    Ask("mla"),
    Ask("gqa"),
    Ask("narrow"),
    Ask("mla", packed=True),
    Ask("gqa", packed=True),
    Ask("gqa", sinks=True),
    Ask("narrow", packed=True, window=7, sinks=True),
    Ask("narrow", window=500, sinks=True),
    Ask("narrow", packed=True, sinks=True),
    Ask("mla", packed=True, window=150),
]
KERNELS = [i for i in implementations()["attention"].values() if i.name != EAGER]
each = partial(pytest.mark.parametrize, "kernel", KERNELS, ids=lambda kernel: kernel.name)
asked = partial(pytest.mark.parametrize, "ask", ids=str)


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    """Cases differ in more ways than one function may be compiled."""
    torch.compiler.reset()


def documents() -> Tensor:
    ids = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    return ids.int().view(B, S).cuda()


def starts() -> Tensor:
    return torch.tensor([0, *LENGTHS]).cumsum(0).int().cuda()


def able(kernel: Implementation, ask: Ask) -> Implementation:
    """The kernel, if it may run here."""
    why = kernel.missing(describe(torch.device("cuda")), DTYPE, ask.need(), bitwise=False)
    if why is not None:
        pytest.skip(f"{kernel.name} {why}")
    return kernel


def run(function: Any, ask: Ask, dtype: torch.dtype = DTYPE) -> Found:
    """Output, log-sum-exp and every gradient, for one upstream gradient."""
    leaves = ask.leaves(dtype)
    out, lse = ask.call(function, leaves)
    assert not lse.requires_grad
    up = torch.randn(out.shape, generator=torch.Generator().manual_seed(4)).to("cuda", DTYPE).to(dtype)
    return [out.detach(), lse, *torch.autograd.grad(out, leaves, up)]


def agree(found: Found, ask: Ask) -> None:
    """Values, log-sum-exp and gradients within the bound of bf16."""
    exact = run(attention, ask, torch.float64)
    names = ("out", "lse", "dq", "dk", "dv", "dsinks")
    errors = {n: relative(x, y) for n, x, y in zip(names, found, exact, strict=False)}
    assert len(found) == len(exact)
    assert [x.shape for x in found] == [x.shape for x in exact]
    assert found[0].dtype == DTYPE
    assert found[1].dtype == torch.float32
    assert {n: e for n, e in errors.items() if not e <= (1e-3 if n == "lse" else BOUND)} == {}


@each()
@asked(ASKS)
def test_op_2_values_and_gradients(kernel: Implementation, ask: Ask) -> None:
    """Documents of length 1, windows wider than a sample, samples that no tile divides."""
    agree(run(able(kernel, ask).function, ask), ask)


@each()
@asked(
    [
        Ask("gqa"),
        Ask("gqa", packed=True),
        Ask("gqa", sinks=True),
        Ask("narrow", packed=True, window=7, sinks=True),
    ]
)
def test_cmp_2_compiled(kernel: Implementation, ask: Ask) -> None:
    """As one graph, and with tensors that are views."""

    function = able(kernel, ask).function

    def model(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
        out, lse = function(*arguments, **options)
        return out * 1, lse

    agree(run(torch.compile(model, fullgraph=True, dynamic=False), ask), ask)


@each()
@asked([Ask("mla", packed=True), Ask("gqa", packed=True)])
def test_num_5_other_documents_do_not_change_bitwise(kernel: Implementation, ask: Ask) -> None:
    function, changed = able(kernel, ask).function, documents() == 2
    leaves = [x.detach() for x in ask.leaves()]
    before, _ = ask.call(function, leaves)
    for x in leaves[:3]:
        x[changed] += 1
    after, _ = ask.call(function, leaves)
    assert torch.equal(before[~changed], after[~changed])
    assert not torch.equal(before[changed], after[changed])


@each()
@asked([Ask("narrow", window=7, sinks=True)])
def test_att_6_the_window_ends_at_its_last_key(kernel: Implementation, ask: Ask) -> None:
    """NUM-5: of the keys i - W and i - W + 1 only the second matters, bitwise."""
    function, i, W = able(kernel, ask).function, 250, 7
    leaves = [x.detach() for x in ask.leaves()]
    before, _ = ask.call(function, leaves)
    for j, matters in ((i - W, False), (i - W + 1, True), (i + 1, False)):
        others = [leaves[0], leaves[1].clone(), leaves[2].clone(), *leaves[3:]]
        others[1][:, j] += 3.0
        others[2][:, j] -= 2.0
        after, _ = ask.call(function, others)
        assert torch.equal(before[:, i], after[:, i]) != matters


@each()
@asked([Ask("gqa"), Ask("gqa", packed=True), Ask("narrow", packed=True, window=7, sinks=True)])
def test_det_7_under_torchs_switch(kernel: Implementation, ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    """DET-3: what is deterministic by the switch gives the same bits with it, in a graph too."""
    function = able(kernel, ask).function
    if not kernel.by_switch:
        pytest.skip(f"{kernel.name} does not heed the switch")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        first, again = run(function, ask), run(function, ask)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    agree(first, ask)


@each()
@asked([Ask("gqa", packed=True), Ask("narrow", packed=True, window=7, sinks=True)])
def test_bench_5_nothing_waits_and_a_sum_has_a_gradient(kernel: Implementation, ask: Ask) -> None:
    """The gradient of a sum has stride 0; documents in any number read nothing back."""
    function, leaves = able(kernel, ask).function, ask.leaves()
    for mode in ("default", "error"):
        torch.cuda.synchronize()
        options = ask.options()
        torch.cuda.set_sync_debug_mode(mode)
        try:
            sinks = {"sinks_H": leaves[3]} if ask.sinks else {}
            out, _ = function(*leaves[:3], 0.1, **options, **sinks)
            grads = torch.autograd.grad(out.sum(), leaves)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert all(bool(grad.isfinite().all()) for grad in grads)


@each()
def test_cmp_3_another_number_of_documents_compiles_nothing(kernel: Implementation) -> None:
    ask = Ask("gqa", packed=True)
    function = able(kernel, ask).function
    compiled = torch.compile(lambda *a, **o: function(*a, **o)[0] * 1, fullgraph=True, dynamic=False)
    for count in (3, 9, 20):
        cuts = torch.arange(count) * (B * S // count)
        bounds = torch.unique(torch.tensor([*cuts.tolist(), S, B * S]))
        ids = torch.repeat_interleave(torch.arange(len(bounds) - 1), bounds.diff()).int().view(B, S).cuda()
        cu_seqlens = bounds.int().cuda()
        torch._dynamo.mark_dynamic(cu_seqlens, 0)
        leaves = ask.leaves()
        stance = "default" if count == 3 else "fail_on_recompile"
        with torch.compiler.set_stance(stance):
            out = compiled(*leaves, 0.1, ids, cu_seqlens=cu_seqlens)
            torch.autograd.grad(out.sum(), leaves)
        want, _ = attention(*leaves, 0.1, ids)
        assert relative(out.detach(), want.detach()) < BOUND
