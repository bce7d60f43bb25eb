"""Continuations of fixed prompts, greedy and at temperature 0.8 (SAMPLE-1)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from src.seeds import generator
from src.trainer.metrics import append_lines
from src.trainer.state import Run

TEMPERATURE = 0.8


def continue_prompts(run: Run) -> list[dict[str, Any]]:
    """Continue each prompt both ways and append the texts to `samples.jsonl`; every rank calls it.

    Draws from the stream `sample` alone, keyed by seed, step and prompt, so it changes no training bit.
    """
    tokenizer = run.data.tokenizer
    if tokenizer is None:
        return []
    records = []
    for number, prompt in enumerate(run.config.evaluation.prompts):
        ids = tokenizer.encode(prompt)[-run.config.sequence_length // 2 :]
        uniform = generator(run.config, "sample", run.step, number)
        for mode, text_ids in zip(("greedy", "sampled"), _continue(run, ids, uniform), strict=True):
            record = {"step": run.step, "prompt": prompt, "mode": mode, "text": tokenizer.decode(text_ids)}
            records.append(record)
    if run.runtime.rank == 0 and records:
        append_lines(run.directory / "samples.jsonl", records)
    return records


def _continue(run: Run, prompt_ids: list[int], uniform: Any) -> list[list[int]]:
    """The new ids of a greedy and of a sampled continuation, grown side by side as one batch of two."""
    count = min(run.config.evaluation.sample_tokens, run.config.sequence_length - len(prompt_ids))
    ids_BS = torch.tensor([prompt_ids, prompt_ids], device=run.runtime.device)
    for _ in range(count):
        logits_BV = run.backend.logits(ids_BS)[:, -1].double()
        greedy = int(logits_BV[0].argmax())
        sampled = _draw(torch.softmax(logits_BV[1] / TEMPERATURE, 0), float(uniform.random()))
        step_B1 = torch.tensor([[greedy], [sampled]], device=ids_BS.device)
        ids_BS = torch.cat([ids_BS, step_B1], 1)
    return [row[len(prompt_ids) :] for row in ids_BS.tolist()]


def _draw(probabilities_V: Tensor, uniform: float) -> int:
    """Inverse of the cumulative distribution at `uniform`."""
    cumulative_V = probabilities_V.cumsum(0)
    return int(torch.searchsorted(cumulative_V, uniform * cumulative_V[-1]).clamp(max=len(cumulative_V) - 1))
