"""CMP-2, CMP-3: layers are one graph each, and no routing brings a further one."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from src.kernels.registry import Ops
from src.models.build import CausalLM
from src.models.dispatch import LocalDispatcher
from src.models.protocol import Batch
from src.trainer.parallel.inputs import in_any_number, plain_batch
from tests.models import odd
from tests.models.tools import batch, make

LENGTH = 11
DOCUMENTS = [4, 1, 6, 2, 9]
STEPS = 20


class Graphs:
    """A compiler that counts what it is given, and runs it as it is."""

    def __init__(self) -> None:
        self.made = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.made += 1
        return graph.forward


class Watching(LocalDispatcher):
    """Keeps the load of each expert, layer by layer."""

    def __init__(self, experts: int, ops: Ops) -> None:
        super().__init__(experts, ops)
        self.loads: list[Tensor] = []

    def dispatch(self, tokens_TD: Tensor, ids_TK: Tensor) -> Any:
        self.loads.append(ids_TK.flatten().bincount(minlength=self.experts))
        return super().dispatch(tokens_TD, ids_TK)


def inputs(seed: int, length: int = LENGTH) -> tuple[Tensor, Batch]:
    ids = torch.randint(0, 97, (2, length), generator=torch.Generator().manual_seed(seed))
    return ids, batch(length, documents=DOCUMENTS if length == LENGTH else None)


def step(model: CausalLM[Any], dispatcher: LocalDispatcher, seed: int, length: int = LENGTH) -> None:
    """Forward and backward of one batch."""
    model(*inputs(seed, length), dispatcher).square().sum().backward()


def loads(model: CausalLM[Any], dispatcher: Watching, seed: int) -> Tensor:
    """Of all layers, without the compiled graphs."""
    dispatcher.loads.clear()
    with torch.compiler.set_stance("force_eager"), torch.no_grad():
        model(*inputs(seed), dispatcher)
    return torch.stack(dispatcher.loads)


@pytest.mark.slow
@pytest.mark.parametrize("marked", [True, False])
def test_cmp_3_documents_in_any_number_are_one_graph(marked: bool) -> None:
    """Attention gets their starts, whose length changes; without the mark that is noticed."""
    torch.compiler.reset()
    model, dispatcher = make(odd.MEMBERS["gpt_oss"](), kernels="auto")
    graphs = Graphs()
    model.model.layers["0"].compile(fullgraph=True, dynamic=False, backend=graphs)
    made = []
    for documents in ([4, 7, 11], [1] * 22, [11, 11]):
        ids, seen = inputs(0)[0], batch(LENGTH, documents=documents)
        micro_batch = replace(plain_batch(ids), cu_seqlens=seen.cu_seqlens)
        seen = replace(seen, cu_seqlens=(in_any_number(micro_batch) if marked else micro_batch).cu_seqlens)
        model(ids, seen, dispatcher).square().sum().backward()
        made.append(graphs.made)
    assert (made[0] == made[-1]) == marked, made


@pytest.mark.slow
@pytest.mark.parametrize("family", odd.MIXTURES)
def test_cmp_3_twenty_routings_are_one_graph(family: str) -> None:
    """At most two graphs a kind of layer, without a break, and none after the second step."""
    torch.compiler.reset()
    model, dispatcher = make(odd.MEMBERS[family](), kernels="auto")
    graphs = Graphs()
    for layer in model.model.layers.values():
        layer.compile(fullgraph=True, dynamic=False, backend=graphs)
    for seed in range(2):
        step(model, dispatcher, seed)
    kinds = {layer.is_moe for layer in model.model.layers.values()}
    assert 1 <= graphs.made <= 2 * len(kinds), graphs.made
    with torch.compiler.set_stance("fail_on_recompile"):
        for seed in range(2, STEPS):
            step(model, dispatcher, seed)
        with pytest.raises(RuntimeError, match="recompile"):  # A number that does change is noticed.
            step(model, dispatcher, STEPS, length=LENGTH + 2)
    watching = Watching(model.config.num_experts, model.ops)
    each = [loads(model, watching, seed) for seed in range(STEPS)]
    assert all(not torch.equal(a, b) for a, b in itertools.pairwise(each))
