"""Attention over a ring of ranks against one dense softmax, in fp64: values and every gradient (ENG-21)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from src.trainer.parallel.context import Ring
from src.trainer.parallel.spans import spans
from tests.distributed import ring_faults

BLOCK = 3
SAMPLES, HEADS, GROUPS, KEY, VALUE, LATENT, ROTATED, SCALE = 3, 6, 2, 8, 5, 7, 4, 0.41
DOCUMENTS = ((2, 7, 2, 2, 1, 9, 5), (5, 1, 2, 30), (2,) * 24)
"""Document lengths of each sample, as far as it goes: two tokens, one token, and many across block ends."""


@dataclass(frozen=True)
class Case:
    """One attention."""

    latent: bool = False
    """Keys and values come of a latent, keys wider than values; else six query heads share two of keys."""
    packed: bool = False
    window: int | None = None
    sinks: bool = False


CASES = (
    Case(),
    Case(packed=True),
    Case(window=5),
    Case(window=2, packed=True, sinks=True),
    Case(sinks=True),
    Case(latent=True),
    Case(latent=True, packed=True),
    Case(latent=True, window=4, sinks=True),
)


def expand(latent_BSL: Tensor, k_BSR: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Keys [B,S,H,C] and values [B,S,H,U] of a latent, as in MLA."""
    nope = KEY - ROTATED
    kv_BSHX = (latent_BSL @ weight.T).view(*latent_BSL.shape[:2], HEADS, nope + VALUE)
    return torch.cat([kv_BSHX[..., :nope], k_BSR[:, :, None].expand(-1, -1, HEADS, -1)], -1), kv_BSHX[
        ..., nope:
    ]


def tensors(case: Case, length: int) -> dict[str, Tensor]:
    """Whole inputs, the same on every rank, and the gradient of the result."""
    generator = torch.Generator().manual_seed(3)
    width = VALUE if case.latent else KEY
    shapes: dict[str, tuple[int, ...]] = {
        "q": (SAMPLES, length, HEADS, KEY),
        "do": (SAMPLES, length, HEADS, width),
    }
    if case.latent:
        shapes |= {"sent 0": (SAMPLES, length, LATENT), "sent 1": (SAMPLES, length, ROTATED)}
        shapes |= {"weight": (HEADS * (KEY - ROTATED + VALUE), LATENT)}
    else:
        shapes |= {f"sent {i}": (SAMPLES, length, GROUPS, KEY) for i in range(2)}
    if case.sinks:
        shapes |= {"sinks": (HEADS,)}
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()
    }


def documents(length: int) -> Tensor:
    """int32 [B,S]; ids rise through the micro-batch."""
    rows, first = [], 0
    for lengths in DOCUMENTS:
        ids = [first + i for i, n in enumerate((*lengths, length)) for _ in range(n)][:length]
        rows.append(ids)
        first = ids[-1] + 1
    return torch.tensor(rows, dtype=torch.int32)


def dense(case: Case, whole: Mapping[str, Tensor], length: int) -> dict[str, Tensor]:
    """The result and all gradients, of a softmax over whole rows with the sink as one more column."""
    leaves = {name: x.clone().requires_grad_() for name, x in whole.items() if name != "do"}
    sent = [leaves["sent 0"], leaves["sent 1"]]
    k, v = (
        expand(*sent, leaves["weight"])
        if case.latent
        else (x.repeat_interleave(HEADS // GROUPS, 2) for x in sent)
    )
    scores = SCALE * torch.einsum("bshc,bthc->bhst", leaves["q"], k)
    ids = documents(length)
    back = torch.arange(length)[:, None] - torch.arange(length)
    seen = (back >= 0) & (back < (case.window or length))
    seen = seen[None] & (ids[:, :, None] == ids[:, None]) if case.packed else seen[None]
    scores = torch.where(seen[:, None], scores, -torch.inf)
    if case.sinks:
        column = leaves["sinks"].view(1, -1, 1, 1).expand(SAMPLES, -1, length, 1)
        scores = torch.cat([scores, column], -1)
    out = torch.einsum("bhst,bthu->bshu", scores.softmax(-1)[..., :length], v)
    out.backward(whole["do"])
    return {"out": out.detach()} | {
        f"gradient of {name}": x.grad for name, x in leaves.items() if x.grad is not None
    }


def errors(case: Case) -> dict[str, float]:
    """Relative distance of each quantity from the dense one, on this rank's positions."""
    ring = Ring(dist.group.WORLD)
    length = 2 * ring.size * BLOCK
    whole = tensors(case, length)
    expected = dense(case, whole, length)
    mine = [i for span in spans(length, ring.size, ring.rank) for i in span]
    local = {n: x[:, mine] if x.dim() > 2 else x for n, x in whole.items()}
    leaves = {n: x.clone().requires_grad_() for n, x in local.items() if n != "do"}
    out = ring.attend(
        leaves["q"],
        (leaves["sent 0"], leaves["sent 1"]),
        expand if case.latent else None,
        (leaves["weight"],) if case.latent else (),
        SCALE,
        documents(length)[:, mine] if case.packed else None,
        case.window,
        leaves.get("sinks"),
    )
    out.backward(local["do"])
    found = {"out": out.detach()}
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        found[f"gradient of {name}"] = leaf.grad if leaf.dim() > 2 else ring.sum(leaf.grad)
    wanted = {n: x[:, mine] if x.dim() > 2 else x for n, x in expected.items()}
    assert wanted.keys() == found.keys()
    return {name: float((found[name] - x).norm() / x.norm()) for name, x in wanted.items()}


def worst_errors(cases: tuple[Case, ...]) -> list[tuple[float, float, int]]:
    """Of each case, distance of the result, the largest of a gradient, and how often tensors were sent."""
    found = []
    for case in cases:
        with mock.patch.object(dist, "batch_isend_irecv", wraps=dist.batch_isend_irecv) as sends:
            distances = errors(case)
        found.append((distances.pop("out"), max(distances.values()), sends.call_count))
    return found


MUTATIONS: Mapping[str, tuple[Any, Case]] = {
    "ring_hop": (ring_faults.ring_hop, CASES[1]),
    "kv_b_hop": (ring_faults.kv_b_hop, CASES[6]),
    "local_places": (ring_faults.local_places, CASES[2]),
    "ignored_documents": (ring_faults.ignored_documents, CASES[1]),
}
"""Name → patch, and the attention that must be off under it."""


def mutants() -> dict[str, float]:
    """Mutation → worst distance of any quantity on any rank."""
    found = {}
    for name, (patch, case) in MUTATIONS.items():
        with patch():
            here = torch.tensor(max(errors(case).values()))
        dist.all_reduce(here, dist.ReduceOp.MAX)
        found[name] = float(here)
    return found
