"""The ring of context-parallel ranks: what travels between the parts of a sequence (ENG-21).

Every rank issues the same sends in the same order whatever the data. Ring Attention (arXiv 2310.01889).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from src.models.protocol import Tensors
from src.trainer.parallel.ring_attention import Expand, RingAttention, Rule
from src.trainer.parallel.spans import spans


class Ring:
    """The ranks that share sequences; the `protocol.Context` of their layers."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.size: int = dist.get_world_size(group)
        """Ranks that share a sequence."""
        self.rank: int = dist.get_rank(group)
        """Which of them this is."""

    def attend(
        self,
        q_BSHC: Tensor,
        sent: Tensors,
        expand: Expand | None,
        weights: Tensors,
        scale: float,
        documents_BS: Tensor | None,
        window: int | None = None,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """See `protocol.Context`."""
        rule = Rule(self, expand, len(sent), scale, window)
        o_BSHU: Tensor
        o_BSHU = RingAttention.apply(  # type: ignore[no-untyped-call]
            rule, documents_BS, sinks_H, q_BSHC, *sent, *weights
        )
        return o_BSHU

    def around(self, held: Tensors) -> Iterator[Tensors]:
        """What each rank holds, as it comes by: first this rank's own, then that of the rank before, …

        The next is on its way while the caller works on what it has.
        """
        for left in reversed(range(self.size)):
            arriving = self.pass_on(held) if left else None
            yield held
            if arriving is not None:
                held = arriving.wait()

    def pass_on(self, tensors: Tensors) -> Arriving:
        """Start to send to the next rank what the one before sends here, tensors of the same shapes."""
        after, before = ((self.rank + step) % self.size for step in (1, -1))
        out = tuple(tensor.contiguous() for tensor in tensors)
        into = tuple(torch.empty_like(tensor) for tensor in out)
        sends = [dist.P2POp(dist.isend, x, group=self._group, group_peer=after) for x in out]
        receives = [dist.P2POp(dist.irecv, x, group=self._group, group_peer=before) for x in into]
        return Arriving(dist.batch_isend_irecv(sends + receives), out, into)

    def join(self, part_BSD: Tensor) -> Tensor:
        """Whole sequences [B,S·cp,D] of each rank's part [B,S,D], on every rank; no gradient."""
        parts = [torch.empty_like(part_BSD) for _ in range(self.size)]
        dist.all_gather(parts, part_BSD.contiguous(), group=self._group)
        length = part_BSD.shape[1] * self.size
        places = [p for rank in range(self.size) for span in spans(length, self.size, rank) for p in span]
        order = sorted(range(length), key=places.__getitem__)
        return torch.cat(parts, 1)[:, order]

    def sum(self, tensor: Tensor) -> Tensor:
        """SUM over the ranks, in place; returns the tensor."""
        dist.all_reduce(tensor, group=self._group)
        return tensor


@dataclass(frozen=True)
class Arriving:
    """Tensors on their way."""

    works: list[dist.Work]
    out: Tensors
    """What is sent, kept until it has left."""
    into: Tensors

    def wait(self) -> Tensors:
        """What has come."""
        for work in self.works:
            work.wait()
        return self.into
