"""Products tuned through torch's TunableOp: what is measured, the file of results, its use (TUNE).

A file belongs to one architecture, library and torch; of another stamp it is refused. Torch's own file is a
CSV that it drops in silence if a version differs. In torch 2.11 to 2.13 TunableOp knows several solutions
on AMD devices only (rocBLAS and hipBLASLt); on CUDA the one it has is cuBLAS's own choice.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from src.errors import Problem, UserError
from src.kernels.declaration import Device

KEY, RULE = "kernels.gemm_tuning", "TUNE-2"
SCHEMA = 1
LIBRARIES = {"cuda": "cublaslt", "rocm": "hipblaslt"}
"""Kind of device → the library behind its products."""
OPERATIONS: Mapping[str, Callable[..., Tensor]] = {"mm": torch.mm, "addmm": torch.addmm, "bmm": torch.bmm}
"""Products that torch sends through TunableOp."""
Layout = tuple[tuple[int, ...], tuple[int, ...]]
"""Shape and strides of a factor."""


@dataclass(frozen=True, order=True)
class Product:
    """One product, as far as the choice of a solution depends on it."""

    operation: str
    dtype: str
    factors: tuple[Layout, ...]
    out: str
    """Dtype of the result."""

    def __str__(self) -> str:
        shapes = " x ".join(f"{list(shape)}{_order(shape, strides)}" for shape, strides in self.factors)
        wider = "" if self.out == self.dtype else f" -> {self.out}"
        return f"{self.operation:<6} {self.dtype:<9} {shapes}{wider}"


def _order(shape: Sequence[int], strides: Sequence[int]) -> str:
    """A mark where a matrix lies transposed."""
    return "ᵀ" if len(shape) > 1 and strides[-1] != 1 and shape[-1] != 1 else ""


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects the products that run while it is entered, on any device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.products: set[Product] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func._schema.name.removeprefix("aten::")
        made = func(*args, **(kwargs or {}))
        if name in OPERATIONS:
            tensors = [t for t in args if isinstance(t, Tensor)]
            factors = tuple((tuple(t.shape), tuple(t.stride())) for t in tensors)
            self.products.add(Product(name, _short(tensors[-1].dtype), factors, _short(made.dtype)))
        return made


def stamp_of(device: Device, tunable: Any = None) -> dict[str, Any]:
    """What a file of results holds for: architecture, library, torch and the versions TunableOp checks."""
    tunable = torch.cuda.tunable if tunable is None else tunable
    toolkit = torch.version.hip or torch.version.cuda
    validators = {str(name): str(value) for name, value in tunable.get_validators()}
    return {
        "arch": device.arch,
        "library": LIBRARIES[device.kind],
        "torch": torch.__version__,
        "toolkit": toolkit,
        "validators": validators,
    }


def file_name(stamp: Mapping[str, Any]) -> str:
    """`<arch>-<library>.json`."""
    return f"{stamp['arch']}-{stamp['library']}.json"


def measure(products: Iterable[Product], device: torch.device, tunable: Any = None) -> list[list[Any]]:
    """Let TunableOp try its solutions of every product; operation, parameters, solution and ms of each."""
    tunable = torch.cuda.tunable if tunable is None else tunable
    with tempfile.TemporaryDirectory() as scratch:
        tunable.enable(True)
        tunable.tuning_enable(True)
        tunable.set_filename(str(Path(scratch) / "results.csv"))
        try:
            for product in products:
                multiply(product, device)
            return [list(result) for result in tunable.get_results()]
        finally:
            tunable.tuning_enable(False)
            tunable.enable(False)


def multiply(product: Product, device: torch.device) -> Tensor:
    """The product of random numbers."""
    wider = {} if product.out == product.dtype else {"out_dtype": getattr(torch, product.out)}
    factors = (_filled(layout, product.dtype, device) for layout in product.factors)
    return OPERATIONS[product.operation](*factors, **wider)


def _filled(layout: Layout, dtype: str, device: torch.device) -> Tensor:
    """Random numbers in a layout; all-zero factors would let the card draw less power than real ones."""
    shape, strides = layout
    tensor = torch.empty_strided(shape, strides, dtype=getattr(torch, dtype), device=device)
    return tensor.normal_()


def write(folder: Path, stamp: Mapping[str, Any], products: Iterable[Product], results: Any) -> Path:
    """Write the file of a stamp, whole or not at all."""
    path = folder / file_name(stamp)
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "schema": SCHEMA,
        "stamp": stamp,
        "products": [asdict(product) for product in sorted(products)],
        "results": results,
    }
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    temporary.rename(path)
    return path


def read(path: Path, here: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a file whose stamp is that of this device.

    Raises:
        UserError: the file is missing or unreadable, or of another stamp (3).
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        stamp, results = content["stamp"], content["results"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no file of scripts/tune_gemm.py"
        raise UserError([Problem(KEY, f"{path}: {why}", _FIX, RULE)], code=3) from error
    differing = [name for name in sorted({*stamp, *here}) if stamp.get(name) != here.get(name)]
    if differing:
        told = (f"{name} {stamp.get(name)} in the file, {here.get(name)} here" for name in differing)
        raise UserError([Problem(KEY, f"{path}: {'; '.join(told)}", _FIX, RULE)], code=3)
    assert isinstance(results, list)
    found: dict[str, Any] = content
    return found


_FIX = "measure with scripts/tune_gemm.py on such a device, or kernels.gemm_tuning=none"


def apply(path: Path, device: Device, tunable: Any = None) -> dict[str, Any]:
    """Use a file's solutions from now on, and try no others; what `kernels.json` says of it.

    Raises:
        UserError: the device has no such library, the file is refused, or torch does not take it (3).
    """
    if device.kind not in LIBRARIES:
        message = f"{path}: products of a {device.kind} are not tuned"
        raise UserError([Problem(KEY, message, "kernels.gemm_tuning=none", RULE)], code=3)
    tunable = torch.cuda.tunable if tunable is None else tunable
    content = read(path, stamp_of(device, tunable))
    with tempfile.TemporaryDirectory() as scratch:
        csv = Path(scratch) / "results.csv"
        csv.write_text(csv_of(content), encoding="utf-8")
        tunable.enable(True)
        tunable.tuning_enable(False)
        tunable.set_filename(str(csv))
        if not tunable.read_file(str(csv)):
            raise UserError([Problem(KEY, f"{path}: torch does not take its results", _FIX, RULE)], code=3)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    return {"file": path.name, "digest": digest, "products": len(content["results"])}


def csv_of(content: Mapping[str, Any]) -> str:
    """Results as TunableOp reads them: its validators, then a line for each product."""
    rows = [["Validator", name, value] for name, value in content["stamp"]["validators"].items()]
    return "".join(",".join(map(str, row)) + "\n" for row in [*rows, *content["results"]])
