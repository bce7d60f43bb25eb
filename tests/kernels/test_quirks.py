"""PATCH-1 to PATCH-6, and for each quirk whether it is still needed with the packages installed here."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import files
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from src.errors import UserError
from src.kernels.autotune.narrow import Outcome
from src.kernels.quirks import (
    PATCHES,
    QUIRKS,
    Quirk,
    anywhere,
    check_disabled,
    on_gpus,
    patched,
    record,
    table,
)
from src.kernels.toolchain import Toolchain, find_toolchain

HERE = find_toolchain("cuda")
"""The versions of this machine, on a device that has every quirk of theirs."""
MADE_UP = Toolchain("cuda", {"lib": "1.4.0"})


class Library:
    value = "faulty"


@contextmanager
def mended(toolchain: Toolchain, used: Collection[str]) -> Iterator[Sequence[Outcome]]:
    old, Library.value = Library.value, f"{Library.value} mended"
    try:
        yield ()
    finally:
        Library.value = old


@contextmanager
def broken(toolchain: Toolchain, used: Collection[str]) -> Iterator[Sequence[Outcome]]:
    raise OSError("cannot patch")
    yield ()


def quirk(id: str = "one", **changes: object) -> Quirk:
    made = Quirk(id, "correctness", "", anywhere, {"lib": "<2"}, "wrong sums", "a patch", mended)
    return replace(made, **changes)  # type: ignore[arg-type]


def test_patch_1_an_id_twice_or_an_order_upside_down_raises_at_import() -> None:
    with pytest.raises(ValueError, match="two quirks have the id one"):
        table(quirk(), quirk())
    with pytest.raises(ValueError, match=r"one comes after \['two'\]"):
        table(quirk(after=("two",)), quirk("two"))
    assert list(table(quirk("two"), quirk(after=("two",)))) == ["two", "one"]


def test_patch_2_conditions_are_asked_once_and_recorded() -> None:
    asked: list[str] = []

    def asking(toolchain: Toolchain) -> bool:
        """on a Tuesday"""
        asked.append(toolchain.device)
        return False

    with patched(MADE_UP, (), quirks=table(quirk(when=asking), quirk("two", target="else"))) as found:
        told = record(found)
    assert asked == ["cuda"]
    assert told["quirks"] == {
        "one": {"status": "not_applicable", "why": "not on a Tuesday"},
        "two": {"status": "unused", "why": "this run does not use else"},
    }


def test_patch_4_a_patch_is_undone_on_the_way_out_in_the_opposite_order() -> None:
    known = table(quirk(), quirk("two", after=("one",)), quirk("three", patch=None))
    with patched(MADE_UP, (), quirks=known) as found:
        assert Library.value == "faulty mended mended"
        assert [s.status for s in found] == ["applied", "applied", "met"]
    assert Library.value == "faulty"
    with patched(MADE_UP, (), ["two"], known) as found:
        assert Library.value == "faulty mended"
        assert [s.status for s in found] == ["applied", "disabled", "met"]
    assert Library.value == "faulty"


def test_patch_5_outside_its_versions_a_quirk_is_out_and_the_version_shown() -> None:
    later = Toolchain("cuda", {"lib": "2.0.1"})
    with patched(later, (), quirks=table(quirk())) as found:
        assert (found[0].status, found[0].why) == ("not_applicable", "lib 2.0.1 is not <2")
        assert Library.value == "faulty"


def test_patch_6_a_patch_that_fails_ends_the_run_or_warns() -> None:
    known = table(quirk(), quirk("two", patch=broken))
    with (
        pytest.raises(
            UserError, match=r"quirk two: cannot patch; wrong sums.*\n.*quirks_disabled=\[two\]"
        ) as error,
        patched(MADE_UP, (), quirks=known),
    ):
        pass
    assert error.value.code == 3
    assert Library.value == "faulty"
    slow = table(quirk(kind="performance", patch=broken))
    with (
        pytest.warns(RuntimeWarning, match="one could not be patched"),
        patched(MADE_UP, (), quirks=slow) as found,
    ):
        assert found[0].status == "failed"


def test_an_unknown_id_is_one_error_with_the_list() -> None:
    assert check_disabled(PATCHES) == []
    (problem,) = check_disabled(["fla_kda", "grouped_mm_tail"])
    assert (
        "fla_kda, grouped_mm_tail: no such patch; grouped_mm_tail is met by code of ours" in problem.message
    )
    assert problem.fix == "patches: interpreter_numpy, fla_kda_stages, flash_attn_2_over_4"


def test_flash_attn_2_beside_4_is_refused_only_where_4_is_used() -> None:
    both = Toolchain("cuda", {"flash_attn": "2.8.3", "flash_attn_4": "4.0.0b36"})
    known = {"flash_attn_2_over_4": QUIRKS["flash_attn_2_over_4"]}
    with patched(both, ("torch",), quirks=known) as found:
        assert found[0].status == "unused"
    with pytest.raises(UserError, match="uninstall one"), patched(both, ("flash_attn_4",), quirks=known):
        pass


def test_every_quirk_expires_and_has_a_test() -> None:
    """A quirk without an upper bound would stay for ever; one without a test nobody would take out."""
    text = Path(__file__).read_text()
    for name, known in QUIRKS.items():
        assert any("<" in versions for versions in known.versions.values()), name
        assert f"def test_still_needed_{name}(" in text, name


def needed(name: str) -> Quirk:
    """The quirk if it stands here; skips where its versions are past, and says which are there."""
    known = QUIRKS[name]
    absent = HERE.outside(known.versions)
    if absent is not None:
        pytest.skip(f"not applicable: {absent}")
    return known


def test_still_needed_grouped_mm_stride_0() -> None:
    needed("grouped_mm_stride_0")
    x, w = torch.randn(8, 16, requires_grad=True), torch.randn(2, 16, 4)
    y = F.grouped_mm(x, w, offs=torch.tensor([3, 8], dtype=torch.int32))
    with pytest.raises(RuntimeError, match="strides"):
        y.sum().backward()


def test_still_needed_grouped_mm_tail() -> None:
    needed("grouped_mm_tail")
    torch.use_deterministic_algorithms(True)  # Fills new memory with NaN.
    try:
        y = F.grouped_mm(
            torch.randn(8, 16), torch.randn(2, 16, 4), offs=torch.tensor([3, 5], dtype=torch.int32)
        )
    finally:
        torch.use_deterministic_algorithms(False)
    assert y[:5].isfinite().all()
    assert y[5:].isnan().all()


def test_still_needed_varlen_attn_gqa() -> None:
    needed("varlen_attn_gqa")
    from torch.nn.attention.varlen import varlen_attn

    assert "enable_gqa" in inspect.signature(varlen_attn).parameters
    q, k, ends = torch.randn(8, 4, 8), torch.randn(8, 2, 8), torch.tensor([0, 8], dtype=torch.int32)
    with pytest.raises(ValueError, match="enable_gqa"):
        varlen_attn(q, k, k, ends, ends, 8, 8)


class Cast(torch.autograd.Function):
    """Twice a tensor, cast to the dtype that it has."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return (x * 2).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0] * 2


@pytest.mark.slow
def test_still_needed_traced_cast() -> None:
    needed("traced_cast")
    x = torch.ones(3, requires_grad=True)
    compiled = torch.compile(Cast.apply, fullgraph=True, dynamic=False, backend="aot_eager")
    (grad,) = torch.autograd.grad(compiled(x).sum(), x)
    assert not grad.any()


BOUNDS = """
import sys, torch, triton, triton.language as tl
from src.kernels.quirks import QUIRKS, patched
from src.kernels.toolchain import find_toolchain

@triton.jit
def total(x, n, out):
    most, found = tl.load(n), 0.0
    for i in range(most):
        found += tl.load(x + i)
    tl.store(out, found)

def run():
    out = torch.zeros(1)
    total[(1,)](torch.arange(5.0), torch.tensor([5]), out)
    return out.item()

try:
    run()
    print("runs")
except Exception as error:
    print("TypeError" if "TypeError" in repr(error) else repr(error))
with patched(find_toolchain("cpu"), ()) as found:
    print(found[0].id, found[0].status, run())
"""


def test_still_needed_interpreter_numpy(tmp_path: Path) -> None:
    """Without the patch a bound raises, with it it does not; with a later Triton both run."""
    pytest.importorskip("triton")
    (tmp_path / "bounds.py").write_text(BOUNDS)
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.getcwd()}
    done = subprocess.run(
        [sys.executable, tmp_path / "bounds.py"], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    stands = HERE.outside(QUIRKS["interpreter_numpy"].versions) is None
    status = "applied" if stands else "not_applicable"
    first = "TypeError" if stands else "runs"
    assert done.stdout.split("\n")[:2] == [first, f"interpreter_numpy {status} 10.0"]


@pytest.mark.slow
def test_still_needed_fla_kda_stages(tmp_path: Path) -> None:
    """Triton compiles for AMD chips anywhere: two stages pass, four do not before 3.7."""
    pytest.importorskip("triton")
    stands = HERE.outside(QUIRKS["fla_kda_stages"].versions) is None
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    codes = [
        subprocess.run(
            [sys.executable, Path(__file__).with_name("amd_loop.py"), stages],
            env=environment,
            capture_output=True,
        ).returncode
        for stages in ("2", "4")
    ]
    assert codes[0] == 0
    assert (codes[1] != 0) == stands


def test_still_needed_flash_attn_2_over_4() -> None:
    needed("flash_attn_2_over_4")
    assert any(str(path).startswith("flash_attn/cute/") for path in files("flash-attn") or [])


@pytest.mark.gpu
def test_still_needed_fp8_trans() -> None:
    assert on_gpus(HERE)
    needed("fp8_trans")
    from tests.kernels.fp8_trans import transposed

    x = torch.randn(32, 64, device="cuda").to(torch.float8_e4m3fn)
    assert not torch.equal(transposed(x).float(), x.float().T)
