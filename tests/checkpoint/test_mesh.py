"""Any mesh to any mesh, with the real backend (CKPT-2, CKPT-5, CKPT-11)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from src.config import Config
from src.errors import UserError
from src.trainer.checkpoint.directory import read_meta
from src.trainer.runtime import Runtime, join
from tests.checkpoint.groups import mesh_of, visit

MESHES = {spec: mesh_of(spec) for spec in ("single", "ep2", "dp2", "rep2", "cp2", "pp2", "pp2ep2", "dp4")}
"""`dp4` puts 6 experts, and stacks of which no dimension divides, on 4 shards, the last one empty (ENG-2)."""


def _config(mesh: str) -> Config:
    from tests.checkpoint.fake import config

    settings = config(mesh=MESHES[mesh], balance__kind="global_batch_lagged")
    settings.run_name = mesh
    return settings


class Member:
    """A rank of a mesh with its backend and moments."""

    def __init__(self, mesh: str, runtime: Runtime) -> None:
        from src.trainer.backends.native import NativeBackend
        from src.trainer.optimizer import Optimizer

        self.config, self.runtime = _config(mesh), runtime
        self.backend = NativeBackend.build(self.config, runtime)
        self.moments = Optimizer(self.config.optimizer, self.backend.parameters, self.backend.specs).moments

    def save(self, run: Path, step: int, hook: Callable[[str], None] = lambda point: None) -> None:
        from src.trainer.checkpoint.save import save
        from tests.checkpoint.fake import fill

        fill(self.backend, self.moments, step)
        save(self.config, run, 1, step, self.backend, self.moments, {"step": step}, self.runtime, "key", hook)

    def load(self, run: Path) -> tuple[int, list[str]]:
        """Step that is taken and names whose values are not its."""
        from src.trainer.checkpoint.find import find
        from src.trainer.checkpoint.load import load
        from tests.checkpoint.fake import fill, wrong

        fill(self.backend, self.moments, float("nan"))
        found = find(self.config, run, self.runtime, self.backend)
        assert found is not None
        load(found, self.config, self.backend, self.moments, self.runtime, "key")
        return found.step, wrong(self.backend, self.moments, found.step)

    def init_from(self, path: Path) -> list[str]:
        """Parameters that are not as saved at step 1 after starting from `path`."""
        from src.trainer.checkpoint.weights import load_weights
        from tests.checkpoint.fake import wrong

        initial = load_weights(replace(self.config, init_from=str(path)), self.backend, self.runtime)
        extra = [f"extra.{name}" for name in self.backend.extra_state()]
        return initial + [name for name in wrong(self.backend, {}) if name not in extra]


def member_of(mesh: str, rank: int) -> Member:
    """This rank on a mesh."""
    return Member(mesh, join(MESHES[mesh], rank, rank, torch.device("cpu")))


def save_on(mesh: str, rank: int, directory: Path) -> None:
    """Step 1 on a mesh, in a run of its own; on some meshes, what goes wrong on one rank alone."""
    member = member_of(mesh, rank)
    member.save(directory / mesh, 1)
    if mesh == "pp2":
        member.save(directory / "damaged", 1)
        member.save(directory / "damaged", 2)
    if mesh == "ep2":
        with pytest.raises(UserError, match="disk full") as refused:
            member.save(directory / "ep2", 2, fail_on(1, member.runtime))
        assert refused.value.code == 1
        with (
            number_experts_locally(member),
            pytest.raises(RuntimeError, match=r"not those of the model.*experts\.3"),
        ):
            member.save(directory / "ep2", 3)
    if mesh == "rep2":
        with write_every_replica(), pytest.raises(RuntimeError, match="do not fill it"):
            member.save(directory / "rep2", 2)


def fail_on(rank: int, runtime: Runtime) -> Callable[[str], None]:
    """A hook that fails while that rank writes."""

    def hook(point: str) -> None:
        if point == "item" and runtime.rank == rank:
            raise OSError("disk full")

    return hook


@contextmanager
def number_experts_locally(member: Member) -> Iterator[None]:
    """Mutation: a rank names its experts by their place in its own stack, as one trainer did."""
    from src.models.names import canonical

    entries = member.backend.local_entries
    shift = 3 * member.runtime.rank

    def renamed(tensors: Any = None) -> Any:
        found = {}
        for name, entry in entries(tensors).items():
            expert = canonical(member.config.model)[name].expert
            found[name if expert is None else name.replace(f".{expert}.", f".{expert - shift}.")] = entry
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(member.backend, "local_entries", renamed)
        yield


@contextmanager
def write_every_replica() -> Iterator[None]:
    """Mutation: boxes are not left to the first rank that holds them."""
    from src.trainer.checkpoint import shards

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "_first_holders", lambda plans: plans)
        yield


def load_on(mesh: str, rank: int, directory: Path) -> dict[str, Any]:
    """On a mesh: load what each mesh saved, start from a flat file and from another mesh's checkpoint."""
    member = member_of(mesh, rank)
    found = {saved: member.load(directory / saved) for saved in MESHES}
    found |= {kind: member.load(directory / kind) for kind in DAMAGE}
    found["flat"] = (1, member.init_from(directory / "pp2ep2.safetensors"))
    found["checkpoint"] = (1, member.init_from(directory / "dp4" / "checkpoints" / "step-00000001"))
    return found


def flip(path: Path) -> None:
    """Change one bit in the middle."""
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "missing": lambda path: path.unlink(),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "empty": lambda path: path.write_bytes(b""),
    "flipped": flip,
}
"""What happens to a file that, on most meshes, one rank alone reads."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a run per mesh, runs whose newest step is damaged for one rank, and flat files."""
    from src.trainer.checkpoint.flat import flatten

    directory = tmp_path_factory.mktemp("meshes")
    visit(MESHES, save_on, directory)
    for mesh in MESHES:
        flatten(directory / mesh / "checkpoints" / "step-00000001", directory / f"{mesh}.safetensors")
    for kind, harm in DAMAGE.items():
        run = shutil.copytree(directory / "damaged", directory / kind)
        harm(run / "checkpoints" / "step-00000002" / "__1_0.distcp")
    return directory


@pytest.mark.slow
def test_files_depend_on_no_mesh_ckpt_13(saved: Path) -> None:
    """CKPT-13, CKPT-1: flat files of all meshes are equal to the byte, so names and tensors are."""
    first = (saved / "single.safetensors").read_bytes()
    assert len(first) > 50_000
    for mesh in MESHES:
        assert (saved / f"{mesh}.safetensors").read_bytes() == first, mesh


def test_every_rank_writes_its_own_and_replicas_nothing_ckpt_11(saved: Path) -> None:
    """CKPT-11: a file per rank of a replica, none of a second replica, experts spread over their owners."""
    writers = {"single": 1, "ep2": 2, "dp2": 2, "rep2": 1, "cp2": 2, "pp2": 2, "pp2ep2": 4, "dp4": 4}
    for mesh, count in writers.items():
        meta, _ = read_meta(saved / mesh / "checkpoints" / "step-00000001")
        assert sorted(meta.files) == sorted(
            [".metadata", *(f"__{rank}_0.distcp" for rank in range(count))]
        ), mesh
        if mesh in ("ep2", "dp2"):
            sizes = [info.bytes for name, info in meta.files.items() if name != ".metadata"]
            assert max(sizes) < 1.5 * min(sizes), (mesh, sizes)


def test_a_failure_of_one_rank_fails_all_ckpt_4(saved: Path) -> None:
    """CKPT-4: ep2's second save failed on one rank, was raised on both, and left nothing."""
    assert os.listdir(saved / "ep2" / "checkpoints") == ["step-00000001"]


@pytest.mark.slow
def test_any_mesh_to_any_mesh_ckpt_2(saved: Path) -> None:
    """CKPT-2, CKPT-5, CKPT-13: all pairs bitwise; a step damaged for one rank is passed over by all."""
    results = visit(MESHES, load_on, saved)
    seen: set[str] = set()
    for by_mesh in results:
        for mesh, found in by_mesh.items():
            seen.add(mesh)
            for source, (step, bad) in found.items():
                assert step == 1, (source, mesh)
                assert bad == [], (source, mesh, bad[:3])
    assert seen == set(MESHES)
