"""Evaluate a checkpoint of a run on one process, whatever mesh trained it (EVAL-6)."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from src.config import Config, TokenizerConfig
from src.errors import Problem, UserError
from src.run_config import Configs
from src.trainer.backends.base import Backend
from src.trainer.backends.registry import backend_class
from src.trainer.checkpoint.directory import Found, step_path, steps
from src.trainer.checkpoint.find import find
from src.trainer.checkpoint.load import load
from src.trainer.data import keys
from src.trainer.data.corpus import Data, open_data
from src.trainer.data.prepare import open_stored, prepare
from src.trainer.data.tokenizer import load_tokenizer
from src.trainer.document_losses import DocumentLoss, document_losses
from src.trainer.evaluation import HeldOut, record_of, sum_heldout
from src.trainer.loop import launched_key
from src.trainer.metrics import strict
from src.trainer.runtime import Runtime, start

DOCUMENTS = "documents.jsonl"


def evaluate_run(run: Path, configs: Configs, step: int | None, per_document: bool) -> dict[str, Any]:
    """Load a checkpoint of `run` and evaluate it; nothing of the run is changed but `documents.jsonl`.

    Args:
        run: absolute path of the run directory.
        configs: of `configs_of_run`.
        step: of the checkpoint; None takes the newest that is complete.
        per_document: evaluate document by document, and write a line for each.

    Returns:
        run, data (key of the artifact) and all of a line of `evaluation.jsonl`; with `per_document` also
        documents, the path of their file.

    Raises:
        UserError: 3, no such device or kernel here; 4, data that is not ready; 8, no checkpoint that can be
            loaded; 2, another tokenizer than the run's.
    """
    _require_step(run, step)
    with _open(run, configs) as data:
        runtime = start(configs.wanted)
        try:
            found, backend = _load(run, configs, step, runtime)
            if per_document:
                losses = document_losses(data, backend, configs.wanted.micro_batch_size)
                heldout = write_documents(run / DOCUMENTS, losses)
            else:
                heldout = sum_heldout(configs.wanted, data, backend, runtime)
            line = {"run": str(run), "data": data.key, **record_of(data, found.step, heldout)}
            return line | ({"documents": str(run / DOCUMENTS)} if per_document else {})
        finally:
            runtime.close()


def write_documents(path: Path, losses: Iterator[DocumentLoss]) -> HeldOut:
    """One line per document, under another name until all are there; returns their sum."""
    nats, tokens = 0.0, 0
    staging = path.with_name(f".{path.name}.tmp")
    with staging.open("w", encoding="utf-8") as stream:
        for loss in losses:
            stream.write(json.dumps(strict(loss.line())) + "\n")
            nats, tokens = nats + loss.nats, tokens + len(loss.token_losses)
    staging.rename(path)
    return HeldOut(nats, tokens)


def _require_step(run: Path, step: int | None) -> None:
    """Raise `UserError` (8) with the steps that there are, before anything is opened."""
    there = sorted(int(path.name.removeprefix("step-")) for path in steps(run))
    if not there:
        raise UserError([Problem("run", f"{run} has no checkpoint", rule="EVAL-6")], code=8)
    if step is not None and step not in there:
        fix = f"what there is: {', '.join(f'step={number}' for number in there)}"
        raise UserError([Problem("step", f"{run} has no checkpoint of step {step}", fix, "EVAL-6")], code=8)


def _load(run: Path, configs: Configs, step: int | None, runtime: Runtime) -> tuple[Found, Backend]:
    """The model with the weights and the balance state of the checkpoint."""
    backend: Backend = backend_class(configs.wanted.backend.name).build(configs.wanted, runtime)
    own = configs.own if step is None else replace(configs.own, resume=str(step_path(run, step)))
    found = find(own, run, runtime, backend)
    assert found is not None, "there was one a moment ago"
    for note in found.skipped:
        print(note, file=sys.stderr)
    load(found, own, backend, {}, runtime, found.meta.data_key)
    return found, backend


@contextmanager
def _open(run: Path, configs: Configs) -> Iterator[Data]:
    """The run's data, or other data in the ids of the run's tokenizer."""
    own_key = launched_key(configs.own, run)
    if not configs.other_data or configs.wanted.data.kind == "synthetic":
        yield open_data(configs.wanted, None if configs.wanted.data.kind == "synthetic" else own_key)
        return
    assert own_key is not None, "text needs a tokenizer, and synthetic runs have none"
    with tempfile.TemporaryDirectory() as folder:
        wanted = _with_tokenizer_of(configs, own_key, Path(folder))
        prepared = prepare(wanted, lambda line: print(line, file=sys.stderr))
        yield open_data(wanted, prepared.key)


def _with_tokenizer_of(configs: Configs, own_key: str, folder: Path) -> Config:
    """The wanted config with the tokenizer that made the run's data, refused if it has changed since.

    A tokenizer that was trained on the run's corpus is not that of another corpus, so it is taken as files.
    """
    stored = open_stored(configs.own, own_key)
    trained = None if stored.tokenizer is None else stored.tokenizer.path
    ours = load_tokenizer(configs.own.tokenizer, trained).content
    theirs = stored.tokens.manifest["tokenizer"]
    if ours != theirs:
        message = f"{ours[:16]} is there now, {theirs[:16]} made the data of the run"
        raise UserError([Problem("tokenizer", message, "put the run's tokenizer back", "TOK-3")])
    if trained is None or keys.identify(configs.wanted).tokenizer_key == trained.name:
        return configs.wanted
    text = (trained / "tokenizer.json").read_text(encoding="utf-8")
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    specials = {"eos_token": keys.EOS, "bos_token": keys.BOS}
    (folder / "tokenizer_config.json").write_text(json.dumps(specials), encoding="utf-8")
    files = TokenizerConfig(kind="hf", path=str(folder), bos=configs.wanted.tokenizer.bos)
    return replace(configs.wanted, tokenizer=files)
