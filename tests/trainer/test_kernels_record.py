"""REG-3: what is written about the kernels of a run, and what ranks compare before the first step."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from src.config import MeshConfig
from src.errors import UserError
from src.trainer.kernels_record import differences, parts, write_kernels
from src.trainer.runtime import join
from tests.distributed import world

RECORD: dict[str, Any] = {
    "operations": {"attention": {"choice": "eager", "refused": {}}, "rope": {"choice": "real"}},
    "device": {"kind": "cuda", "arch": "sm90", "card": "one"},
    "packages": {"triton": "3.6.0"},
}


def other_kernels(directory: Path) -> str:
    """What a rank gets from `write_kernels` when rank 1 chose otherwise."""
    runtime = join(MeshConfig("dp2", dp=2), dist.get_rank(), dist.get_rank(), torch.device("cpu"))
    record = copy.deepcopy(RECORD)
    if runtime.rank == 1:
        record["operations"]["attention"]["choice"] = "sdpa_cpu"
    try:
        write_kernels(directory, runtime, record)
    except UserError as error:
        return f"{error.code} {error}"
    return "fine"


def test_reg_3_ranks_with_other_kernels_are_refused(tmp_path: Path) -> None:
    """Every rank names the ranks, the operation and both choices, with code 3; nothing is written."""
    first, second = world.run(2, other_kernels, tmp_path)
    assert first == second
    assert first.startswith("3 ")
    assert "attention: eager on rank 0, sdpa_cpu on rank 1" in first
    assert "rope" not in first
    assert not (tmp_path / "kernels.json").exists()


def test_reg_3_one_rank_writes_what_it_was_given(tmp_path: Path) -> None:
    write_kernels(tmp_path, join(MeshConfig("single"), 0, 0, torch.device("cpu")), RECORD)
    assert json.loads((tmp_path / "kernels.json").read_text()) == RECORD


def test_reg_3_every_word_counts_but_the_name_of_the_card() -> None:
    other = copy.deepcopy(RECORD)
    other["device"]["card"] = "two"
    assert list(differences([dict(parts(r)) for r in (RECORD, other)])) == []
    other["device"]["arch"], other["packages"], other["rules"] = "sm100", {"triton": "3.7.1"}, []
    other["operations"]["attention"]["refused"] = {"sdpa_cpu": "runs on cpu, not on cuda"}
    assert list(differences([dict(parts(r)) for r in (RECORD, RECORD, other, other)])) == [
        "attention: eager on ranks 0, 1, eager on ranks 2, 3, for different reasons",
        "device: sm90 on ranks 0, 1, sm100 on ranks 2, 3",
        "packages: {'triton': '3.6.0'} on ranks 0, 1, {'triton': '3.7.1'} on ranks 2, 3",
        "rules: nothing on ranks 0, 1, [] on ranks 2, 3",
    ]
