"""NUM-5: attention of packed samples may go by the starts of documents alone, as kernels on a GPU do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from src.kernels.attention import attention
from src.models.build import CausalLM, build, whole
from src.models.dispatch import LocalDispatcher
from src.models.schema import ModelConfig
from tests.models import odd
from tests.models.tools import batch, make, operations

DOCUMENTS = [4, 1, 6, 11]
"""Of two samples of 11 positions."""


def by_starts(
    q: Tensor, k: Tensor, v: Tensor, scale: float, documents_BS: Tensor, cu_seqlens: Tensor, **more: Any
) -> tuple[Tensor, Tensor]:
    """The reference, told of documents by where they start."""
    places = torch.arange(q.shape[0] * q.shape[1], dtype=torch.int32)
    ids = torch.searchsorted(cu_seqlens, places, right=True)
    return attention(q, k, v, scale, ids.view_as(documents_BS), **more)


@pytest.mark.parametrize(
    "config", [odd.deepseek_v2(), odd.qwen3_moe(), odd.gpt_oss()], ids=lambda c: c.family
)
def test_num_5_every_family_hands_over_the_starts_of_documents(config: ModelConfig) -> None:
    model, dispatcher = make(config)
    ops = replace(operations(config), attention=by_starts)
    other: CausalLM[Any] = build(config, whole(config), ops)
    other.load_state_dict(model.state_dict())
    other.reset_buffers(torch.device("cpu"))
    ids_BS = torch.randint(0, 90, (2, 11), generator=torch.Generator().manual_seed(0))
    packed = batch(11, documents=DOCUMENTS)
    found = other(ids_BS, packed, LocalDispatcher(config.num_experts, ops))
    torch.testing.assert_close(found, model(ids_BS, packed, dispatcher))
    wrong = replace(packed, cu_seqlens=torch.tensor([0, 22], dtype=torch.int32))
    assert not torch.allclose(other(ids_BS, wrong, dispatcher), found)
