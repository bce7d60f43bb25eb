"""Loss curves in fp64, kept as files: `python -m tests.golden.curve` writes them anew.

They notice what no comparison of two code paths can: a change of meaning that both share. A curve is renewed
only in a commit that says why it moved.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from src.config import MeshConfig
from src.trainer.backends.native import NativeBackend
from src.trainer.parallel.shards import local
from src.trainer.runtime import join
from tests.distributed import world
from tests.distributed.batches import step_batch
from tests.distributed.configs import BATCHES, Case, make_config

STEPS = 12
LEARNING_RATE = 0.3
MAX_NORM = 0.5


def path(batch: str) -> Path:
    """The file of a curve."""
    return Path(__file__).parent / f"deepseek_v2_odd_{batch}.json"


def curves(spec: str, axes: dict[str, int]) -> dict[str, dict[str, Any]]:
    """Batch → loss, norm and auxiliary value of each step on a mesh, and torch's version."""
    import torch.distributed as dist

    mesh = MeshConfig(spec, **axes)
    rank = dist.get_rank() if mesh.world > 1 else 0
    runtime = join(mesh, rank, rank, torch.device("cpu"))
    found = {}
    for batch in BATCHES:
        backend = NativeBackend.build(make_config(Case(mesh, "1f1b", batch, "fp64")), runtime)
        steps = [one_step(backend, batch, step) for step in range(STEPS)]
        loss, aux, norm = (list(values) for values in zip(*steps, strict=True))
        found[batch] = {"torch": torch.__version__, "loss": loss, "aux": aux, "norm": norm}
    return found


def one_step(backend: NativeBackend, batch: str, step: int) -> tuple[float, float, float]:
    """Loss, auxiliary value and norm of a step of SGD with clipping; the batches recur after four steps."""
    runtime = backend._runtime
    mine = step_batch(batch, step % 4, runtime.data_coordinate, runtime.mesh.data_ranks)
    count = torch.tensor(mine.target_tokens if runtime.counts_samples else 0)
    sums = backend.forward_backward(mine, runtime.sum_world(count))
    loss, aux = runtime.sum_world(torch.stack([sums.loss, sums.aux])).tolist()
    norm = backend.norm_and_loss(sums.loss)[0]
    backend.scale_gradients((MAX_NORM / (norm + 1e-6)).clamp(max=1.0))
    for parameter in backend.parameters.values():
        local(parameter).sub_(LEARNING_RATE * local(parameter.grad))
        parameter.grad = None
    backend.finish_step(torch.zeros(()))
    return loss, aux, float(norm)


if __name__ == "__main__":
    for name, curve in world.run(1, curves, "single", {})[0].items():
        path(name).write_text(json.dumps(curve, indent=1) + "\n")
