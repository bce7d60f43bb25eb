"""Masters on one rank: what the model computes with and what the update is on (MOD-4, ENG-15)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from src.config import Config, PrecisionConfig
from src.trainer.backends.native import NativeBackend
from src.trainer.data.batch import StepBatch
from src.trainer.data.corpus import open_data
from src.trainer.data.keys import data_key
from src.trainer.data.loader import Loader
from src.trainer.optimizer import Optimizer
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


@pytest.mark.parametrize("precision", ["master", "bf16"])
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


def test_bf16_states_sum_in_fp32(tmp_path: Path) -> None:
    """Parameters and gradients are bf16, what is summed over tokens and layers is not."""
    backend, batch = begin(small_config(tmp_path, precision=PrecisionConfig(name="bf16")))
    sums = backend.forward_backward(batch, torch.tensor(batch.target_tokens))
    assert {p.dtype for p in backend.parameters.values()} == {torch.bfloat16}
    assert {p.grad.dtype for p in backend.parameters.values() if p.grad is not None} == {torch.bfloat16}
    assert sums.loss.dtype == sums.aux.dtype == torch.float32
    assert backend.copies == {}
