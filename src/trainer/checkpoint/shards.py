"""Tensors in shards to and from a directory, by `torch.distributed.checkpoint` (DCP).

The one file that knows DCP. It is fed by planners of ours, built from its public planner classes: what a rank
holds is a list of boxes of named global tensors, whatever DTensor, stack or stage they are views of, so names
and files know no mesh (CKPT-1). A box that several ranks hold is written by the first of them (CKPT-11).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from src.trainer.parallel.halves import Halves, View, whole
from src.trainer.runtime import Runtime

METADATA = ".metadata"
"""DCP's own file: which box of which tensor lies where."""


@dataclass(frozen=True)
class Shards:
    """What this rank holds of one global tensor."""

    shape: tuple[int, ...]
    """Of the whole tensor."""
    boxes: list[tuple[tuple[int, ...], View]]
    """Offsets in the whole tensor and a view of the local memory, for each box; none is empty."""

    @classmethod
    def whole(cls, tensor: Tensor) -> Shards:
        """A tensor that this process holds in one piece."""
        return cls(tuple(tensor.shape), [((0,) * tensor.dim(), tensor)])

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the tensor."""
        return self.boxes[0][1].dtype


@dataclass(frozen=True)
class Written:
    """What a call of `write` put into the directory."""

    files: list[str]
    """Names of the files that this rank wrote."""
    tensors: dict[str, tuple[tuple[int, ...], str]]
    """Global shape and dtype of every tensor of every rank."""


def write(
    directory: Path, tensors: Mapping[str, Shards], runtime: Runtime, hook: Callable[[str], None]
) -> Written:
    """Write all ranks' shards and DCP's metadata, each file fsynced; a collective.

    Args:
        hook: called with ``item`` before each box is written (for tests).

    Raises:
        OSError: the system would not let some rank write, for want of space or otherwise; on every rank.
        RuntimeError: some rank could not write for another reason; on every rank.
    """
    writer = _Writer(directory)
    with _plain_errors(f"checkpoint {directory} could not be written"):
        metadata = save(
            {}, storage_writer=writer, planner=_SavePlanner(tensors, hook), no_dist=runtime.world == 1
        )
    files = sorted(writer.files) + ([METADATA] if runtime.rank == 0 else [])
    return Written(files, _describe(metadata))


def read(directory: Path, tensors: Mapping[str, Shards], runtime: Runtime) -> None:
    """Fill this rank's shards from `directory`, reading only what they overlap; a collective.

    Names, shapes and dtypes must be known to match: DCP ignores names it was not asked for and casts dtypes.

    Raises:
        RuntimeError: some rank could not read; on every rank.
    """
    _load(directory, tensors, alone=runtime.world == 1)


def read_alone(directory: Path, tensors: Mapping[str, Shards]) -> None:
    """`read` by this process alone, outside any run."""
    _load(directory, tensors, alone=True)


def _load(directory: Path, tensors: Mapping[str, Shards], alone: bool) -> None:
    with _plain_errors(f"checkpoint {directory} could not be read"):
        reader = FileSystemReader(directory)
        load({}, storage_reader=reader, planner=_LoadPlanner(tensors), no_dist=alone)


def files_read(directory: Path, tensors: Mapping[str, Shards]) -> list[str]:
    """Data files that `read` would open on this rank for those of `tensors` that the checkpoint has."""
    metadata = FileSystemReader(directory).read_metadata()
    known = {name: shards for name, shards in tensors.items() if name in metadata.state_dict_metadata}
    places = metadata.storage_data
    return sorted({places[item.storage_index].relative_path for item in _read_items(metadata, known)})


def _tensors(metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    return cast(dict[str, TensorStorageMetadata], metadata.state_dict_metadata)


def _describe(metadata: Metadata) -> dict[str, tuple[tuple[int, ...], str]]:
    return {
        name: (tuple(info.size), str(info.properties.dtype).removeprefix("torch."))
        for name, info in sorted(_tensors(metadata).items())
    }


@contextmanager
def _plain_errors(what: str) -> Iterator[None]:
    """DCP's error is a BaseException, which would pass `except Exception`; its warning is noise here."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as error:
        causes = [cause for cause, _ in error.failures.values()]
        system = next((cause for cause in causes if isinstance(cause, OSError)), None)
        raise system or RuntimeError(f"{what}: {error}") from error


@contextmanager
def _system_errors() -> Iterator[None]:
    """On a full disk torch's archive writer complains of a wrong position; the reason is behind that."""
    try:
        yield
    except RuntimeError as error:
        reason: BaseException | None = error
        while reason is not None and not isinstance(reason, OSError):
            reason = reason.__cause__ or reason.__context__
        raise reason or error from None


class _Writer(FileSystemWriter):
    """DCP's writer of one file per rank, which tells its files and makes none for a rank without boxes."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, single_file_per_rank=True, sync_files=True)
        self.files: set[str] = set()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        if not plan.items:
            nothing: Future[list[WriteResult]] = Future()
            nothing.set_result([])
            return nothing
        with _system_errors():
            results = super().write_data(plan, planner)
            self.files.update(result.storage_data.relative_path for result in results.wait())
        return results


class _SavePlanner(SavePlanner):
    def __init__(self, tensors: Mapping[str, Shards], hook: Callable[[str], None]) -> None:
        self._tensors = tensors
        self._hook = hook
        self._views: dict[MetadataIndex, View] = {}

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        for name, shards in self._tensors.items():
            for offsets, view in shards.boxes:
                self._views[MetadataIndex(name, offsets)] = view

    def create_local_plan(self) -> SavePlan:
        return SavePlan([_write_item(i, view, self._tensors[i.fqn].shape) for i, view in self._views.items()])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = create_default_global_save_plan(_first_holders(all_plans))
        _check_cover(metadata)
        return plans, metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        self._hook("item")
        return whole(self._views[write_item.index]).detach()


def _write_item(index: MetadataIndex, view: View, shape: tuple[int, ...]) -> WriteItem:
    assert index.offset is not None
    data = TensorWriteData(
        chunk=ChunkStorageMetadata(offsets=index.offset, sizes=view.shape),
        properties=TensorProperties(dtype=view.dtype),
        size=torch.Size(shape),
    )
    return WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data)


def _first_holders(plans: list[SavePlan]) -> list[SavePlan]:
    """Leave each box to the first rank that holds it: replica 0, since rep is an outer axis of the mesh."""
    taken: set[MetadataIndex] = set()
    kept = []
    for plan in plans:
        mine = [item for item in plan.items if item.index not in taken]
        taken.update(item.index for item in mine)
        kept.append(replace(plan, items=mine))
    return kept


def _check_cover(metadata: Metadata) -> None:
    """Every tensor is filled: boxes lie inside it and have its volume together."""
    for name, info in _tensors(metadata).items():
        inside = all(
            start >= 0 and start + size <= whole
            for box in info.chunks
            for start, size, whole in zip(box.offsets, box.sizes, info.size, strict=True)
        )
        volume = sum(box.sizes.numel() for box in info.chunks)
        if not inside or volume != info.size.numel():
            raise ValueError(f"shards of {name} {tuple(info.size)} do not fill it: {info.chunks}")


class _LoadPlanner(LoadPlanner):
    def __init__(self, tensors: Mapping[str, Shards]) -> None:
        self._tensors = tensors
        self._views = {
            MetadataIndex(name, offsets): view
            for name, shards in tensors.items()
            for offsets, view in shards.boxes
        }
        self._metadata: Metadata | None = None

    def set_up_planner(
        self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        assert self._metadata is not None
        return LoadPlan(_read_items(self._metadata, self._tensors))

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise AssertionError(f"{read_item} is no tensor")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        view = self._view(read_item)
        if isinstance(view, Halves):  # DCP copies into what it gets.
            return torch.empty(view.shape, dtype=view.dtype)
        return view.detach()

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        view = self._view(read_item)
        if isinstance(view, Halves):
            view.copy_(tensor)

    def _view(self, read_item: ReadItem) -> View:
        places = zip(read_item.dest_offsets, read_item.lengths, strict=True)
        return self._views[read_item.dest_index][tuple(slice(start, start + n) for start, n in places)]


def _read_items(metadata: Metadata, tensors: Mapping[str, Shards]) -> list[ReadItem]:
    items: list[ReadItem] = []
    for name, shards in tensors.items():
        boxes = [ChunkStorageMetadata(torch.Size(offsets), view.shape) for offsets, view in shards.boxes]
        items += create_read_items_for_chunk_list(name, _tensors(metadata)[name], boxes)
    return items
