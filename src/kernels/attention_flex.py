"""Attention by torch's `flex_attention`: a mask of documents and window, sinks by its log-sum-exp (OP-2).

Which blocks of the mask are empty, whole or partial follows from the first and last document of each block,
as documents never fall along a sample; so no mask of S×S is made, and layers need not share one.

Packed samples are one row, so that the tables of blocks have no batch: torch 2.11's kernel steps from one
sample's table to the next by the stride of the heads' dimension, which is free where there is one head. On
an H200 tables of two samples gave zeros and reads outside of memory, in a graph without gradients or with
symbolic sizes (LOG.md, 2026-12-01).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from src.kernels.attention_rule import join_sinks, up_to_256
from src.kernels.declaration import AMPERE_ON, Implementation

BLOCK = 128
"""Queries and keys of a block of the mask."""
FORMS = 32
"""Packed or not, windows, with gradients or not, of one length or any: so often it may be compiled."""


def flex(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """`attention` in kernels that a compiler fuses: the model's, where that compiles, else one of its own.

    Its own compiles even where the model is run without (as in evaluation): uncompiled, it would write all
    scores down.
    """
    if torch.compiler.is_compiling():
        return _flex(*arguments, **options)
    with torch.compiler.set_stance("default"), torch._dynamo.config.patch(recompile_limit=FORMS):
        return _compiled()(*arguments, **options)


def _flex(
    q_BSHC: Tensor,
    k_BSGC: Tensor,
    v_BSGU: Tensor,
    scale: float,
    documents_BS: Tensor | None,
    window: int | None = None,
    sinks_H: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The log-sum-exp is differentiable here, so that sinks are plain arithmetic on the output."""
    B, S, H, _ = q_BSHC.shape
    if documents_BS is not None:
        q_BSHC, k_BSGC, v_BSGU = (x.reshape(1, B * S, *x.shape[2:]) for x in (q_BSHC, k_BSGC, v_BSGU))
    mask = block_mask(q_BSHC, documents_BS, window)
    q_BHSC, k_BGSC, v_BGSU = (x.transpose(1, 2) for x in (q_BSHC, k_BSGC, v_BSGU))
    o_BHSU, aux = flex_attention(
        q_BHSC, k_BGSC, v_BGSU, block_mask=mask, scale=scale, enable_gqa=True,
        return_aux=AuxRequest(lse=True),
        kernel_options={"FORCE_USE_FLEX_ATTENTION": True},  # Short samples would get that for decoding.
    )  # fmt: skip
    assert aux.lse is not None
    o_BSHU, lse_BHS = o_BHSU.transpose(1, 2), aux.lse
    if documents_BS is not None:
        o_BSHU = o_BSHU.reshape(B, S, H, -1)
        lse_BHS = lse_BHS.reshape(H, B, S).transpose(0, 1)
    if sinks_H is not None:
        o_BSHU, lse_BHS = join_sinks(o_BSHU, lse_BHS, sinks_H)
    return o_BSHU, lse_BHS.detach()


@cache
def _compiled() -> Callable[..., tuple[Tensor, Tensor]]:
    return torch.compile(_flex, fullgraph=True)


def one_row(documents_BS: Tensor) -> Tensor:
    """int64 [BS]: each document has another number, also where samples number theirs alike; none falls."""
    samples_B1 = torch.arange(documents_BS.shape[0], device=documents_BS.device)[:, None]
    return (documents_BS.long() + (samples_B1 << 32)).flatten()


def block_mask(q_XSHC: Tensor, documents_BS: Tensor | None, window: int | None) -> BlockMask:
    """Of each block of queries the blocks of keys that some query sees, apart those that all see whole.

    The first dimension of `q_XSHC` is that of samples, or 1 where they are packed and form one row.
    """
    length = q_XSHC.shape[1]
    some_IJ, all_IJ = _blocks(q_XSHC, documents_BS, window)
    partly, whole = (_in_order(x_IJ[None, None]) for x_IJ in (some_IJ & ~all_IJ, all_IJ))
    return BlockMask.from_kv_blocks(
        *partly, *whole, BLOCK_SIZE=BLOCK, mask_mod=_mask(documents_BS, window), seq_lengths=(length, length)
    )


def _mask(documents_BS: Tensor | None, window: int | None) -> Callable[..., Tensor]:
    """Whether query i sees key j, of a sample or, packed, of the row of all samples."""

    def sees(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        seen = j <= i
        if window is not None:
            seen = seen & (i - j < window)
        if documents_BS is not None:
            length = documents_BS.shape[1]
            last = documents_BS.numel() - 1  # The last block may reach beyond the row.
            i, j = i.clamp(max=last), j.clamp(max=last)
            seen = seen & (i // length == j // length)
            seen = seen & (documents_BS[i // length, i % length] == documents_BS[j // length, j % length])
        return seen

    return sees


def _blocks(q_XSHC: Tensor, documents_BS: Tensor | None, window: int | None) -> tuple[Tensor, Tensor]:
    """Bool [I,J]: some query of block i sees a key of block j; all of them see all of its keys."""
    length = q_XSHC.shape[1]
    first_I = torch.arange(0, length, BLOCK, device=q_XSHC.device)
    last_I = (first_I + BLOCK - 1).clamp(max=length - 1)
    low, high = first_I[:, None] - last_I, last_I[:, None] - first_I  # Of query minus key.
    some, every = high >= 0, low >= 0
    if window is not None:
        some, every = some & (low < window), every & (high < window)
    if documents_BS is not None:
        documents = one_row(documents_BS)
        begin_I, end_I = documents[first_I], documents[last_I]
        # Keys come first, so a document of both ends the keys' block and begins the queries'.
        some = some & (end_I >= begin_I[:, None])
        every = every & (begin_I == end_I[:, None])
    whole_I = last_I - first_I == BLOCK - 1  # A last block that is not is masked place by place.
    return some, every & whole_I & whole_I[:, None]


def _in_order(wanted_BHIJ: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of keys each block of queries has, and their indices before those of the others."""
    counts_BHI = wanted_BHIJ.sum(-1, dtype=torch.int32)
    order_BHIJ = wanted_BHIJ.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return counts_BHI, order_BHIJ.to(torch.int32)


def _widths(widths: Mapping[str, int], dtype: torch.dtype) -> str | None:
    bad = [f"{name} {widths[name]}" for name in ("key", "value") if widths.get(name, 16) < 16]
    return f"takes heads of 16 and more, not {', '.join(bad)}" if bad else up_to_256(widths, dtype)


IMPLEMENTATIONS = (
    Implementation(
        "attention",
        "flex_attention",
        flex,
        source="library",
        deterministic=(True, False),
        saves="q, k, v, o, lse, mask of blocks",
        devices=frozenset({"cuda"}),
        archs=AMPERE_ON,
        dtypes=frozenset({torch.bfloat16, torch.float16}),
        features=frozenset({"packed", "unequal_widths", "gqa", "window", "sinks"}),
        shapes=_widths,
    ),
)
