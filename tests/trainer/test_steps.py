"""What the loop makes of bad steps, where it reads the device and what it holds on to."""

from __future__ import annotations

import gc
import json
import math
import os
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from src.config import (
    BalanceConfig,
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    KernelsConfig,
    LrScheduleConfig,
    OptimizerConfig,
    PrecisionConfig,
    SpikeConfig,
)
from src.errors import UserError
from src.trainer import loop as loop_module
from src.trainer import step as step_module
from src.trainer.backends.native import NativeBackend, Sums
from src.trainer.callbacks import checkpointing
from src.trainer.data.batch import MicroBatch
from src.trainer.data.corpus import open_data
from src.trainer.data.loader import Loader
from src.trainer.data.packed import Packed
from src.trainer.metrics import Metrics
from src.trainer.optimizer import clip_factor
from src.trainer.parallel.balance import LayerBalance
from src.trainer.stop import Agreement
from src.trainer.worker import exit_code
from tests.trainer.small import lines, poison, run_here, small_config


def test_the_launching_process_decides_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law 3: the key of `code.json` is the one that is opened; without the file it is computed."""
    (tmp_path / "code.json").write_text(json.dumps({"commit": None, "data_key": "written"}))
    config = small_config(tmp_path, data=DataConfig())
    monkeypatch.setattr(loop_module, "data_key", lambda config: "computed")
    asked: list[str | None] = []

    def opened(config: Any, key: str | None = None) -> None:
        asked.append(key)
        raise UserError("far enough")

    monkeypatch.setattr(loop_module, "open_data", opened)
    for directory in (tmp_path, tmp_path / "none"):
        with pytest.raises(UserError, match="far enough"):
            run_here(config, directory)
    assert asked == ["written", "computed"]


@pytest.mark.parametrize("nonfinite", ["stop", "skip"])
def test_a_step_without_any_target_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nonfinite: str
) -> None:
    """EVAL-4: step and samples are named, also where bad steps are skipped; a sample without is no matter."""
    config = small_config(tmp_path, nonfinite=nonfinite, max_steps=4)
    loader = Loader(config, open_data(config), 0, 1, 0)
    samples = {step: [m.samples[0] for m in loader.read(step - 1).micro_batches] for step in (2, 4)}
    empty = {*samples[4], samples[2][0]}
    read = Packed.micro_batch

    def without(packed: Packed, chosen: Sequence[int]) -> MicroBatch:
        batch = read(packed, chosen)
        if not empty.issuperset(chosen):
            return batch
        return replace(batch, labels_BS=torch.full_like(batch.labels_BS, -100), target_tokens=0)

    monkeypatch.setattr(Packed, "micro_batch", without)
    with pytest.raises(UserError, match=rf"step 4, samples {', '.join(map(str, samples[4]))} of ") as caught:
        run_here(config, tmp_path / "bad")
    assert caught.value.code == 4
    assert [line["skipped"] for line in lines(tmp_path / "bad")] == [False, False, False, True]


def test_held_out_samples_without_any_target_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EVAL-4: the held-out side too is named, where its loss would be 0/0."""
    read = Packed.micro_batch

    def without(packed: Packed, chosen: Sequence[int]) -> MicroBatch:
        batch = read(packed, chosen)
        return replace(batch, labels_BS=torch.full_like(batch.labels_BS, -100), target_tokens=0)

    monkeypatch.setattr(Packed, "micro_batch", without)
    heldout = EvaluationConfig(name="heldout", samples=2)
    with pytest.raises(
        UserError, match="no target in the held-out samples of synthetic zipf, heldout"
    ) as none:
        run_here(small_config(tmp_path, evaluation=heldout), tmp_path / "run")
    assert none.value.code == 4


@pytest.mark.parametrize("kind", ["global_batch_lagged", "bias"])
def test_what_a_skipped_step_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """ENG-25, ENG-27, LOG-1: data moves on and is counted, lagged shares and bias stay; speed is tokens/s."""
    shares: dict[int, list[torch.Tensor]] = {}

    honest = NativeBackend.norm_and_loss

    def witness(backend: NativeBackend, loss: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shares[len(shares)] = [share.clone() for share in backend.extra_state().values()]
        return honest(backend, loss)

    monkeypatch.setattr(NativeBackend, "norm_and_loss", witness)
    poison(monkeypatch, {1: (math.nan, 0.0)})
    balance = BalanceConfig(kind=kind)
    run_here(small_config(tmp_path, nonfinite="skip", max_steps=4, balance=balance), tmp_path / "run")
    found = lines(tmp_path / "run")
    assert [line["skipped"] for line in found] == [False, True, False, False]
    total = 0
    for line in found:
        total += line["tokens"]
        assert line["tokens_total"] == total
    assert found[3]["tokens_per_s"] == pytest.approx(found[3]["tokens"] / found[3]["step_time"])
    assert not torch.equal(shares[1][0], shares[0][0])
    assert all(map(torch.equal, shares[2], shares[1]))
    assert not torch.equal(shares[3][0], shares[2][0])


@pytest.mark.parametrize("share", [0.25, 4.0])
def test_the_update_is_as_long_as_clipping_leaves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    """ENG-7: a step of SGD moves the weights by lr · min(norm, max_norm) in all."""
    kept: list[Any] = []
    honest = NativeBackend.norm_and_loss

    def keep(backend: NativeBackend, loss: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        norm, whole = honest(backend, loss)
        kept.extend([backend, float(norm), {n: p.detach().clone() for n, p in backend.parameters.items()}])
        return norm, whole

    def clip(norm: torch.Tensor, max_norm: float) -> torch.Tensor | None:
        return clip_factor(norm, share * float(norm))

    monkeypatch.setattr(NativeBackend, "norm_and_loss", keep)
    monkeypatch.setattr(step_module, "clip_factor", clip)
    sgd = OptimizerConfig(kind="sgd", lr=0.3, momentum=0.0, weight_decay=0.0, max_norm=1.0)
    config = small_config(tmp_path, optimizer=sgd, lr_schedule=LrScheduleConfig(kind="constant"), max_steps=1)
    config.lr_schedule.warmup = 0
    run_here(replace(config, precision=PrecisionConfig(name="fp64")), tmp_path / "run")
    backend, norm, before = kept
    moved = torch.stack([(p.detach() - before[n]).norm() for n, p in backend.parameters.items()]).norm()
    assert float(moved) == pytest.approx(0.3 * min(1.0, share) * norm, rel=1e-4)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (dist.DistNetworkError("closed"), 6),
        (dist.DistBackendError("timed out"), 6),
        (UserError("no", code=8), 8),
        (KeyboardInterrupt(), 130),
        (SystemExit(5), 5),
        (SystemExit("text"), 1),
        (ValueError("x"), 1),
    ],
)
def test_the_code_of_an_error(error: BaseException, code: int) -> None:
    """EXIT: a collective that fails is 6, a refusal its own code, everything else 1."""
    assert exit_code(error) == code


def test_an_infinite_loss_is_seen_though_the_gradients_are_finite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ENG-27: the step looks at the loss too."""
    forward_backward = NativeBackend.forward_backward

    def infinite(backend: NativeBackend, *arguments: Any) -> Sums:
        sums = forward_backward(backend, *arguments)
        return replace(sums, loss=sums.loss + math.inf)

    monkeypatch.setattr(NativeBackend, "forward_backward", infinite)
    with pytest.raises(UserError, match="not finite at step 1") as caught:
        run_here(small_config(tmp_path, max_steps=1), tmp_path / "run")
    assert caught.value.code == 7


def test_auxiliary_losses_are_means_over_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ENG-24, LOG-1: a layer's even routing is 1, and so is the value of two such layers."""
    monkeypatch.setattr(LayerBalance, "auxiliary", even_unit)
    run_here(small_config(tmp_path, max_steps=1), tmp_path / "run")
    assert lines(tmp_path / "run")[0]["aux_loss"] == pytest.approx(1, rel=1e-6)


def even_unit(balance: LayerBalance, scores_TE: Any, routed_UE: Any, top_k: int) -> torch.Tensor:
    """Σ_j n_j / N_tok of a micro-batch, as if every expert were used alike."""
    weights: torch.Tensor = balance.unit.weights(by_sequence=True)
    return weights.sum()


def test_metrics_are_on_disk_before_a_checkpoint_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LOG-3: a run that is killed right after a save has the lines of all the steps it holds."""
    seen = []

    def save(**keywords: Any) -> None:
        seen.append((keywords["step"], len(lines(tmp_path / "run")), keywords["scalars"]["tokens_total"]))

    monkeypatch.setattr(checkpointing, "save", save)
    config = small_config(tmp_path, checkpoint=CheckpointConfig(every=2))
    config.logger.flush_every = 100
    run_here(config, tmp_path / "run")
    totals = [line["tokens_total"] for line in lines(tmp_path / "run")]
    assert seen == [(2, 2, totals[1]), (4, 4, totals[3]), (6, 6, totals[5])]


@pytest.mark.slow
def test_memory_is_flat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ENG-30: after sixty steps with twenty saves as many live tensors and as much memory as after twelve."""
    found: dict[int, tuple[int, int]] = {}

    def flush(metrics: Metrics, flush: Any = Metrics.flush) -> Any:
        written = flush(metrics)
        gc.collect()
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        found[written[-1]["step"]] = (
            sum(isinstance(o, torch.Tensor) for o in gc.get_objects()),
            resident,
        )
        return written

    monkeypatch.setattr(Metrics, "flush", flush)
    config = small_config(
        tmp_path, max_steps=60, global_batch_size=1, checkpoint=CheckpointConfig(every=3, keep_last=1)
    )
    config.data.prefetch = 1
    run_here(config, tmp_path / "run")
    assert abs(found[60][0] - found[12][0]) < 20
    assert found[60][1] - found[12][1] < 2**24


def test_without_a_final_checkpoint_only_a_stop_is_saved(tmp_path: Path) -> None:
    """CKPT-7: `checkpoint.final=false` leaves a finished run without weights; a stopped one keeps its own."""
    config = small_config(tmp_path, checkpoint=CheckpointConfig(every=0, final=False))
    assert not run_here(config, tmp_path / "whole")
    assert not list((tmp_path / "whole").glob("checkpoints/step-*"))
    assert run_here(config, tmp_path / "stopped", stop_after=2)
    assert list((tmp_path / "stopped").glob("checkpoints/step-*"))


def test_a_step_reads_nothing_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ENG-8: between flushes the step itself reads no tensor; on CPU the reference product reads offsets.

    Nor do the bias of routers and the spike guard (ENG-25, ENG-27).
    """
    readers: Counter[str] = Counter()

    def watch(name: str) -> None:
        original = getattr(torch.Tensor, name)

        def reading(tensor: torch.Tensor, *arguments: Any) -> Any:
            if threading.current_thread() is threading.main_thread():
                readers[Path(sys._getframe(1).f_code.co_filename).name] += 1
            return original(tensor, *arguments)

        monkeypatch.setattr(torch.Tensor, name, reading)

    def step(*arguments: Any, step: Any = loop_module.train_step) -> Any:
        before = readers.copy()
        result = step(*arguments)
        inside.update(readers - before)
        return result

    inside: Counter[str] = Counter()
    monkeypatch.setattr(loop_module, "train_step", step)
    for name in ("item", "tolist", "nonzero", "numpy", "__bool__", "__int__", "__float__", "__index__"):
        watch(name)
    config = small_config(
        tmp_path,
        kernels=KernelsConfig(name="eager"),
        balance=BalanceConfig(kind="bias"),
        spike=SpikeConfig(deviations=4.0, window=2),
    )
    run_here(replace(config, max_steps=2), tmp_path / "run")
    assert inside.pop("grouped_mm.py") > 0
    assert inside.pop("stop.py") == 2
    inside.pop("batch.py", None)  # Counts real tokens of the host's own batch.
    assert not inside


@pytest.mark.parametrize(
    ("device", "answers"),
    [("cpu", [False, True, False]), pytest.param("cuda", [False, False, True], marks=pytest.mark.gpu)],
)
def test_ranks_agree_on_the_step_after_which_they_stop(device: str, answers: list[bool]) -> None:
    """ENG-8, CKPT-10: any asker counts; a GPU answers one step late rather than waiting."""
    agreement = Agreement()
    assert [agreement.reached(torch.tensor(n, device=device)) for n in (0, 3, 0)] == answers
