"""Start from the weights of a checkpoint or of a ``.safetensors`` file, on any mesh (CKPT-13)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from src.config import Config
from src.errors import Problem, UserError
from src.trainer.checkpoint.agree import everyone
from src.trainer.checkpoint.compare import describe, tensor_differences
from src.trainer.checkpoint.contents import Backend, is_weight, weights
from src.trainer.checkpoint.directory import Found, TensorInfo, size_in_bytes
from src.trainer.checkpoint.find import verified
from src.trainer.checkpoint.shards import Shards, read
from src.trainer.parallel.halves import View
from src.trainer.runtime import Runtime


def load_weights(config: Config, backend: Backend, runtime: Runtime) -> list[str]:
    """Fill the parameters from `init_from`, a checkpoint directory or a ``.safetensors`` file; a collective.

    Values are cast to the dtype of the parameters. Moments and other state in the source are not read.

    Returns:
        Names of parameters that the source lacks; they keep their initial values.

    Raises:
        UserError: code 8, the source cannot be read or is damaged, holds weights that the model has not, has
            another shape of one, or holds none at all.
    """
    assert config.init_from is not None
    path, tensors = Path(config.init_from), weights(backend)
    if path.is_dir():
        saved = _weights_of(path, tensors, size_in_bytes(config.checkpoint.verify), runtime)
    else:
        saved = everyone(runtime, lambda: _weights_in(path))[runtime.rank]
    differences = tensor_differences(saved, tensors, runtime)
    problems = describe({d for d in differences if d.kind in ("shape", "unexpected")})
    if problems or not saved:
        problems = problems or [Problem("init_from", "it holds no weights")]
        raise UserError([_refused(path, "does not fit this model"), *problems], code=8)
    present = {name: shards for name, shards in tensors.items() if name in saved}
    if path.is_dir():
        read(path, present, runtime)
    else:
        everyone(runtime, lambda: _read_file(path, present))
    return sorted(d.name for d in differences if d.kind == "missing")


def _refused(path: Path, why: str) -> Problem:
    return Problem("init_from", f"{path} {why}", rule="CKPT-13")


def _weights_of(
    path: Path, tensors: Mapping[str, Shards], limit: int, runtime: Runtime
) -> dict[str, TensorInfo]:
    """What a checkpoint holds, once every rank found it whole."""
    found = verified(path, tensors, limit, runtime)
    if not isinstance(found, Found):
        raise UserError([_refused(path, f"is no complete checkpoint: {'; '.join(found)}")], code=8)
    return {name: info for name, info in found.meta.tensors.items() if is_weight(name)}


def _weights_in(path: Path) -> dict[str, TensorInfo]:
    """What a ``.safetensors`` file holds; its own dtypes are of no interest."""
    try:
        with safe_open(path, framework="pt") as file:
            names = [name for name in file.keys() if is_weight(name)]  # noqa: SIM118 - it is no mapping
            return {name: TensorInfo(tuple(file.get_slice(name).get_shape()), "") for name in names}
    except (OSError, SafetensorError) as error:
        raise UserError([_refused(path, f"cannot be read: {error}")], code=8) from error


@torch.no_grad()
def _read_file(path: Path, tensors: Mapping[str, Shards]) -> None:
    """Copy this rank's boxes out of the file, none more than once and none whole unless it is held whole."""
    with safe_open(path, framework="pt") as file:
        for name, shards in tensors.items():
            for offsets, view in shards.boxes:
                view.copy_(_box(file.get_slice(name), offsets, view))


def _box(stored: object, offsets: tuple[int, ...], view: View) -> Tensor:
    spans = tuple(slice(start, start + size) for start, size in zip(offsets, view.shape, strict=True))
    box: Tensor = stored[spans]  # type: ignore[index]
    return box
