"""OP-2: what is asked of other people's kernels of attention, by stand-ins that compute what they are told.

In fp64, so that a wrong bound, scale, layout or log-sum-exp shows, and no rounding does.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from src.kernels import attention_flash, attention_flash2, attention_flash4, attention_rule
from src.kernels.attention import attention
from src.kernels.declaration import Implementation
from src.kernels.registry import implementations
from tests.kernels import flash_fakes
from tests.kernels.flash_fakes import Calls
from tests.models.tools import relative

B, S, H, SCALE = 2, 13, 6, 0.3
LENGTHS = [5, 1, 7, 1, 12]
FAKES: dict[str, Callable[[pytest.MonkeyPatch], Calls]] = {
    "sdpa_cudnn": flash_fakes.cudnn,
    "sdpa_flash": flash_fakes.torch_flash,
    "varlen_attn": flash_fakes.torch_flash,
    "sdpa_flash_padded": flash_fakes.torch_flash,
    "flash_attn_4": flash_fakes.flash_attn_4,
    "flash_attn": flash_fakes.flash_attn,
}


def kernel(name: str) -> Implementation:
    return implementations()["attention"][name]


def options(name: str) -> list[tuple[bool, bool, int | None, bool]]:
    """Unequal widths, packed, window and sinks: all that the implementation declares."""
    every = product((False, True), (False, True), (None, 1, 4, 99), (False, True))
    return [
        (unequal, packed, window, sinks)
        for unequal, packed, window, sinks in every
        if {
            *(["unequal_widths"] if unequal else []),
            *(["packed"] if packed else []),
            *(["window"] if window else []),
            *(["sinks"] if sinks else []),
        }
        <= kernel(name).features
    ]


def run(function: Any, unequal: bool, packed: bool, window: int | None, sinks: bool) -> list[Tensor]:
    """Output, log-sum-exp and every gradient."""
    draws = torch.Generator().manual_seed(5)
    shapes = [(B, S, H, 8), (B, S, 2, 8), (B, S, 2, 5 if unequal else 8), *([(H,)] if sinks else [])]
    leaves = [torch.randn(s, generator=draws, dtype=torch.float64).requires_grad_() for s in shapes]
    more: dict[str, Any] = {"window": window} if window else {}
    more |= {"sinks_H": leaves[3]} if sinks else {}
    more |= {"cu_seqlens": torch.tensor([0, *LENGTHS]).cumsum(0).int()} if packed else {}
    ids = torch.repeat_interleave(torch.arange(5, dtype=torch.int32), torch.tensor(LENGTHS)).view(B, S)
    out, lse = function(*leaves[:3], SCALE, ids if packed else None, **more)
    assert not lse.requires_grad
    up = torch.randn(out.shape, generator=draws, dtype=torch.float64)
    return [out.detach(), lse, *torch.autograd.grad(out, leaves, up)]


@pytest.mark.parametrize("name", [name for name in FAKES if name != "sdpa_cudnn"])
def test_op_2_every_argument_means_what_it_should(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Window W is W - 1 keys to the left; documents by their starts; no bound is read from the device."""
    calls = FAKES[name](monkeypatch)
    for asked in options(name):
        found, want = run(kernel(name).function, *asked), run(attention, *asked)
        assert len(found) == len(want)
        assert all(x.shape == y.shape for x, y in zip(found, want, strict=True))
        errors = [relative(x, y) for x, y in zip(found, want, strict=True) if y.any()]
        assert max(errors) < 1e-13, (asked, errors)
    packed = [call for call in calls.made if call["cu"] is not None]
    assert all(call["max_q"] == call["max_k"] == S for call in packed)
    assert bool(packed) == ("packed" in kernel(name).features)


def test_att_5_sinks_by_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without sinks torch's own autograd has it; with them the backward gets (o', l') and the seeds."""
    flash_fakes.cudnn(monkeypatch)
    asked = (True, False, None, True)
    found, want = run(kernel("sdpa_cudnn").function, *asked), run(attention, *asked)
    assert max(relative(x, y) for x, y in zip(found, want, strict=True)) < 1e-13


@pytest.mark.parametrize("name", ["flash_attn_4", "flash_attn"])
def test_det_7_the_switch_of_torch_reaches_the_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = FAKES[name](monkeypatch)
    assert kernel(name).by_switch
    for is_on in (False, True):
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda on=is_on: on)
        run(kernel(name).function, False, True, None, False)
        assert calls.made[-1]["deterministic"] == is_on


@pytest.mark.slow
@pytest.mark.parametrize("name", ["varlen_attn", "flash_attn_4", "sdpa_cpu"])
def test_cmp_2_one_graph_for_any_number_of_documents(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """CMP-1, CMP-3: the kernels are opaque to the compiler, forward and backward."""
    if name in FAKES:
        FAKES[name](monkeypatch)
    torch.compiler.reset()
    compiled = torch.compile(kernel(name).function, fullgraph=True, dynamic=False, backend="aot_eager")
    for count, lengths in enumerate(([5, 8, 13], [1] * 26, [13, 13], LENGTHS)):
        starts = torch.tensor([0, *lengths]).cumsum(0).int()
        torch._dynamo.mark_dynamic(starts, 0)
        places = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).view(B, S).int()
        draws = torch.Generator().manual_seed(6)
        shapes = ((B, S, H, 8), (B, S, 2, 8), (B, S, 2, 8), (H,))
        leaves = [torch.randn(shape, generator=draws).requires_grad_() for shape in shapes]
        more = {"window": 4, "sinks_H": leaves[3]}
        with torch.compiler.set_stance("fail_on_recompile" if count else "default"):
            out, _ = compiled(*leaves[:3], SCALE, places, cu_seqlens=starts, **more)
        want, _ = attention(*leaves[:3], SCALE, places, **more)
        pairs = (torch.autograd.grad(x.square().sum(), leaves) for x in (out, want))
        assert all(relative(x, y) < 1e-5 for x, y in zip(*pairs, strict=True))


def off_by_one(module: Any) -> Any:
    original = module._places

    def places(*arguments: Any) -> Any:
        *others, window = arguments
        return original(*others, None if window is None else window + 1)

    return places


@pytest.mark.parametrize(
    ("name", "module"), [("varlen_attn", attention_flash), ("flash_attn_4", attention_flash4)]
)
def test_num_6_a_window_that_is_off_by_one(name: str, module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_places", off_by_one(module))
    with pytest.raises(AssertionError, match="4"):
        test_op_2_every_argument_means_what_it_should(name, monkeypatch)


@pytest.mark.parametrize("name", ["varlen_attn", "flash_attn"])
def test_num_6_the_gradient_of_the_log_sum_exp_dropped(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The output rescaled, but its backward given the log-sum-exp of the keys alone."""
    original = attention_rule.join_sinks
    monkeypatch.setattr(attention_rule, "join_sinks", lambda o, lse, a: (original(o, lse, a)[0], lse))
    with pytest.raises(AssertionError):
        test_op_2_every_argument_means_what_it_should(name, monkeypatch)


@pytest.mark.parametrize("name", ["varlen_attn", "flash_attn_4", "flash_attn"])
def test_num_6_documents_that_are_forgotten(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (attention_flash, attention_flash2, attention_flash4):
        monkeypatch.setattr(module, "tokens", lambda *heads: tuple(x.flatten(0, 1).flip(0) for x in heads))
    with pytest.raises(AssertionError):
        test_op_2_every_argument_means_what_it_should(name, monkeypatch)
