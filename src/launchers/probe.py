"""Looks at one GPU and prints what it found as JSON: `python -m src.launchers.probe INDEX` (CHECK-1).

A process of its own: a GPU that hangs holds up nobody else, and the memory is given back at the end.
"""

from __future__ import annotations

import json
import sys

import torch

BYTES = 256 * 2**20
SIZE = 2048


def probe(index: int) -> dict[str, object]:
    """Name, memory, what is taken of it (this process's context too), and whether a product is finite."""
    torch.cuda.set_device(index)
    free, total = torch.cuda.mem_get_info(index)
    device = torch.device("cuda", index)
    block = torch.ones(BYTES, dtype=torch.uint8, device=device)
    draws = torch.Generator(device).manual_seed(0)
    a, b = (torch.empty(SIZE, SIZE, device=device).normal_(generator=draws) for _ in range(2))
    is_finite = bool((a @ b).isfinite().all()) and int(block[-1]) == 1
    name = torch.cuda.get_device_name(index)
    return {"name": name, "total": total, "taken": total - free, "finite": is_finite}


if __name__ == "__main__":
    print(json.dumps(probe(int(sys.argv[1]))))
