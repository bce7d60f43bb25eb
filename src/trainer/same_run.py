"""Whether all ranks came for the same run, before any of them talks to another (RANK-1)."""

from __future__ import annotations

from torch.distributed.distributed_c10d import Store

from src.errors import UserError


def check_same(store: Store, rank: int, digest: str) -> None:
    """Compare this rank's config with rank 0's, through the store at which all ranks have met.

    Args:
        store: where ranks leave word for one another.
        rank: this one.
        digest: of the config that it read.

    Raises:
        UserError: code 6, another process came as this rank, or this one has another config than rank 0.
    """
    if store.add(f"came/{rank}", 1) > 1:
        message = f"rank {rank} came twice: two launches share an address, or the script ran more than once"
        raise UserError(message, code=6)
    store.set(f"config/{rank}", digest)
    first = store.get("config/0").decode()
    if digest != first:
        fix = "all nodes must see the same run directory"
        raise UserError(f"rank {rank} has the config {digest[:12]}, rank 0 {first[:12]}: {fix}", code=6)
