"""The loop in one process: resume, evaluation, stop, bad steps, what it writes."""

import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from src.compose import config_digest
from src.config import BalanceConfig, CheckpointConfig, DataConfig, EvaluationConfig, OptimizerConfig
from src.errors import UserError
from src.trainer.backends.native import NativeBackend
from src.trainer.checkpoint.flat import flatten
from src.trainer.worker import describe
from tests.models.odd import deepseek_v2, dense, qwen3_moe
from tests.trainer.small import lines, poison, run_here, small_config

TRACE = ("loss", "grad_norm", "lr", "aux_loss", "tokens", "tokens_total", "samples_total", "epoch")
LOG_1 = {
    *(
        "schema",
        "step",
        "attempt",
        "time",
        "loss",
        "aux_loss",
        "z_loss",
        "grad_norm",
        "lr",
        "tokens",
        "epoch",
    ),
    *(
        "tokens_total",
        "samples_total",
        "skipped",
        "skip_reason",
        "profiled",
        "step_time",
        "data_time",
        "tokens_per_s",
        "mfu",
    ),
    *("mem_peak_bytes", "bubble_s", "moe"),
}
EVAL_5 = {"step", "loss", "bits_per_byte", "frequencies", "pairs", "uniform", "tokens", "bytes"}
LOAD_4 = {
    *("step", "micro_batch", "split", "coordinate", "samples"),
    *("ids", "labels", "positions", "cu_seqlens", "documents"),
}


def trace(directory: Path) -> list[tuple[Any, ...]]:
    return [tuple(line[k] for k in TRACE) for line in lines(directory)]


def weights(directory: Path, step: int, out: Path) -> dict[str, torch.Tensor]:
    flatten(directory / "checkpoints" / f"step-{step:08d}", out)
    return load_file(out)


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_metrics_have_every_key_of_log_1(tmp_path: Path) -> None:
    """LOG-1, LOG-2: keys always present, tokens exact, loss near ln V at the first step."""
    run_here(small_config(tmp_path), tmp_path / "run")
    records = lines(tmp_path / "run")
    assert [r["step"] for r in records] == [1, 2, 3, 4, 5, 6]
    assert all(set(r) == LOG_1 for r in records)
    assert records[0]["loss"] == pytest.approx(math.log(97), abs=0.1)
    assert records[-1]["samples_total"] == 18
    assert records[-1]["tokens_total"] == sum(r["tokens"] for r in records)
    assert records[0]["tokens_per_s"] is None
    assert records[-1]["tokens_per_s"] > 0
    assert sum(records[0]["moe"]["layers"]["1"]["load"]) == pytest.approx(1, abs=1e-3)
    assert set(records[0]["moe"]["layers"]) == {"1", "2"}


def test_a_larger_max_steps_goes_on(tmp_path: Path) -> None:
    """RUN-2, CFG-19: with a set horizon a longer run continues the same curve."""
    config = small_config(tmp_path, max_steps=6)
    config.lr_schedule.horizon = 6
    run_here(config, tmp_path / "long")
    short = replace(config, max_steps=3)
    run_here(short, tmp_path / "parts")
    run_here(config, tmp_path / "parts", attempt=2)
    assert trace(tmp_path / "long") == trace(tmp_path / "parts")


def test_evaluation_and_samples_change_no_bit(tmp_path: Path) -> None:
    """EVAL-3, SAMPLE-1, EVAL-5: trace and state with evaluation are bitwise those without."""
    heldout = EvaluationConfig(name="heldout", every=2, samples=3)
    options = {
        "optimizer": OptimizerConfig(kind="adamw", lr=0.02),
        "balance": BalanceConfig(kind="global_batch_lagged", coef=0.1),
    }
    run_here(small_config(tmp_path, **options), tmp_path / "without")
    run_here(small_config(tmp_path, **options, evaluation=heldout), tmp_path / "with")
    assert trace(tmp_path / "without") == trace(tmp_path / "with")
    one, two = (weights(tmp_path / n, 6, tmp_path / f"{n}.safetensors") for n in ("without", "with"))
    assert any(name.startswith("extra.") for name in one)
    assert same(one, two)
    records = lines(tmp_path / "with", "evaluation.jsonl")
    assert [r["step"] for r in records] == [0, 2, 4, 6]
    assert all(set(r) == EVAL_5 for r in records)
    assert records[0]["loss"] == pytest.approx(math.log(97), abs=0.1)
    assert records[-1]["loss"] < records[0]["loss"]
    assert records[0]["tokens"] == records[-1]["tokens"] > 0


def test_a_bad_step_stops_the_run_with_the_state_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ENG-27: exit 7 at the next flush; the weights are those before it, though later steps were fine."""
    config = small_config(tmp_path, max_steps=3)
    run_here(config, tmp_path / "good")
    backends: list[NativeBackend] = []

    def finish(backend: NativeBackend, skip: torch.Tensor) -> None:
        backends.append(backend)

    monkeypatch.setattr(NativeBackend, "finish_step", finish)
    poison(monkeypatch, {3: (math.nan, 0.0)})
    with pytest.raises(UserError, match="not finite at step 4; the weights") as caught:
        run_here(
            replace(config, max_steps=6, lr_schedule=replace(config.lr_schedule, horizon=3)), tmp_path / "bad"
        )
    assert caught.value.code == 7
    good = weights(tmp_path / "good", 3, tmp_path / "good.safetensors")
    bad = {name: p for name, p in backends[-1].parameters.items() if name in good}
    assert [line["skip_reason"] for line in lines(tmp_path / "bad")] == [*[None] * 3, "nonfinite", "halted"]
    assert bad
    assert all(torch.equal(good[name], p.detach()) for name, p in bad.items())


def test_skip_goes_on_for_max_skips_in_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ENG-27: `nonfinite=skip` leaves out at most `max_skips` steps in a row, then ends the run."""
    poison(monkeypatch, dict.fromkeys((1, 2, 4), (math.inf, 0.0)))
    config = small_config(tmp_path, nonfinite="skip", max_skips=2)
    run_here(config, tmp_path / "two")
    assert [line["skipped"] for line in lines(tmp_path / "two")] == [False, True, True, False, True, False]
    poison(monkeypatch, dict.fromkeys((1, 2, 3, 4), (math.inf, 0.0)))
    with pytest.raises(UserError, match="not finite at step 2, 3, 4, 5"):
        run_here(config, tmp_path / "three")


def test_data_change_is_refused_on_resume(tmp_path: Path) -> None:
    """SEED table: another `split_seed` is other data, and a resume says so (exit 8)."""
    config = small_config(tmp_path, checkpoint=CheckpointConfig(every=2))
    run_here(config, tmp_path / "run")
    other = replace(config, data=replace(config.data, split_seed=7), max_steps=8)
    with pytest.raises(UserError) as caught:
        run_here(other, tmp_path / "run", attempt=2)
    assert caught.value.code == 8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "same_weights", "same_batches"),
    [
        ({"seed": 1}, False, False),
        (
            {"data": DataConfig(kind="synthetic", rule="zipf", ids=97, documents=41, shuffle_seed=5)},
            True,
            False,
        ),
        (
            {"data": DataConfig(kind="synthetic", rule="zipf", ids=97, documents=41, split_seed=5)},
            True,
            False,
        ),
        ({"logger": None}, True, True),
    ],
)
def test_seeds_are_separate(
    tmp_path: Path, change: dict[str, Any], same_weights: bool, same_batches: bool
) -> None:
    """SEED: what each seed drives, by the batches a run dumps and the weights it starts from."""
    change = {k: v for k, v in change.items() if v is not None}
    frozen = OptimizerConfig(kind="sgd", lr=0.0, weight_decay=0.0)
    config = small_config(tmp_path, optimizer=frozen, max_steps=2)
    config.debug.dump_batches = True
    for name, c in (("a", config), ("b", replace(config, **change))):
        run_here(c, tmp_path / name)
    first, second = (weights(tmp_path / n, 2, tmp_path / f"{n}.safetensors") for n in "ab")
    assert same(first, second) is same_weights
    dumps = [(tmp_path / n / "batches" / "rank_00000.jsonl").read_text() for n in "ab"]
    assert (dumps[0] == dumps[1]) is same_batches


def test_evaluation_batches_are_dumped_too(tmp_path: Path) -> None:
    """LOAD-4: both splits, an evaluation under the step it was made at; it changes no bit."""
    config = small_config(tmp_path, evaluation=EvaluationConfig(samples=2, every=1), max_steps=2)
    run_here(config, tmp_path / "plain")
    config.debug.dump_batches = True
    run_here(config, tmp_path / "dumped")
    dumped = lines(tmp_path / "dumped", "batches/rank_00000.jsonl")
    assert all(set(d) == LOAD_4 for d in dumped)
    places = [(d["split"], d["step"], d["micro_batch"]) for d in dumped]
    train = [("train", step, m) for step in (1, 2) for m in range(3)]
    heldout = [("heldout", step, m) for step in (0, 1, 2) for m in range(2)]
    assert places == [*heldout[:2], *train[:3], *heldout[2:4], *train[3:], *heldout[4:]]
    assert [d["ids"] for d in dumped[:2]] == [d["ids"] for d in dumped[-2:]]
    first, second = (weights(tmp_path / n, 2, tmp_path / f"{n}.safetensors") for n in ("plain", "dumped"))
    assert same(first, second)


def test_first_line_of_a_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """LOG-4: digest, commit, data key and kernels, for whoever has the log alone."""
    config = small_config(tmp_path)
    (tmp_path / "code.json").write_text(json.dumps({"commit": "abc123", "data_key": "d0"}))
    describe(tmp_path, config, rank=3)
    (line,) = capsys.readouterr().out.splitlines()
    digest = config_digest(config)[:12]
    assert line.startswith(f"rank 3 pid {os.getpid()} config {digest} commit abc123 data d0 kernels auto ")


@pytest.mark.parametrize("model", [deepseek_v2(first_dense=3), qwen3_moe(decoder_sparse_step=4), dense()])
def test_a_model_without_experts_has_no_load(tmp_path: Path, model: Any) -> None:
    """ROUTE-3: every layer dense by the config; the loss is there, the load is null."""
    run_here(small_config(tmp_path, model=model, max_steps=1), tmp_path / "run")
    (line,) = lines(tmp_path / "run")
    assert (line["moe"], line["aux_loss"]) == (None, None)
    assert line["loss"] > 0
