"""Measure the products of a model's step and write which solution of the library is fastest for each.

    python scripts/tune_gemm.py model=deepseek_v2/lite mesh=pp2ep4 --dry-run
    python scripts/tune_gemm.py experiment=bench/deepseek_v2_lite_8l
    python train.py kernels.gemm_tuning=tuning/gfx942-hipblaslt.json

Shapes come from a run on the meta device, so one card measures for any mesh. torch's TunableOp tries the
solutions; on CUDA it has only one, cuBLAS's own choice, and the file then changes nothing. Without a GPU, or
with `--dry-run`, the products are listed and nothing is measured.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from src.code_identity import CHECKOUT
from src.compose import compose
from src.config import Config
from src.errors import Problem, UserError
from src.kernels.declaration import Device
from src.kernels.gemm_tuning import Product, measure, stamp_of, write
from src.kernels.registry import describe
from src.trainer.products import products_of

FOLDER = CHECKOUT / "tuning"
NO_GPU = "nothing is measured: that needs a GPU"


def main(argv: Sequence[str] | None = None) -> int:
    """List or measure; the code of a UserError, else 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dry-run", action="store_true", help="list the products and measure none")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the file")
    parser.add_argument("overrides", nargs="*", help="as for train.py")
    arguments = parser.parse_intermixed_args(argv)
    try:
        config = compose(arguments.overrides).config
        device = device_of(config)
        products = checked(config, device)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.code
    print("\n".join(map(str, products)))
    if arguments.dry_run or device.kind == "cpu":
        print(f"{len(products)} products; {'listed only' if device.kind != 'cpu' else NO_GPU}")
        return 0
    results = measure(products, torch.device("cuda"))
    path = write(arguments.out, stamp_of(device), products, results)
    print(f"{len(results)} results in {path}; {chosen(results)} with another solution than the default")
    return 0


def device_of(config: Config) -> Device:
    """The device here; `platform=cpu` looks at no GPU."""
    on_gpu = config.platform.name != "cpu" and torch.cuda.is_available()
    return describe(torch.device("cuda" if on_gpu else "cpu"))


def checked(config: Config, device: Device) -> list[Product]:
    """The products of a model of ours, in order."""
    if config.backend.name != "native" or config.model.family == "hf":
        message = f"backend={config.backend.name} with model={config.model.name} has products of transformers"
        raise UserError([Problem("backend", message, "a model of ours with backend=native", "TUNE-1")])
    return sorted(products_of(config, device))


def chosen(results: Sequence[Sequence[object]]) -> int:
    """Products whose fastest solution is not the library's own choice."""
    return sum(result[2] != "Default" for result in results)


if __name__ == "__main__":
    sys.exit(main())
