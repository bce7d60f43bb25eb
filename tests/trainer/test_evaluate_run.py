"""`scripts/evaluate.py`: a checkpoint on held-out documents, whole or one by one (EVAL-6)."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.evaluate import main
from src.compose import dump_config, load_config
from src.config import (
    BalanceConfig,
    CheckpointConfig,
    Config,
    DataConfig,
    EvaluationConfig,
    OptimizerConfig,
    TokenizerConfig,
)
from src.trainer.backends.native import NativeBackend
from src.trainer.checkpoint.directory import newest, step_path
from src.trainer.checkpoint.weights import load_weights
from src.trainer.data.corpus import Data, open_data
from src.trainer.data.packed import NO_TARGET
from src.trainer.data.prepare import prepare
from src.trainer.runtime import start
from tests.data.small import texts, write_corpus
from tests.models.odd import deepseek_v2
from tests.trainer.small import lines, run_here, small_config

STEPS = 4


def config(root: Path, tokenizer: str = "bpe", **changes: Any) -> Config:
    """A run on text whose documents are mostly longer than its samples."""
    files = [f"{root / 'corpus'}/**/*.*"]
    options: dict[str, Any] = {
        "model": deepseek_v2(vocab_size=300),
        "data": DataConfig(kind="text_files", files=files, holdout=0.2),
        "tokenizer": TokenizerConfig(kind=tokenizer, vocab_size=300),
        "optimizer": OptimizerConfig(kind="adamw", lr=0.01),
        "balance": BalanceConfig(kind="global_batch_lagged", coef=0.1),
        "checkpoint": CheckpointConfig(every=2, keep_last=9),
        "evaluation": EvaluationConfig(name="heldout", every=2, samples=5),
        "micro_batch_size": 3,
        "max_steps": STEPS,
    }
    return small_config(root, **(options | changes))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a corpus, another one, and a run on the first."""
    root = tmp_path_factory.mktemp("evaluate")
    write_corpus(root / "corpus", texts(40))
    write_corpus(root / "other", texts(30, seed=8))
    settings = config(root)
    prepare(settings, lambda line: None)
    (root / "run").mkdir()
    (root / "run" / "config.yaml").write_text(dump_config(settings))
    run_here(settings, root / "run")
    return root


@pytest.fixture
def run(root: Path, tmp_path: Path) -> Path:
    """The run, for a test of its own."""
    return shutil.copytree(root / "run", tmp_path / "run")


def evaluated(capsys: pytest.CaptureFixture[str], run: Path, *words: str) -> dict[str, Any]:
    """The object that the script prints."""
    capsys.readouterr()
    code = main([f"run={run}", *words])
    output = capsys.readouterr()
    assert code == 0, output.err
    return json.loads(output.out)


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """Code and text of a refusal, which prints no result."""
    capsys.readouterr()
    code = main(words)
    output = capsys.readouterr()
    assert output.out == ""
    return code, output.err


def test_the_loss_is_that_of_the_run_eval_6(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """EVAL-6: at the newest step and at one that is named, all of what `evaluation.jsonl` says."""
    recorded = {line["step"]: line for line in lines(run, "evaluation.jsonl")}
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    for words, step in (((), 4), (("step=2",), 2)):
        found = evaluated(capsys, run, *words)
        assert found.pop("run") == str(run)
        assert found.pop("data") == open_data(load_config(run / "config.yaml")).key
        assert found.pop("loss") == pytest.approx(recorded[step]["loss"], rel=1e-6)
        assert found.pop("bits_per_byte") == pytest.approx(recorded[step]["bits_per_byte"], rel=1e-6)
        assert found == {key: value for key, value in recorded[step].items() if key in found}
    assert recorded[2]["loss"] != recorded[4]["loss"]
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def token_loss(backend: NativeBackend, data: Data, place: tuple[int, int]) -> tuple[tuple[int, int], float]:
    """Document and number in it of a label of a held-out sample, and its loss by the packed path alone."""
    sample, position = place
    batch = data.heldout.micro_batch([sample])
    only = torch.full_like(batch.labels_BS, NO_TARGET)
    only[0, position] = batch.labels_BS[0, position]
    for document, first, length in data.heldout.plan.sample(sample).tolist():
        if position < length:
            return (document, first + position), float(backend.evaluate(replace(batch, labels_BS=only)))
        position -= length
    raise AssertionError("it is a pad")


def test_each_document_once_with_its_tokens_in_order_eval_6(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """EVAL-6: cut documents are whole again, sums agree, tokens are those of the packed path, one by one."""
    found = evaluated(capsys, run, "per_document=true")
    assert found["documents"] == str(run / "documents.jsonl")
    settings = load_config(run / "config.yaml")
    data = open_data(settings)
    documents = lines(run, "documents.jsonl")
    lengths = data.heldout.source.lengths.tolist()
    assert max(lengths) > 3 * settings.sequence_length
    assert [line["document"] for line in documents] == list(range(len(lengths)))
    for line, length in zip(documents, lengths, strict=True):
        assert set(line) == {"document", "tokens", "loss", "token_losses"}
        assert len(line["token_losses"]) == line["tokens"] == length - 1
        assert line["loss"] == pytest.approx(sum(line["token_losses"]) / line["tokens"], rel=1e-12)
    assert sum(line["tokens"] for line in documents) == found["tokens"]
    nats = sum(line["loss"] * line["tokens"] for line in documents)
    assert nats / found["tokens"] == pytest.approx(found["loss"], rel=1e-12)
    everything = evaluated(capsys, run, "evaluation.samples=null")
    assert everything["tokens"] == found["tokens"]
    assert everything["loss"] == pytest.approx(found["loss"], rel=1e-6)
    runtime = start(settings)
    backend = NativeBackend.build(settings, runtime)
    assert load_weights(replace(settings, init_from=str(newest(run))), backend, runtime) == []
    labels_S = data.heldout.micro_batch([1]).labels_BS[0]
    for position in (labels_S != NO_TARGET).nonzero()[:, 0].tolist()[::3]:
        (document, number), loss = token_loss(backend, data, (1, position))
        assert documents[document]["token_losses"][number] == pytest.approx(loss, rel=1e-5)


@pytest.mark.slow
def test_other_text_in_the_ids_of_the_runs_tokenizer_eval_6(
    root: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """EVAL-6, TOK-3: another corpus is encoded by the tokenizer that was trained on the run's own."""
    data = open_data(load_config(run / "config.yaml"))
    other = f'data.files=["{root / "other"}/**/*.*"]'
    found = evaluated(capsys, run, "data=text_files", other, "data.holdout=0.4", "evaluation.samples=null")
    assert found["data"] != data.key
    paths = list((root / "other").iterdir())
    assert data.tokenizer is not None
    sizes = {len(data.tokenizer.encode(path.read_text(encoding="utf-8"))) for path in paths}
    evaluated(capsys, run, "data=text_files", other, "data.holdout=0.4", "per_document=true")
    documents = lines(run, "documents.jsonl")
    assert sum(line["tokens"] for line in documents) == found["tokens"]
    assert {line["tokens"] for line in documents} <= sizes  # With EOS, without the first.
    assert 3 < len(documents) < len(paths)
    same = evaluated(capsys, run, "data.split_seed=7")
    assert same["data"] not in (data.key, found["data"])
    assert len(list((root / "data" / "tokenizers").glob("*/manifest.json"))) == 1


@pytest.mark.slow
def test_a_damaged_checkpoint_is_passed_over_eval_6(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """EVAL-6, CKPT-5: the newest complete one; one that is named must be complete itself (8)."""
    (step_path(run, 4) / "__0_0.distcp").write_bytes(b"")
    capsys.readouterr()
    assert main([f"run={run}"]) == 0
    output = capsys.readouterr()
    assert json.loads(output.out)["step"] == 2
    assert "step-00000004 is not complete: __0_0.distcp has 0 bytes" in output.err
    code, text = refused(capsys, f"run={run}", "step=4")
    assert (code, "has 0 bytes" in text) == (8, True)


REFUSALS: dict[str, tuple[int, list[str]]] = {
    "sead=3 optimizer.lr=fast": (2, ["did you mean seed?", "optimizer.lr: takes a number"]),
    "seed=3 mesh=ep2 tokenizer=bytes": (2, [f"{k}: is the run's own" for k in ("seed", "mesh", "tokenizer")]),
    "step=x per_document=1": (2, ["script.step: takes a whole number", "script.per_document: takes true"]),
    "data=synthetic": (2, ["synthetic has no text, and the run's tokenizer is bpe"]),
    "data.holdout=0": (2, ["data.holdout=0 keeps none"]),
    "step=3": (8, ["step=2, step=4"]),
}
"""Words → code and what is said."""


@pytest.mark.parametrize("words", REFUSALS)
def test_what_is_refused_eval_6(root: Path, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """EVAL-6, CFG-1, TOK-3: before anything is loaded, with both values or what there is instead."""
    code, said = REFUSALS[words]
    found, text = refused(capsys, f"run={root / 'run'}", *words.split())
    assert found == code
    assert [line for line in said if line not in text] == []


def test_missing_runs_are_refused_eval_6(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """EVAL-6: no directory, none named, one without a checkpoint."""
    assert refused(capsys, f"run={tmp_path}/no")[0] == 2
    code, text = refused(capsys)
    assert (code, "type run=RUN" in text) == (2, True)
    (tmp_path / "config.yaml").write_text(dump_config(config(tmp_path)))
    code, text = refused(capsys, f"run={tmp_path}")
    assert (code, "has no checkpoint" in text) == (8, True)


@pytest.mark.slow
def test_another_tokenizer_than_the_runs_is_refused_eval_6(
    root: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """TOK-3: files that changed since the run was prepared; both values are named."""
    (trained,) = (root / "data" / "tokenizers").glob("*/tokenizer.json")
    (run / "hf").mkdir()
    shutil.copy(trained, run / "hf" / "tokenizer.json")
    (run / "hf" / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    settings = config(root, max_steps=1)
    settings.tokenizer = TokenizerConfig(kind="hf", path=str(run / "hf"))
    prepare(settings, lambda line: None)
    shutil.rmtree(run / "checkpoints")
    run_here(settings, run, attempt=2)
    (run / "config.yaml").write_text(dump_config(settings))
    (run / "code.json").write_text(json.dumps({"data_key": open_data(settings).key}))
    evaluated(capsys, run, "data.split_seed=9")
    files = json.loads((run / "hf" / "tokenizer.json").read_text())
    ids = files["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]
    (run / "hf" / "tokenizer.json").write_text(json.dumps(files))
    code, text = refused(capsys, f"run={run}", "data.split_seed=10")
    assert code == 2
    assert "is there now" in text
    assert "made the data of the run" in text
