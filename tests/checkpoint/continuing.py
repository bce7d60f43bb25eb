"""Runs that save on one side and go on from there on another, all in two worlds of four ranks (CKPT-2)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from src.config import (
    BalanceConfig,
    CheckpointConfig,
    Config,
    DataConfig,
    LrScheduleConfig,
    OptimizerConfig,
    PipelineConfig,
    PrecisionConfig,
)
from src.trainer.checkpoint.contents import collect
from src.trainer.checkpoint.directory import step_path
from src.trainer.checkpoint.flat import flatten
from src.trainer.data.loader import Loader
from src.trainer.loop import build, run_steps, take_up, train
from src.trainer.metrics import Metrics
from src.trainer.parallel.rules import STAGES_PER_RANK
from src.trainer.runtime import join
from src.trainer.state import Run
from src.trainer.stop import StopRequest
from tests.checkpoint.groups import mesh_of, visit
from tests.models.odd import deepseek_v2
from tests.trainer.small import lines, small_config

SAVED, STEPS = 2, 5
"""Steps before the save, and in all."""
OPTIMIZERS = {
    "sgd": OptimizerConfig(kind="sgd", lr=0.3, momentum=0.9, max_norm=0.3),
    "adamw": OptimizerConfig(kind="adamw", lr=0.01, max_norm=0.3),
}


@dataclass(frozen=True)
class Side:
    """Where a run trains, and the experts of its model."""

    spec: str
    schedule: str = "1f1b"
    experts: int = 20

    def __str__(self) -> str:
        return f"{self.spec}.{self.schedule}.{self.experts}"


@dataclass(frozen=True)
class Pair:
    """What saves and what goes on."""

    saver: Side
    loader: Side
    optimizer: str
    forgets: str = ""
    """What is lost on the way, as a mutation: `moments` or `shares`."""

    def __str__(self) -> str:
        return f"{self.optimizer}.{self.saver}.{self.loader}{self.forgets}"


@dataclass(frozen=True)
class Outcome:
    """How far a run that went on is from the one that saved, on one rank."""

    wrong: list[str]
    """Names whose values after loading are not the saved ones, to the bit."""
    worst: float
    """Largest ‖x − ref‖ / ‖ref‖ of what the rank holds of anything saved, after the last step."""


def config(root: Path, side: Side, optimizer: str, **changes: Any) -> Config:
    """Packed samples in fp64, with everything on that has a state: moments, lagged shares, warm-up."""
    options: dict[str, Any] = {
        "mesh": mesh_of(side.spec),
        "pipeline": PipelineConfig(side.schedule, STAGES_PER_RANK[side.schedule][0]),
        "model": deepseek_v2(num_experts=side.experts, num_groups=side.experts // 2, num_layers=4),
        "data": DataConfig(kind="synthetic", rule="zipf", ids=97, documents=80),
        "optimizer": OPTIMIZERS[optimizer],
        "lr_schedule": LrScheduleConfig(kind="cosine", warmup=2, horizon=STEPS),
        "balance": BalanceConfig(kind="global_batch_lagged", coef=0.1, z_loss=0.01),
        "precision": PrecisionConfig(name="fp64"),
        "checkpoint": CheckpointConfig(every=SAVED, keep_last=9),
        "global_batch_size": 8,
        "max_steps": STEPS,
    }
    return small_config(root, **(options | changes))


def path_of(root: Path, optimizer: str, saver: Side) -> Path:
    """The directory of a run that saves."""
    return root / f"{optimizer}.{saver}"


def train_savers(root: Path, savers: Mapping[str, tuple[Side, str]], timeout: float) -> None:
    """Train each saver to the end."""
    visit(
        {name: mesh_of(side.spec) for name, (side, _) in savers.items()}, save, root, savers, timeout=timeout
    )


def save(name: str, rank: int, root: Path, savers: Mapping[str, tuple[Side, str]]) -> None:
    """A saver's run; a body of ranks."""
    side, optimizer = savers[name]
    settings, directory = config(root, side, optimizer), path_of(root, optimizer, side)
    (directory / "control").mkdir(parents=True, exist_ok=True)
    runtime = join(settings.mesh, rank, rank, torch.device("cpu"))
    train(settings, directory, 1, runtime, StopRequest(directory / "control"))


def train_loaders(root: Path, pairs: Mapping[str, Pair], timeout: float) -> list[dict[str, Outcome]]:
    """Go on with each pair; the outcomes by rank."""
    meshes = {name: mesh_of(pair.loader.spec) for name, pair in pairs.items()}
    return visit(meshes, go_on, root, pairs, timeout=timeout)


def go_on(name: str, rank: int, root: Path, pairs: Mapping[str, Pair]) -> Outcome:
    """Load what the saver left at `SAVED` and train to `STEPS`; a body of ranks."""
    pair = pairs[name]
    saver, directory = path_of(root, pair.optimizer, pair.saver), root / str(pair)
    (directory / "control").mkdir(parents=True, exist_ok=True)
    source = str(step_path(saver, SAVED))
    settings = config(root, pair.loader, pair.optimizer, resume=source, checkpoint=CheckpointConfig(every=0))
    runtime = join(settings.mesh, rank, rank, torch.device("cpu"))
    run = build(settings, directory, 1, runtime, StopRequest(directory / "control"))
    take_up(run)
    wrong = [name for name, gap in gaps(run, load_file(saver / f"{SAVED}.safetensors")) if gap]
    forget(run, pair.forgets)
    coordinates = settings.mesh.data_ranks
    with Loader(settings, run.data, runtime.data_coordinate, coordinates, run.step) as loader:
        run_steps(run, loader, Metrics(run), [])
    runtime.barrier()
    worst = max(gap for _, gap in gaps(run, load_file(saver / f"{STEPS}.safetensors")))
    return Outcome(wrong, worst)


def forget(run: Run, what: str) -> None:
    """Mutations: a part of the state that is not taken over."""
    if what == "moments":
        for tensors in run.optimizer.moments.values():
            for tensor in tensors.values():
                tensor.zero_()
    if what == "shares":
        for share in run.backend.extra_state().values():
            share.fill_(1 / share.numel())


def gaps(run: Run, wanted: dict[str, Tensor]) -> Iterable[tuple[str, float]]:
    """Name and ‖x − ref‖ / ‖ref‖ of what this rank holds of everything saved; infinite where ref is zero."""
    for name, shards in collect(run.backend, run.optimizer.moments).items():
        whole, total = wanted[name], 0.0
        for offsets, view in shards.boxes:
            span = tuple(slice(o, o + s) for o, s in zip(offsets, view.shape, strict=True))
            total += float((view - whole[span]).double().square().sum())
        size = float(whole.double().norm())
        yield name, total**0.5 / size if size else float("inf") * total if total else 0.0


def curve(directory: Path) -> list[float]:
    """Loss and norm of the last steps of a run."""
    found = lines(directory)[SAVED - STEPS :]
    return [line[key] for line in found for key in ("loss", "grad_norm", "aux_loss")]


def write_flat(root: Path, savers: Iterable[tuple[Side, str]]) -> None:
    """Full tensors of each saver at both steps."""
    for side, optimizer in savers:
        run = path_of(root, optimizer, side)
        for step in (SAVED, STEPS):
            flatten(step_path(run, step), run / f"{step}.safetensors")
