"""Masters on one rank: what the model computes with and what the update is on (MOD-4, ENG-15)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from src.config import Config, PrecisionConfig
from src.kernels.adamw import Adam, adamw
from src.kernels.halves import split
from src.launchers.memory import rank_memory
from src.trainer.backends.native import NativeBackend
from src.trainer.data.batch import StepBatch
from src.trainer.data.corpus import open_data
from src.trainer.data.keys import data_key
from src.trainer.data.loader import Loader
from src.trainer.optimizer import Optimizer
from src.trainer.parallel.halves import whole
from src.trainer.parallel.precision import precision_of
from src.trainer.runtime import start
from tests.trainer.small import lines, run_here, small_config


def master_config(tmp_path: Path, **changes: object) -> Config:
    return small_config(tmp_path, precision=PrecisionConfig(name="master"), **changes)


def begin(config: Config) -> tuple[NativeBackend, StepBatch]:
    """A backend, and its first batch."""
    backend = NativeBackend.build(config, start(config))
    return backend, Loader(config, open_data(config, data_key(config)), 0, 1, 0).read(0)


def gradients(backend: NativeBackend, batch: StepBatch, n_tokens: int) -> dict[str, Tensor]:
    """Gradients of the masters, which are let go."""
    backend.forward_backward(batch, torch.tensor(n_tokens))
    found = {name: p.grad for name, p in backend.parameters.items() if p.grad is not None}
    for parameter in backend.parameters.values():
        parameter.grad = None
    return found


def test_eng_15_micro_batches_are_summed_in_fp32(tmp_path: Path) -> None:
    """Bitwise the sum of what each micro-batch gives alone; sums in bf16 are others."""
    config = master_config(tmp_path)
    backend, batch = begin(config)
    together = gradients(backend, batch, batch.target_tokens)
    assert {g.dtype for g in together.values()} == {torch.float32}
    one = replace(config, global_batch_size=1)
    single = NativeBackend.build(one, start(one))
    apart = [gradients(single, StepBatch((m,), epoch=0), batch.target_tokens) for m in batch.micro_batches]
    wide = {name for name, p in single.parameters.items() if name not in single.copies}
    assert {name for name in wide if "gate" not in name} == set()
    for name, total in together.items():
        parts = [g[name] for g in apart]
        assert all(p.dtype == (torch.float32 if name in wide else torch.bfloat16) for p in parts)
        assert torch.equal(total, sum((p.float() for p in parts), torch.zeros(()))), name
    assert any(
        not torch.equal(total, (apart[0][name] + apart[1][name] + apart[2][name]).float())
        for name, total in together.items()
        if name not in wide
    )


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_copies_follow_every_update(tmp_path: Path, kind: str) -> None:
    """Bitwise the masters, rounded; small updates stay in the masters when they are lost in the copies."""
    config = master_config(tmp_path)
    config.optimizer.kind = kind
    backend, batch = begin(config)
    optimizer = Optimizer(config.optimizer, backend.parameters, backend.specs, copies=backend.copies)
    backend.forward_backward(batch, torch.tensor(batch.target_tokens))
    before = {name: p.detach().clone() for name, p in backend.parameters.items()}
    optimizer.step(1e-6, None, torch.zeros(()))
    copies = backend.copies
    assert copies
    assert all(torch.equal(copy, backend.parameters[name].bfloat16()) for name, copy in copies.items())
    moved = [name for name in copies if not torch.equal(before[name], backend.parameters[name])]
    assert any(torch.equal(copies[name], before[name].bfloat16()) for name in moved)


def test_a_load_reaches_what_the_model_computes_with(tmp_path: Path) -> None:
    """The held-out loss after weights were written from outside is that of these weights."""
    backend, batch = begin(master_config(tmp_path))
    before = float(backend.evaluate(batch.micro_batches[0]))
    for entry in backend.local_entries().values():
        for _, view in entry.parts:
            view.zero_()
    after = float(backend.evaluate(batch.micro_batches[0]))
    labels = int((batch.micro_batches[0].labels_BS != -100).sum())
    assert after == pytest.approx(labels * torch.tensor(97.0).log().item(), rel=1e-3)
    assert after != before


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["master", "split", "bf16"])
def test_it_trains_and_goes_on(tmp_path: Path, precision: str) -> None:
    """A run of six steps equals one of three that goes on, bitwise; its loss falls."""
    config = small_config(tmp_path, precision=PrecisionConfig(name=precision))
    config.optimizer.kind, config.optimizer.lr, config.lr_schedule.horizon = "adamw", 1e-2, 6
    run_here(config, tmp_path / "whole")
    run_here(replace(config, max_steps=3), tmp_path / "parts")
    run_here(config, tmp_path / "parts", attempt=2)
    whole, parts = ([line["loss"] for line in lines(tmp_path / name)] for name in ("whole", "parts"))
    assert whole == parts
    assert whole[-1] < whole[0]


def away_from_zero(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, copy: Tensor | None, decay: float, adam: Adam, low: object
) -> None:
    """`adamw`, with the copy rounded as the upper half of a split master is."""
    assert low is None
    adamw(p, g, m, v, None, decay, adam)
    if copy is not None:
        copy.copy_(split(p)[0])


@pytest.mark.parametrize(("kind", "steps"), [("adamw", 3), ("sgd", 1)])
def test_split_steps_are_those_of_masters(tmp_path: Path, kind: str, steps: int) -> None:
    """OP-4: masters and losses are bitwise those of `master`, so long as its copies take ties likewise.

    The copies of SGD are rounded by torch, so that its second step may differ.
    """
    states, losses = [], []
    for precision in ("master", "split"):
        config = small_config(tmp_path, precision=PrecisionConfig(name=precision))
        config.optimizer.kind, config.optimizer.momentum = kind, 0.9
        backend, batch = begin(config)
        for _, view in (part for entry in backend.local_entries().values() for part in entry.parts):
            view.copy_(whole(view).bfloat16().float())  # No ties at the start.
        rule = away_from_zero if precision == "master" else adamw
        optimizer = Optimizer(
            config.optimizer, backend.parameters, backend.specs, rule, backend.copies, backend.remainders
        )
        for _ in range(steps):
            losses.append(float(backend.forward_backward(batch, torch.tensor(batch.target_tokens)).loss))
            optimizer.step(1e-2, torch.tensor(0.5), torch.zeros(()))
        if kind == "adamw":
            losses.append(float(backend.evaluate(batch.micro_batches[0])))
        states.append([whole(view) for e in backend.local_entries().values() for _, view in e.parts])
    half = len(losses) // 2
    assert losses[:half] == losses[half:]
    assert len(set(losses)) == half
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))


BYTES = {
    ("master", "auto"): (2 + 4, 2, 4, 4),
    ("split", "auto"): (2 + 2, 2, 4, 4),
    ("master", "bf16"): (2 + 4, 2, 2, 4),
    ("split", "bf16"): (2 + 2, 2, 2, 4),
    ("bf16", "auto"): (2, 2, 2, 2),
}
"""Precision and dtype of the first moment → bytes a parameter of weight and master, gradient, m, v."""


@pytest.mark.parametrize(("precision", "first_moment"), BYTES)
def test_perf_4_bytes_of_a_parameter(tmp_path: Path, precision: str, first_moment: str) -> None:
    """16, 14, 14, 12 and 8 with one micro-batch, by the storages that are there; the plan says the same.

    A router, which computes in fp32, is its own master: 4 bytes, and as many of a gradient.
    """
    config = small_config(tmp_path, precision=PrecisionConfig(precision, first_moment), global_batch_size=1)
    config.optimizer.kind = "adamw"
    backend, batch = begin(config)
    optimizer = Optimizer(
        config.optimizer, backend.parameters, backend.specs, copies=backend.copies,
        remainders=backend.remainders, first_moment=precision_of(config, torch.device("cpu")).first_moment,
    )  # fmt: skip
    backend.forward_backward(batch, torch.tensor(batch.target_tokens))
    names = [n for n in backend.parameters if not backend.specs[n].wide]
    held = [backend.parameters, backend.copies, backend.remainders]
    gradients = {n: backend.parameters[n].grad for n in names}
    first, second = optimizer.moments["exp_avg"], optimizer.moments["exp_avg_sq"]
    count = sum(backend.parameters[n].numel() for n in names)
    found = [storages([t[n] for t in part for n in names if n in t]) for part in (held, [gradients])]
    found += [storages([moment[n] for n in names]) for moment in (first, second)]
    assert [size / count for size in found] == list(BYTES[precision, first_moment])
    plan, wide = rank_memory(config, 0, "cpu"), [n for n in backend.specs if backend.specs[n].wide]
    whole = [storages([t[n] for t in part for n in wide if n in t]) for part in (held, [first, second])]
    whole.append(storages([backend.parameters[n].grad for n in wide]))
    assert plan.weights == found[0] + whole[0]
    assert plan.optimizer == found[2] + found[3] + whole[1]
    assert plan.gradients == found[1] + whole[2]


def storages(tensors: list[Tensor | None]) -> int:
    """Bytes of the different storages of tensors."""
    kept = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t is not None}
    return sum(kept.values())


def test_bf16_states_sum_in_fp32(tmp_path: Path) -> None:
    """Parameters and gradients are bf16, what is summed over tokens and layers is not."""
    backend, batch = begin(small_config(tmp_path, precision=PrecisionConfig(name="bf16")))
    sums = backend.forward_backward(batch, torch.tensor(batch.target_tokens))
    assert {p.dtype for p in backend.parameters.values()} == {torch.bfloat16}
    assert {p.grad.dtype for p in backend.parameters.values() if p.grad is not None} == {torch.bfloat16}
    assert sums.loss.dtype == sums.aux.dtype == torch.float32
    assert backend.copies == {}
