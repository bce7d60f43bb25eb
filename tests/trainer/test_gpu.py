"""One GPU: the whole step against fp64, what a compiled layer computes, and what a step waits for."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from src.code_identity import CHECKOUT
from src.config import (
    BackendConfig,
    BalanceConfig,
    Config,
    KernelsConfig,
    PipelineConfig,
    PlatformConfig,
    PrecisionConfig,
    RecomputeConfig,
)
from src.trainer.backends.native import NativeBackend
from src.trainer.data.corpus import open_data
from src.trainer.data.keys import data_key
from src.trainer.data.loader import Loader
from src.trainer.loop import build
from src.trainer.optimizer import Optimizer
from src.trainer.parallel.halves import whole
from src.trainer.runtime import start
from src.trainer.step import train_step
from src.trainer.stop import StopRequest
from tests.models.tools import relative
from tests.trainer.small import lines, run_here, small_config

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    """The compiler counts the forms of a function in a process against a limit; each test is one run."""
    torch._dynamo.reset()


def config_of(tmp_path: Path, precision: str, **changes: Any) -> Config:
    """A model whose widths every CUDA kernel takes; balance and z-loss on."""
    config = small_config(
        tmp_path,
        precision=PrecisionConfig(name=precision),
        balance=BalanceConfig(kind="sequence", coef=0.1, z_loss=0.01),
        **changes,
    )
    model = replace(
        config.model,
        hidden_size=64, expert_size=32, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32,
        num_experts=8, num_groups=1, groups_kept=1, top_k=2, vocab_size=128,
    )  # fmt: skip
    return replace(config, model=model, sequence_length=64, global_batch_size=4, micro_batch_size=2)


def step_of(config: Config) -> dict[str, torch.Tensor]:
    """Loss, norm and every gradient of a first step."""
    runtime = start(config)
    backend = NativeBackend.build(config, runtime)
    batch = Loader(config, open_data(config, data_key(config)), 0, 1, 0).read(0)
    sums = backend.forward_backward(batch, torch.tensor(batch.target_tokens, device=runtime.device))
    found = {"loss": sums.loss, "norm": backend.norm_and_loss(sums.loss)[0]}
    found |= {name: p.grad for name, p in backend.parameters.items() if p.grad is not None}
    runtime.close()
    return {name: tensor.detach().double().cpu() for name, tensor in found.items()}


@pytest.mark.parametrize("precision", ["fp64", "fp32"])
@pytest.mark.parametrize("kernels", ["eager", "auto"])
def test_law_1_a_gpu_computes_what_a_cpu_does(tmp_path: Path, precision: str, kernels: str) -> None:
    """T-2: loss, norm and every gradient of one step."""
    here = config_of(
        tmp_path, precision, kernels=KernelsConfig(name=kernels), backend=BackendConfig(compile="none")
    )
    there = replace(here, platform=PlatformConfig(name="cpu"), kernels=KernelsConfig(name="eager"))
    ours, theirs = step_of(here), step_of(there)
    assert ours.keys() == theirs.keys()
    limit = 1e-10 if precision == "fp64" else 1e-4
    assert all(relative(ours[name], theirs[name]) < limit for name in theirs)


@pytest.mark.parametrize("precision", ["master", "bf16"])
@pytest.mark.parametrize("mode", ["plain", "staged", "stage", "full"])
def test_compiled_layers_equal_eager_ones(tmp_path: Path, precision: str, mode: str) -> None:
    """CMP-4, ENG-10: against fp64, a compiled step is no worse than twice an eager one, balance included."""
    recompute = RecomputeConfig(mode if mode in ("stage", "full") else "none")
    program = PipelineConfig(program=mode if recompute.name == "none" else "auto")
    config = config_of(tmp_path, precision, recompute=recompute, pipeline=program)
    exact = step_of(
        replace(config, precision=PrecisionConfig(name="fp64"), backend=BackendConfig(compile="none"))
    )
    eager = step_of(replace(config, backend=BackendConfig(compile="none")))
    found = step_of(replace(config, backend=BackendConfig(compile="layers")))
    assert found.keys() == eager.keys() == exact.keys()
    for name in exact:
        assert relative(found[name], exact[name]) <= 2 * relative(eager[name], exact[name]) + 1e-2, name


@pytest.mark.parametrize(("precision", "first_moment"), [("master", "auto"), ("split", "bf16")])
def test_a_run_trains_in_bf16_with_masters(tmp_path: Path, precision: str, first_moment: str) -> None:
    """The loop, its checkpoint and its record of kernels, on the device and compiled."""
    config = config_of(tmp_path, precision, max_steps=12)
    config.precision.first_moment = first_moment
    config.platform.name, config.optimizer.kind, config.optimizer.lr = "cuda", "adamw", 1e-2
    run_here(config, tmp_path / "run")
    losses = [line["loss"] for line in lines(tmp_path / "run")]
    assert losses[-1] < losses[0]
    chosen = json.loads((tmp_path / "run" / "kernels.json").read_text())["operations"]["grouped_mm"]["choice"]
    assert chosen in ("quack", "torch_grouped_mm_cuda")  # Whether QuACK is installed is the machine's.
    run_here(replace(config, max_steps=14), tmp_path / "run", attempt=2)
    assert [line["step"] for line in lines(tmp_path / "run")][-2:] == [13, 14]


def test_op_4_a_step_in_halves_is_that_of_masters(tmp_path: Path) -> None:
    """From weights that both precisions round alike: one loss, and with one gradient the same masters."""
    sides = []
    for precision in ("master", "split"):
        config = config_of(tmp_path, precision)
        config.optimizer.kind = "adamw"
        runtime = start(config)
        backend = NativeBackend.build(config, runtime)
        batch = Loader(config, open_data(config, data_key(config)), 0, 1, 0).read(0)
        for _, view in (part for entry in backend.local_entries().values() for part in entry.parts):
            view.copy_(whole(view).bfloat16().float())
        optimizer = Optimizer(
            config.optimizer, backend.parameters, backend.specs, backend.ops.adamw, backend.copies,
            backend.remainders,
        )  # fmt: skip
        loss = backend.forward_backward(batch, torch.tensor(batch.target_tokens, device="cuda")).loss
        sides.append((backend, optimizer, loss))
        runtime.close()
    (ours, _, first), (theirs, _, second) = sides
    assert torch.equal(first, second)
    for name, parameter in ours.parameters.items():  # cuDNN's backward does not give the same bits twice.
        assert parameter.grad is not None
        assert theirs.parameters[name].grad is not None
        theirs.parameters[name].grad = parameter.grad.clone()
    found = []
    for backend, optimizer, loss in sides:
        norm = backend.norm_and_loss(loss)[0]
        optimizer.step(1e-3, 0.5 / norm, torch.zeros((), device="cuda"))
        masters = [whole(view) for e in backend.local_entries().values() for _, view in e.parts]
        found.append([norm, *masters])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


MODES = [("master", "none"), ("master", "full"), ("split", "none")]


@pytest.mark.parametrize(("precision", "recompute"), MODES)
def test_bench_5_a_warm_step_waits_for_nothing(tmp_path: Path, precision: str, recompute: str) -> None:
    """MOE-5, ENG-8: `torch.cuda.set_sync_debug_mode("error")` around steps that do not log."""
    config = config_of(tmp_path, precision, recompute=RecomputeConfig(recompute))
    config.optimizer.kind, config.optimizer.lr = "adamw", 1e-3
    directory = tmp_path / "run"
    (directory / "control").mkdir(parents=True)
    runtime = start(config)
    run = build(config, directory, 1, runtime, StopRequest(directory / "control"))
    with Loader(config, run.data, 0, 1, 0) as loader:
        for _ in range(10):  # Samples with and without pads are compiled apart.
            train_step(run, loader, ())
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(3):
                train_step(run, loader, ())
        finally:
            torch.cuda.set_sync_debug_mode("default")
    runtime.close()


def losses_of(folder: Path, *overrides: str) -> list[float]:
    """Of three steps of a command."""
    words = ["data=synthetic", "data.ids=48", "model.num_layers=2", "sequence_length=32", "max_steps=3"]
    words += ["evaluation=none", "run_name=run", f"paths.runs={folder}"]
    done = subprocess.run(
        [sys.executable, "train.py", *words, *overrides], cwd=CHECKOUT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line)["loss"] for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("platform", ["cuda"])
def test_a_launch_whose_ranks_share_a_card(tmp_path: Path, platform: str) -> None:
    """`launcher.share_device`: two ranks over gloo train as one rank on a CPU does."""
    plain = ["precision=fp32", "kernels=eager"]
    both = ["mesh=ep2", "launcher.share_device=true", f"platform={platform}"]
    shared = losses_of(tmp_path / "ep2", *plain, *both)
    assert shared == pytest.approx(losses_of(tmp_path / "one", *plain, "platform=cpu"), rel=1e-4)


@pytest.mark.parametrize("platform", ["cuda"])
def test_det_1_two_bitwise_runs_have_the_same_losses(tmp_path: Path, platform: str) -> None:
    """DET-1, DET-5, DET-6: in the dtypes, kernels and compiled layers that a run takes by default."""
    words = ["determinism=bitwise", "debug.poison=true", f"platform={platform}"]
    first, second = (losses_of(tmp_path / name, *words) for name in "ab")
    assert first == second
