"""`scripts/estimate.py` and the refusal of what does not fit a card (PROJ-2 to PROJ-4, CFG-17)."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from fractions import Fraction

import pytest

from scripts.estimate import bubble_of, main
from src.config import Config, PipelineConfig
from src.launchers.memory import Estimate
from src.launchers.plan import check_memory, make_plan
from src.machine import Machine, ask_driver, find_machine
from src.mesh_spec import parse
from tests.config.conftest import Problems

COMMON = ["platform=cuda", "data=synthetic", "tokenizer=none", "model.vocab_size=512", "data.ids=512"]


def test_proj_4_meshes_are_ranked_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    """PROJ-4: what fits first, then what idles least; what cannot be is named with the reason."""
    words = [*COMMON, "launcher.gpu_memory=40MiB", "-m", "mesh=pp2,ep2,ep3,single", "imbalance=1.0"]
    assert main(words) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in lines[:3]]
    assert head.split()[:3] == ["overrides", "ranks", "fits"]
    assert {row[0]: (row[1], row[-1]) for row in rows} == {
        "mesh=pp2": ("2", "11.1%"),
        "mesh=ep2": ("2", "0.0%"),
        "mesh=single": ("1", "0.0%"),
    }
    fits = [row[2] for row in rows]
    assert fits == sorted(fits, reverse=True), "yes before no"
    assert "of 40.0 MiB, launcher.gpu_memory" in lines[3]
    assert lines[4].startswith("refused: mesh=ep3: mesh.ep: ep=3 does not divide the 16 experts")
    assert main(["mesh=ep3"]) == 2
    assert main(["sead=3"]) == 2


BUBBLES = {
    ("1f1b", 1, 3, 6): Fraction(2, 8),
    ("gpipe", 1, 3, 6): Fraction(2, 8),
    ("interleaved_1f1b", 2, 2, 4): Fraction(1, 9),
}
"""Schedule, stages a rank v, ranks p, micro-batches m → (p - 1) / (v·m + p - 1)."""


@pytest.mark.parametrize("case", BUBBLES)
def test_proj_3_bubbles_are_those_of_the_executed_table(
    base: Config, case: tuple[str, int, int, int]
) -> None:
    """PROJ-3: the simulated table idles as the closed form says."""
    schedule, per_rank, ranks, count = case
    base.mesh = replace(base.mesh, **parse(f"pp{ranks}"))
    base.pipeline = PipelineConfig(schedule, per_rank)
    base.global_batch_size = count * base.micro_batch_size
    assert bubble_of(base) == pytest.approx(float(BUBBLES[case]))


def test_proj_4_imbalance_is_explicit(base: Config) -> None:
    """PROJ-4: rows of experts grow with it, states do not; the default is even routing."""
    base.mesh = replace(base.mesh, **parse("ep2"))
    even, double = Estimate(base, "cuda").of(0), Estimate(base, "cuda", imbalance=2.0).of(0)
    assert double.activations > even.activations
    assert replace(double, activations=even.activations, pending=even.pending) == even


def test_proj_2_a_card_refuses_what_does_not_fit(base: Config, problems: Problems) -> None:
    """PROJ-2, CFG-17: exit 3 with the arithmetic, but for `launcher.force`; a size that is none is exit 2."""
    base.platform.name, base.launcher.gpu_memory = "cuda", "10MiB"
    machine = replace(find_machine(base), devices=1)
    assert (machine.memory, machine.source) == (10 * 2**20, "launcher.gpu_memory")
    plan = make_plan(base, [], machine)
    with pytest.raises(
        Exception, match=r"weights .* - pending gradients .* of 10\.0 MiB.* does not fit"
    ) as no:
        check_memory(plan)
    assert no.value.code == 3  # type: ignore[attr-defined]
    check_memory(replace(plan, force=True))
    base.launcher.gpu_memory = "1TiB"
    check_memory(make_plan(base, [], replace(find_machine(base), devices=1)))
    assert "'big' is no size" in problems("launcher.gpu_memory=big")["launcher.gpu_memory"].message


def test_proj_2_a_launch_asks_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """PROJ-2: of the smallest card; a driver that is absent, slow or silent leaves the memory unknown."""
    unknown = Machine("cuda", 2, None, "unprobed: a test")
    answers: list[object] = ["143771\n81559\n", "No devices were found\n"]
    answers += [FileNotFoundError(), subprocess.TimeoutExpired("nvidia-smi", 10)]

    def run(words: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        assert words[0] == "nvidia-smi"
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return subprocess.CompletedProcess(words, 0, str(answer))

    monkeypatch.setattr(subprocess, "run", run)
    assert ask_driver(unknown) == Machine("cuda", 2, 81559 * 2**20, "nvidia-smi")
    assert [ask_driver(unknown) for _ in range(3)] == [unknown] * 3
    known = Machine("cuda", 1, 7, "told")
    assert ask_driver(known) == known
