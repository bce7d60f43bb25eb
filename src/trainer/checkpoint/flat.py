"""A checkpoint as one ``.safetensors`` file of full tensors, for other tools and comparisons (CKPT-13)."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from src.errors import Problem, UserError
from src.trainer.checkpoint.directory import IncompleteError, Meta, TensorInfo, read_meta, verify_files
from src.trainer.checkpoint.shards import Shards, read_alone

DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "int64": "I64",
    "int32": "I32",
    "uint8": "U8",
    "bool": "BOOL",
}
"""torch's name of a dtype → the format's."""
BATCH = 2**28
"""Bytes of tensors that are in memory at a time, unless one alone is larger."""


def flatten(checkpoint: Path, out: Path) -> Meta:
    """Write every tensor of `checkpoint` to `out`, by its saved name, in order of names.

    The file depends on the values alone, not on the mesh that saved them. The format, a length, a JSON header
    and the bytes, is written here because `safetensors` wants all tensors in memory at once.

    Raises:
        UserError: code 8, the checkpoint is not complete.
    """
    meta = whole(checkpoint)
    names = sorted(meta.tensors)
    staging = out.with_name(f".{out.name}.tmp")
    with staging.open("wb") as stream:
        stream.write(_header({name: meta.tensors[name] for name in names}))
        for batch in _batches(names, lambda name: _bytes(meta.tensors[name])):
            tensors = {name: _empty(meta.tensors[name]) for name in batch}
            read_alone(checkpoint, {name: Shards.whole(tensor) for name, tensor in tensors.items()})
            for tensor in tensors.values():
                stream.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
        stream.flush()
        os.fsync(stream.fileno())
    staging.rename(out)
    return meta


def whole(checkpoint: Path) -> Meta:
    """The metadata of a checkpoint all of whose files have their sha256.

    Raises:
        UserError: code 8, they have not.
    """
    try:
        meta, _ = read_meta(checkpoint)
        problems = verify_files(checkpoint, meta, sorted(meta.files))
    except IncompleteError as error:
        problems = [str(error)]
    if problems:
        raise UserError([Problem(str(checkpoint), p, rule="CKPT-5") for p in problems], code=8)
    return meta


def _header(tensors: dict[str, TensorInfo]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, info in tensors.items():
        end = start + _bytes(info)
        entries[name] = {"dtype": DTYPES[info.dtype], "shape": info.shape, "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes(info: TensorInfo) -> int:
    size: int = _dtype(info).itemsize
    for dim in info.shape:
        size *= dim
    return size


def _dtype(info: TensorInfo) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, info.dtype)
    return dtype


def _empty(info: TensorInfo) -> Tensor:
    return torch.empty(info.shape, dtype=_dtype(info))


def _batches(names: list[str], size: Callable[[str], int]) -> Iterator[list[str]]:
    """Runs of names of at most `BATCH` bytes, of one name at least."""
    batch: list[str] = []
    total = 0
    for name in names:
        if batch and total + size(name) > BATCH:
            yield batch
            batch, total = [], 0
        batch.append(name)
        total += size(name)
    yield batch
