"""`precision=split` is `precision=master` in other bytes, on every mesh (OP-4, CKPT-2)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from src.config import OptimizerConfig, PrecisionConfig
from src.trainer.backends.native import NativeBackend
from src.trainer.checkpoint.contents import collect
from src.trainer.checkpoint.directory import step_path
from src.trainer.checkpoint.find import find
from src.trainer.checkpoint.flat import flatten
from src.trainer.checkpoint.load import load
from src.trainer.checkpoint.save import save
from src.trainer.data.corpus import open_data
from src.trainer.data.loader import Loader
from src.trainer.optimizer import Optimizer
from src.trainer.parallel.halves import Halves, whole
from src.trainer.parallel.pipeline import adapter
from src.trainer.parallel.precision import precision_of
from src.trainer.parallel.shards import local
from src.trainer.runtime import join
from tests.checkpoint.groups import mesh_of, visit
from tests.models.odd import deepseek_v2
from tests.trainer.small import small_config

MODEL = deepseek_v2(num_experts=8, num_groups=4, num_layers=2)
State = dict[str, list[Tensor]]


class Member:
    """A rank whose masters are no ties, so that both precisions compute with the same weights."""

    def __init__(self, mesh: str, rank: int, root: Path, precision: str, first_moment: str = "auto") -> None:
        self.config = small_config(
            root, model=MODEL, mesh=mesh_of(mesh), precision=PrecisionConfig(precision, first_moment),
            optimizer=OptimizerConfig(kind="adamw", lr=1e-2), global_batch_size=8,
        )  # fmt: skip
        self.runtime = join(self.config.mesh, rank, rank, torch.device("cpu"))
        self.backend = NativeBackend.build(self.config, self.runtime)
        for _, view in (part for entry in self.backend.local_entries().values() for part in entry.parts):
            view.copy_(without_ties(whole(view)))
        self.optimizer = Optimizer(
            self.config.optimizer, self.backend.parameters, self.backend.specs, self.backend.ops.adamw,
            self.backend.copies, self.backend.remainders,
            precision_of(self.config, self.runtime.device).first_moment,
        )  # fmt: skip
        self.scalars: tuple[float, float] = (0.0, 0.0)
        self.dtypes: set[torch.dtype] = set()

    def step(self) -> Member:
        """One update with clipping; norm and loss stay in `scalars`, dtypes of gradients in `dtypes`."""
        runtime, coordinates = self.runtime, self.config.mesh.data_ranks
        batch = Loader(
            self.config, open_data(self.config, None), runtime.data_coordinate, coordinates, 0
        ).read(0)
        mine = torch.tensor(batch.target_tokens if runtime.counts_samples else 0)
        sums = self.backend.forward_backward(batch, runtime.sum_world(mine))
        self.dtypes = {local(p.grad).dtype for p in self.backend.parameters.values() if p.grad is not None}
        norm, loss = self.backend.norm_and_loss(sums.loss)
        self.scalars = float(norm), float(loss)
        self.optimizer.step(1e-2, (0.5 / norm).float(), torch.zeros(()))
        return self

    def state(self) -> State:
        """Everything that this rank would save."""
        held = collect(self.backend, self.optimizer.moments)
        return {name: [whole(view).clone() for _, view in s.boxes] for name, s in held.items()}

    def save(self, run: Path) -> None:
        """Checkpoint 1 of a run."""
        moments = self.optimizer.moments
        save(self.config, run, 1, 1, self.backend, moments, {"step": 1}, self.runtime, None)

    def load(self, run: Path) -> State:
        """Everything that this rank has then."""
        found = find(self.config, run, self.runtime, self.backend)
        assert found is not None
        load(found, self.config, self.backend, self.optimizer.moments, self.runtime, None)
        return self.state()


def without_ties(x: Tensor) -> Tensor:
    """The numbers with a lower half that is none."""
    return ((x.view(torch.int32) & -0x10000) | 0x1234).view(torch.float32)


def equal(a: State, b: State) -> bool:
    """Whether two states are the same bit by bit."""
    pairs = [(x, y) for name in a for x, y in zip(a[name], b[name], strict=True)]
    return a.keys() == b.keys() and all(x.dtype == y.dtype and torch.equal(x, y) for x, y in pairs)


def is_rounded(view: Halves) -> bool:
    """Whether what computes is `master.bfloat16()` wherever the master is no tie."""
    plain = view.low != -0x8000
    return torch.equal(view.high[plain], whole(view).bfloat16()[plain])


def both(mesh: str, rank: int, root: Path) -> dict[str, Any]:
    """A step in both precisions, and each one's checkpoint in the other's hands; a body of ranks."""
    master, split = (Member(mesh, rank, root, name).step() for name in ("master", "split"))
    views = [view for e in split.backend.local_entries().values() for _, view in e.parts]
    found: dict[str, Any] = {
        "step": equal(split.state(), master.state()) and split.scalars == master.scalars,
        "dtypes": split.dtypes == master.dtypes == {torch.float32},
        "rounded": all(is_rounded(view) for view in views if isinstance(view, Halves)),
        "wide": {str(view.dtype) for view in views} == {"torch.float32"},
    }
    for saver, name in ((master, "split"), (split, "master")):
        saver.save(root / f"{mesh}.{name}")
        loaded = Member(mesh, rank, root, name).load(root / f"{mesh}.{name}")
        found[f"to {name}"] = equal(loaded, saver.state())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adapter, "_keep_wide", lambda group: None)
        bare = Member(mesh, rank, root, "split").step()
        found["without"] = equal(bare.state(), master.state())
    return found | {"scalars": split.scalars}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all ranks save."""
    return tmp_path_factory.mktemp("split")


def check(meshes: list[str], root: Path) -> None:
    """Every mesh, on every rank; its checkpoint on one rank; norm and loss as on one rank."""
    results = visit({mesh: mesh_of(mesh) for mesh in meshes}, both, root)
    alone = Member("single", 0, root, "split").step().scalars
    for mesh in meshes:
        for found in (of_rank[mesh] for of_rank in results if mesh in of_rank):
            failed = {name for name, value in found.items() if value is False}
            assert failed == (set() if mesh.startswith("pp2") and "ep" not in mesh else {"without"}), mesh
            assert found["scalars"] == pytest.approx(alone, rel=1e-3), mesh
        for precision in ("master", "split"):
            run = root / f"{mesh}.{precision}"
            flatten(step_path(run, 1), run / "flat.safetensors")
            flat = load_file(run / "flat.safetensors")
            loaded = Member("single", 0, root, precision).load(run)
            assert equal(loaded, {name: [tensor] for name, tensor in flat.items()})


def test_split_equals_master_on_two_ranks(root: Path) -> None:
    """From masters without ties: gradients, norm, moments and masters of a step, bitwise.

    What computes differs from a rounded master at ties alone. A checkpoint of either goes on in the other, on
    that mesh and on one rank. Reduced gradients that are cast to the parameters' dtype are found out.
    """
    check(["dp2"], root)


@pytest.mark.slow
def test_split_equals_master_on_other_meshes(root: Path) -> None:
    """Replicas, shares of experts and of positions, stages; the mutation where gradients are reduced."""
    check(["pp2", "ep2", "rep2", "cp2", "pp2ep2"], root)


def test_a_first_moment_changes_its_dtype_on_resume(root: Path) -> None:
    """`precision.first_moment` may differ: what fp32 had is rounded once, what bf16 had is kept."""
    wide, narrow = (Member("single", 0, root, "split", name).step() for name in ("auto", "bf16"))
    for name, m in wide.optimizer.moments["exp_avg"].items():
        assert torch.equal(m.bfloat16(), narrow.optimizer.moments["exp_avg"][name])
    wide.save(root / "wide")
    narrow.save(root / "narrow")
    rounded = Member("single", 0, root, "master", "bf16").load(root / "wide")
    assert equal(rounded, narrow.state())
    widened = Member("single", 0, root, "split").load(root / "narrow")
    for name, (box,) in narrow.state().items():
        assert torch.equal(widened[name][0], box.to(widened[name][0].dtype))
    assert widened["model.norm.weight::exp_avg"][0].dtype == torch.float32
