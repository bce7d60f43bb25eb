"""The file of tuned products: its stamp, what is refused, what reaches torch, the script (TUNE)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts import tune_gemm
from src.config import Config, DeterminismConfig, KernelsConfig
from src.errors import UserError
from src.kernels.declaration import Device
from src.kernels.gemm_tuning import Product, Recorder, apply, multiply, read, stamp_of, write
from src.launchers.launch import check_tuning
from src.trainer.tuning import tune_products

CARD = Device("rocm", "gfx942", card="a made-up card")
PRODUCTS = [Product("mm", "bfloat16", (((40, 24), (24, 1)), ((24, 7), (1, 24))), "bfloat16")]
RESULTS = [["GemmTunableOp_BFloat16_TN", "tn_7_40_24_ld_24_24_7", "Gemm_Hipblaslt_1219", 0.0125]]
TOLD = (
    "Validator,PT_VERSION,2.11.0\nValidator,HIPBLASLT_VERSION,1.2\n"
    "GemmTunableOp_BFloat16_TN,tn_7_40_24_ld_24_24_7,Gemm_Hipblaslt_1219,0.0125\n"
)
"""What torch reads of RESULTS."""


class Tunable:
    """`torch.cuda.tunable` as this file uses it; keeps what it was told."""

    def __init__(self, takes: bool = True, version: str = "1.2") -> None:
        self.takes, self.version, self.text = takes, version, ""
        self.switches: dict[str, bool] = {}

    def get_validators(self) -> tuple[tuple[str, str], ...]:
        """Versions that a file must have."""
        return ("PT_VERSION", "2.11.0"), ("HIPBLASLT_VERSION", self.version)

    def enable(self, value: bool) -> None:
        """The whole of it."""
        self.switches["enabled"] = value

    def tuning_enable(self, value: bool) -> None:
        """Trying solutions that no file has."""
        self.switches["tuning"] = value

    def set_filename(self, name: str) -> None:
        """Where torch writes."""

    def read_file(self, name: str) -> bool:
        """Whether the results are taken."""
        self.text = Path(name).read_text()
        return self.takes


def stored(root: Path, tunable: Tunable | None = None) -> Path:
    """A file of the made-up card."""
    return write(root / "tuning", stamp_of(CARD, tunable or Tunable()), PRODUCTS, RESULTS)


def test_tune_1_a_file_reaches_torch_and_tries_nothing_else(tmp_path: Path) -> None:
    """TUNE-1: named by architecture and library; applied with tuning off; `kernels.json` gets a digest."""
    path, tunable = stored(tmp_path), Tunable()
    assert path.name == "gfx942-hipblaslt.json"
    content = json.loads(path.read_text())
    assert (content["schema"], content["stamp"]["torch"]) == (1, torch.__version__)
    assert content["products"][0]["operation"] == "mm"
    said = apply(path, CARD, tunable)
    assert tunable.text == TOLD
    assert tunable.switches == {"enabled": True, "tuning": False}
    assert (said["file"], said["products"], len(said["digest"])) == (path.name, 1, 16)


STAMPS: dict[str, Any] = {
    "arch": (replace(CARD, arch="gfx950"), Tunable(), "arch gfx942 in the file, gfx950 here"),
    "library": (replace(CARD, kind="cuda"), Tunable(), "library hipblaslt in the file, cublaslt here"),
    "version": (CARD, Tunable(version="1.3"), "'HIPBLASLT_VERSION': '1.2'"),
    "torch": (CARD, Tunable(takes=False), "torch does not take its results"),
    "cpu": (Device("cpu", "cpu"), Tunable(), "products of a cpu are not tuned"),
}


@pytest.mark.parametrize("what", STAMPS)
def test_tune_2_another_stamp_is_refused(tmp_path: Path, what: str) -> None:
    """TUNE-2: exit 3 with both values, before any product."""
    device, tunable, message = STAMPS[what]
    with pytest.raises(UserError, match=message) as refused:
        apply(stored(tmp_path), device, tunable)
    assert refused.value.code == 3


def test_tune_2_a_missing_or_broken_file_is_refused(tmp_path: Path) -> None:
    """TUNE-2: exit 3, in a rank and before it is started."""
    here = stamp_of(CARD, Tunable())
    broken = tmp_path / "broken.json"
    broken.write_text('{"stamp": 1')
    for path, message in ((tmp_path / "none.json", "No such file"), (broken, "no file of scripts/tune_gemm")):
        with pytest.raises(UserError, match=message) as refused:
            read(path, here)
        assert refused.value.code == 3
    config = Config(kernels=KernelsConfig(gemm_tuning=str(tmp_path / "none.json")))
    with pytest.raises(UserError, match="does not exist") as refused:
        check_tuning(config)
    assert refused.value.code == 3
    check_tuning(Config())


def test_tune_3_bitwise_leaves_it_out_unless_pinned(tmp_path: Path) -> None:
    """TUNE-3: one line and no product tuned; `kernels.autotune=pinned` takes it, which a CPU refuses."""
    kernels, cpu = KernelsConfig(gemm_tuning=str(stored(tmp_path))), torch.device("cpu")
    config = Config(kernels=kernels, determinism=DeterminismConfig("bitwise"))
    said, (line,) = tune_products(config, cpu)
    assert said == {"gemm_tuning": "left out"}
    assert "determinism=bitwise" in line
    for taken in (replace(config, kernels=replace(kernels, autotune="pinned")), Config(kernels=kernels)):
        with pytest.raises(UserError, match="products of a cpu"):
            tune_products(taken, cpu)
    assert tune_products(Config(), cpu) == ({}, [])


def test_tune_1_without_a_gpu_the_products_are_listed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """TUNE-1: shapes, and a line that measuring needs a GPU; nothing is written."""
    words = ["platform=cpu", "model.num_layers=2", "sequence_length=24", f"--out={tmp_path / 'tuning'}"]
    assert tune_gemm.main([*words, "data=synthetic", "tokenizer=none", "model.vocab_size=64"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "mm     float32   [48, 24] x [24, 96]ᵀ" in lines
    assert lines[-1] == f"{len(lines) - 1} products; nothing is measured: that needs a GPU"
    assert list(tmp_path.iterdir()) == []
    assert tune_gemm.main(["sead=3"]) == 2


def test_a_recorded_product_is_made_again_as_it_was() -> None:
    """Shapes, strides and dtypes are those that were recorded."""
    with Recorder() as first:
        torch.mm(torch.ones(7, 5), torch.ones(3, 5).T)
        torch.bmm(torch.ones(2, 7, 5), torch.ones(2, 5, 3))
        torch.addmm(torch.ones(3), torch.ones(7, 5), torch.ones(5, 3))
    assert {product.operation for product in first.products} == {"mm", "bmm", "addmm"}
    with Recorder() as again:
        for product in first.products:
            multiply(product, torch.device("cpu"))
    assert again.products == first.products


@pytest.mark.gpu
def test_tune_1_on_a_card(tmp_path: Path) -> None:
    """TUNE-1, TUNE-2: measured, written and applied on this card; products then are what they were."""
    from src.kernels.gemm_tuning import measure
    from src.kernels.registry import describe

    device = torch.device("cuda")
    card, product = describe(device), replace(PRODUCTS[0], factors=(((64, 32), (32, 1)), ((32, 48), (1, 32))))
    a, b = torch.randn(64, 32, device=device).bfloat16(), torch.randn(48, 32, device=device).bfloat16().T
    expected = (a.double() @ b.double()).float()
    results = measure([product], device)
    assert len(results) >= 1
    path = write(tmp_path, stamp_of(card), [product], results)
    try:
        said = apply(path, card)
        assert said["products"] == len(results)
        assert torch.cuda.tunable.is_enabled()
        assert not torch.cuda.tunable.tuning_is_enabled()
        assert ((a @ b).float() - expected).norm() / expected.norm() < 4e-3
    finally:
        torch.cuda.tunable.enable(False)
