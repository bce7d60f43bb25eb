"""OP-2, NUM-5: the masks that `flex_attention` gets, block by block, and its forward on a CPU."""

from __future__ import annotations

import warnings
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from src.kernels import attention_flex
from src.kernels.attention import attention
from tests.models.tools import relative

WINDOWS = (None, 1, 2, 128, 129, 130, 999)


def documents(length: int, seed: int) -> Tensor:
    """Of two samples, each cut at random places; some are one position long, and numbers recur."""
    draws = torch.Generator().manual_seed(seed)
    inside = torch.rand(2, length - 1, generator=draws) < 6 / length
    begins = torch.cat((torch.ones(2, 1, dtype=torch.bool), inside), 1)
    return begins.cumsum(1).int() - 1


def listed(mask: BlockMask) -> list[object]:
    """Which blocks each block of queries has, and the other way round."""
    kinds = ("kv", "full_kv", "q", "full_q")
    pairs = [(getattr(mask, f"{kind}_num_blocks"), getattr(mask, f"{kind}_indices")) for kind in kinds]
    return [
        sorted(row[:count].tolist())
        for counts, rows in pairs
        for count, row in zip(counts.flatten().tolist(), rows.flatten(0, 2), strict=True)
    ]


@pytest.mark.parametrize("length", [11, 128, 300, 640])
def test_num_5_blocks_are_those_that_torch_finds_place_by_place(length: int) -> None:
    """A block that is left out is empty, one that is whole is seen by every query, as an S×S mask says."""
    for window, seed in product(WINDOWS, (None, 0, 1)):
        ids = None if seed is None else documents(length, seed)
        size = length if ids is None else ids.numel()
        ours = attention_flex.block_mask(torch.empty(1, size, 1, 1), ids, window)
        assert ours.kv_num_blocks.shape[:2] == (
            1,
            1,
        )  # The kernel steps over more by a stride of its own choice.
        mask = attention_flex._mask(ids, window)
        torchs = create_block_mask(mask, None, None, size, size, device="cpu")
        assert listed(ours) == listed(torchs), (window, seed)


def test_num_6_a_window_that_is_off_by_one_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    original = attention_flex._blocks
    monkeypatch.setattr(
        attention_flex, "_blocks", lambda q, ids, window: original(q, ids, window and window - 1)
    )
    with pytest.raises(AssertionError):
        test_num_5_blocks_are_those_that_torch_finds_place_by_place(640)


@pytest.mark.parametrize(("window", "sinks"), [(None, False), (37, True)])
def test_op_2_forward(window: int | None, sinks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """NUM-7: on a CPU torch has no backward, and its forward needs no compiler."""
    monkeypatch.setattr(attention_flex, "_compiled", lambda: attention_flex._flex)
    monkeypatch.setattr(
        torch.nn.attention.flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True, raising=True
    )
    draws, ids = torch.Generator().manual_seed(1), documents(140, 0)
    shapes = ((2, 140, 6, 24), (2, 140, 2, 24), (2, 140, 2, 16), (6,))
    q, k, v, a = (torch.randn(shape, generator=draws, dtype=torch.float64) for shape in shapes)
    more = (window, a if sinks else None)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found, want = (function(q, k, v, 0.3, ids, *more) for function in (attention_flex.flex, attention))
    assert max(relative(x, y) for x, y in zip(found, want, strict=True)) < 1e-12
