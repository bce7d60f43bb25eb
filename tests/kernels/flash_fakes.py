"""Stand-ins for the flash kernels of others: their entry points, computed by plain loops on a CPU.

They keep what they were called with, and work from what they are given alone: a backward takes the output and
the log-sum-exp as its own, as the kernels do.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from src.kernels import attention, attention_flash


@dataclass
class Calls:
    """Named arguments of the calls, in order."""

    made: list[dict[str, Any]] = field(default_factory=list)

    def note(self, **named: Any) -> dict[str, Any]:
        self.made.append(named)
        return named


@dataclass(frozen=True)
class Segment:
    """One document of the flattened tokens, or one sample."""

    rows: slice
    scale: float
    left: int | None
    """Keys besides the query's own that it sees; None: all before it."""

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """[H,S,S], −inf where a query does not look."""
        places = torch.arange(q[self.rows].shape[0])
        distance = places[:, None] - places
        seen = (distance >= 0) & (distance <= (len(places) if self.left is None else self.left))
        products = torch.einsum("ihc,jhc->hij", q[self.rows], _copies(k, q)[self.rows]) * self.scale
        return products.masked_fill(~seen, -torch.inf)


def segments(bounds: list[int], scale: float, left: int | None) -> Iterator[Segment]:
    return (Segment(slice(a, b), scale, left) for a, b in pairwise(bounds))


def _copies(x: Tensor, q: Tensor) -> Tensor:
    return x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def forward(q: Tensor, k: Tensor, v: Tensor, bounds: list[int], scale: float, left: int | None) -> Any:
    """o [T,H,U] and lse [H,T] of tokens."""
    o, lse = q.new_empty(*q.shape[:2], v.shape[-1]), q.new_empty(q.shape[1], q.shape[0])
    for part in segments(bounds, scale, left):
        scores = part.scores(q, k)
        lse[:, part.rows] = scores.logsumexp(-1)
        o[part.rows] = torch.einsum("hij,jhu->ihu", scores.softmax(-1), _copies(v, q)[part.rows])
    return o, lse


def backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    bounds: list[int], scale: float, left: int | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """FlashAttention-2 (arXiv 2307.08691, alg. 2): probabilities are exp(score − lse)."""
    dq, dk, dv = (q.new_zeros(x.shape) for x in (q, q, o))
    delta = (do * o).sum(-1).T
    for part in segments(bounds, scale, left):
        p = (part.scores(q, k) - lse[:, part.rows, None]).exp()
        dp = torch.einsum("ihu,jhu->hij", do[part.rows], _copies(v, q)[part.rows])
        ds = p * (dp - delta[:, part.rows, None]) * scale
        dv[part.rows] = torch.einsum("hij,ihu->jhu", p, do[part.rows])
        dk[part.rows] = torch.einsum("hij,ihc->jhc", ds, q[part.rows])
        dq[part.rows] = torch.einsum("hij,jhc->ihc", ds, _copies(k, q)[part.rows])
    groups = q.shape[1] // k.shape[1]
    return dq, *(x.unflatten(1, (-1, groups)).sum(2) for x in (dk, dv))  # type: ignore[return-value]


def flat(x: Tensor) -> Tensor:
    """Tokens of samples, or tokens as they are."""
    return x.flatten(0, 1) if x.dim() == 4 else x


def places(q: Tensor, cu_seqlens: Tensor | None) -> list[int]:
    """Where segments begin: at each sample if no documents are given."""
    if cu_seqlens is not None:
        assert q.dim() == 3
        assert cu_seqlens.dtype == torch.int32
        return [int(x) for x in cu_seqlens]
    return [n * q.shape[1] for n in range(q.shape[0] + 1)]


def lse_out(lse: Tensor, q: Tensor) -> Tensor:
    """[B,H,S] for samples, [H,T] for tokens."""
    return lse if q.dim() == 3 else lse.unflatten(1, q.shape[:2]).transpose(0, 1).contiguous()


def lse_in(lse: Tensor, q: Tensor) -> Tensor:
    """Back to [H,T]; a kernel reads it contiguous."""
    assert lse.is_contiguous()
    assert lse.shape == (q.shape[1:2] + q.shape[:1] if q.dim() == 3 else (q.shape[0], q.shape[2], q.shape[1]))
    return lse if q.dim() == 3 else lse.transpose(0, 1).flatten(1)


def run_forward(q: Tensor, k: Tensor, v: Tensor, cu: Tensor | None, scale: float, left: int | None) -> Any:
    o, lse = forward(*map(flat, (q, k, v)), places(q, cu), scale, left)
    return o.view(*q.shape[:-1], v.shape[-1]), lse_out(lse, q)


def run_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    cu: Tensor | None, scale: float, left: int | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    assert do.is_contiguous()
    tensors = map(flat, (do, q, k, v, o))
    grads = backward(*tensors, lse_in(lse, q), places(q, cu), scale, left)
    return tuple(x.view(like.shape) for x, like in zip(grads, (q, k, v), strict=True))


def bound(left: int) -> int | None:
    """-1 is no bound."""
    return None if left < 0 else left


def torch_flash(patch: pytest.MonkeyPatch) -> Calls:
    """`aten::_flash_attention_forward` and its backward."""
    calls = Calls()

    def checked(is_causal: bool, options: dict[str, Any], cu_q: Any, cu_k: Any) -> tuple[float, int | None]:
        left, right = options["window_size_left"], options["window_size_right"]
        assert cu_q is cu_k
        assert right == 0
        assert is_causal == (left < 0)
        return options["scale"], bound(left)

    def fwd(
        q: Tensor, k: Tensor, v: Tensor, cu_q: Any, cu_k: Any, max_q: int, max_k: int, dropout: float,
        is_causal: bool, debug: bool, **options: Any,
    ) -> Any:  # fmt: skip
        calls.note(cu=cu_q, max_q=max_q, max_k=max_k, dropout=dropout, debug=debug, **options)
        o, lse = run_forward(q, k, v, cu_q, *checked(is_causal, options, cu_q, cu_k))
        return o, lse, torch.zeros(2), torch.zeros(0), torch.zeros(0)

    def bwd(
        do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, cu_q: Any, cu_k: Any,
        max_q: int, max_k: int, dropout: float, is_causal: bool, seed: Tensor, unused: Tensor, **options: Any,
    ) -> Any:  # fmt: skip
        calls.note(cu=cu_q, max_q=max_q, max_k=max_k, dropout=dropout, **options)
        return run_backward(do, q, k, v, o, lse, cu_q, *checked(is_causal, options, cu_q, cu_k))

    patch.setattr(attention_flash, "_FORWARD", fwd)
    patch.setattr(attention_flash, "_BACKWARD", bwd)
    return calls


def flash_attn_4(patch: pytest.MonkeyPatch) -> Calls:
    """`flash_attn.cute.interface`, as 4.0.0b36 has it: it knows sinks."""
    calls = Calls()

    def _flash_attn_fwd(
        q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens_q: Any = None, cu_seqlens_k: Any = None,
        max_seqlen_q: Any = None, max_seqlen_k: Any = None, softmax_scale: float, causal: bool,
        window_size_left: int | None, learnable_sink: Tensor | None, return_lse: bool,
    ) -> Any:  # fmt: skip
        assert causal
        assert return_lse
        assert cu_seqlens_q is cu_seqlens_k
        calls.note(cu=cu_seqlens_q, max_q=max_seqlen_q, max_k=max_seqlen_k)
        o, lse = run_forward(q, k, v, cu_seqlens_q, softmax_scale, window_size_left)
        if learnable_sink is not None:
            total = torch.logaddexp(lse, learnable_sink[:, None])
            kept = (lse - total).exp()
            o, lse = o * (kept.T if q.dim() == 3 else kept.transpose(1, 2))[..., None], total
        return o, lse, None, None, None

    def _flash_attn_bwd(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, *, cu_seqlens_q: Any = None,
        cu_seqlens_k: Any = None, max_seqlen_q: Any = None, max_seqlen_k: Any = None, softmax_scale: float,
        causal: bool, window_size_left: int | None, learnable_sink: Tensor | None, deterministic: bool,
    ) -> Any:  # fmt: skip
        assert causal
        assert cu_seqlens_q is cu_seqlens_k
        calls.note(cu=cu_seqlens_q, max_q=max_seqlen_q, max_k=max_seqlen_k, deterministic=deterministic)
        grads = run_backward(dout, q, k, v, out, lse, cu_seqlens_q, softmax_scale, window_size_left)
        if learnable_sink is None:
            return grads
        delta = (flat(dout) * flat(out)).sum(-1).T
        return *grads, -((learnable_sink[:, None] - lse_in(lse, q)).exp() * delta).sum(1)

    _module(patch, "flash_attn.cute.interface", _flash_attn_fwd, _flash_attn_bwd)
    return calls


def flash_attn(patch: pytest.MonkeyPatch) -> Calls:
    """`flash_attn.flash_attn_interface`, as 2.8.3 has it; backwards write into dq, dk and dv."""
    calls = Calls()

    def _flash_attn_forward(
        q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float, causal: bool,
        window_size_left: int, window_size_right: int, softcap: float, alibi_slopes: None,
        return_softmax: bool, cu: Any = None,
    ) -> Any:  # fmt: skip
        assert (dropout_p, softcap, alibi_slopes, causal) == (0.0, 0.0, None, True)
        assert not return_softmax
        calls.note(cu=cu)
        return *run_forward(q, k, v, cu, softmax_scale, bound(window_size_left)), None, None

    def _flash_attn_varlen_forward(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int,
        max_seqlen_k: int, *rest: Any,
    ) -> Any:  # fmt: skip
        found = _flash_attn_forward(q, k, v, *rest, cu=cu_seqlens_q)
        calls.made[-1] |= {"max_q": max_seqlen_q, "max_k": max_seqlen_k}
        return found

    def _flash_attn_backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor,
        dk: Tensor, dv: Tensor, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int,
        window_size_right: int, softcap: float, alibi_slopes: None, deterministic: bool, cu: Any = None,
    ) -> Any:  # fmt: skip
        assert (dropout_p, softcap, alibi_slopes, causal) == (0.0, 0.0, None, True)
        calls.note(cu=cu, deterministic=deterministic)
        left = bound(window_size_left)
        grads = run_backward(dout, q, k, v, out, softmax_lse, cu, softmax_scale, left)
        for into, grad in zip((dq, dk, dv), grads, strict=True):
            into.copy_(grad)

    def _flash_attn_varlen_backward(*arguments: Any) -> Any:
        *tensors, cu, _, max_q, max_k = arguments[:13]
        _flash_attn_backward(*tensors, *arguments[13:], cu=cu)
        calls.made[-1] |= {"max_q": max_q, "max_k": max_k}

    _module(
        patch, "flash_attn.flash_attn_interface", _flash_attn_forward, _flash_attn_varlen_forward,
        _flash_attn_backward, _flash_attn_varlen_backward,
    )  # fmt: skip
    return calls


def cudnn(patch: pytest.MonkeyPatch) -> Calls:
    """`aten::_scaled_dot_product_cudnn_attention` and its backward, heads first."""
    calls = Calls()
    seed, offset = torch.zeros(1), torch.zeros(2)

    def fwd(
        q: Tensor, k: Tensor, v: Tensor, bias: None, wants_lse: bool, dropout: float, is_causal: bool,
        debug: bool, *, scale: float,
    ) -> Any:  # fmt: skip
        assert (bias, wants_lse, dropout, is_causal, debug) == (None, True, 0.0, True, False)
        o, lse = run_forward(*(x.transpose(1, 2) for x in (q, k, v)), None, scale, None)
        return o.transpose(1, 2), lse[..., None], None, None, q.shape[2], q.shape[2], seed, offset, None

    def bwd(
        do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, came_seed: Tensor,
        came_offset: Tensor, bias: None, cu_q: None, cu_k: None, max_q: int, max_k: int, dropout: float,
        is_causal: bool, *, scale: float,
    ) -> Any:  # fmt: skip
        assert came_seed.shape == seed.shape
        assert came_offset.shape == offset.shape
        assert (bias, cu_q, cu_k, dropout, is_causal) == (None, None, None, 0.0, True)
        calls.note(cu=None, max_q=max_q, max_k=max_k)
        tensors = (x.transpose(1, 2).contiguous() for x in (do, q, k, v, o))
        grads = run_backward(*tensors, lse[..., 0], None, scale, None)
        return tuple(x.transpose(1, 2) for x in grads)

    patch.setattr(attention, "_CUDNN", fwd)
    patch.setattr(attention, "_CUDNN_BACKWARD", bwd)
    return calls


def _module(patch: pytest.MonkeyPatch, name: str, *functions: Any) -> None:
    """A module with these functions, and those that hold it."""
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        module = ModuleType(".".join(parts[:depth]))
        patch.setitem(sys.modules, module.__name__, module)
        if depth > 1:
            setattr(sys.modules[".".join(parts[: depth - 1])], parts[depth - 1], module)
    for function in functions:
        setattr(sys.modules[name], function.__name__, function)
