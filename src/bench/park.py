"""Host memory in which the tensors of an idle side wait, so that the other's peak is its own (BENCH-3).

A tensor's storage is emptied and filled again. Every object that looks at it (a parameter, the optimizer's
detached alias of it, compiled code) stays the one it was.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, UntypedStorage

SMALLEST = 1 << 20
"""Bytes below which a storage stays where it is."""
ALIGNMENT = 256
OURS = ("src.", "torch.nn.", "torch.optim.", "torch.distributed.", "transformers.")
"""Modules whose objects are looked into; a class or a function is not, for that would reach every global."""


class Garage:
    """Parks groups of storages by name. Host memory is pinned once and used again."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        self._parked: dict[str, tuple[Tensor, list[tuple[UntypedStorage, int]]]] = {}

    def holds(self, name: str) -> bool:
        """Whether the storages of that name are away."""
        return name in self._parked

    def park(self, name: str, storages: Iterable[UntypedStorage]) -> None:
        """Copy the storages to the host and give their device memory back."""
        assert name not in self._parked, name
        sized = [(storage, storage.nbytes()) for storage in storages]
        slab = self._take(sum(_aligned(size) for _, size in sized))
        for place, (storage, _) in zip(_places(slab, sized), sized, strict=True):
            place.copy_(_bytes(storage))
            storage.resize_(0)
        self._parked[name] = slab, sized
        torch.cuda.empty_cache()

    def bring_back(self, name: str) -> None:
        """Give the storages their memory again, with the content they had."""
        slab, sized = self._parked.pop(name)
        for place, (storage, size) in zip(_places(slab, sized), sized, strict=True):
            storage.resize_(size)
            _bytes(storage).copy_(place)
        self._free.append(slab)

    def forget(self, name: str) -> None:
        """Drop what is parked by that name, if anything is."""
        if name in self._parked:
            self._free.append(self._parked.pop(name)[0])

    def _take(self, size: int) -> Tensor:
        """A free slab that is large enough; those that are too small go before a new one comes."""
        fitting = [slab for slab in self._free if slab.numel() >= size]
        self._free = []
        return fitting[0] if fitting else _pinned(size)


def storages(*roots: object) -> list[UntypedStorage]:
    """The storages of at least `SMALLEST` bytes that the objects hold, each once."""
    found = {}
    for tensor in tensors(*roots):
        storage = tensor.untyped_storage()
        if storage.nbytes() >= SMALLEST:
            found[storage.data_ptr()] = storage
    return list(found.values())


def tensors(*roots: object) -> Iterator[Tensor]:
    """Every tensor that the objects hold in attributes, mappings and sequences, gradients included."""
    seen: dict[int, object] = {}  # The objects too: an id is given again once its object is gone.
    waiting: list[Any] = list(roots)
    while waiting:
        item = waiting.pop()
        if id(item) in seen:
            continue
        seen[id(item)] = item
        if isinstance(item, Tensor):
            local = getattr(item, "_local_tensor", None)
            if local is None:
                yield item
            waiting += [part for part in (local, item.grad if item.is_leaf else None) if part is not None]
        elif isinstance(item, Mapping):
            waiting += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple | set):
            waiting += item
        elif type(item).__module__.startswith(OURS):
            waiting += [*getattr(item, "__dict__", {}).values(), *_slots(item)]


def _slots(item: object) -> Iterator[object]:
    names = [name for cls in type(item).__mro__ for name in getattr(cls, "__slots__", ())]
    return (getattr(item, name) for name in names if isinstance(name, str) and hasattr(item, name))


def _places(slab: Tensor, sized: Iterable[tuple[UntypedStorage, int]]) -> Iterator[Tensor]:
    start = 0
    for _, size in sized:
        yield slab[start : start + size]
        start += _aligned(size)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _bytes(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _pinned(size: int) -> Tensor:
    """Host memory of exactly `size` bytes; torch's own pinned memory comes in powers of two.

    Writing it first lets all threads find the pages, which takes pinning many times as long. It is unpinned
    when it goes: CUDA fails later, and elsewhere, if pages that it holds are given to somebody else.
    """
    slab = torch.empty(size, dtype=torch.uint8).fill_(0)
    if size and torch.cuda.is_available():
        result = torch.cuda.cudart().cudaHostRegister(slab.data_ptr(), size, 0)  # type: ignore[no-untyped-call]
        if int(result) != 0:
            print(f"{size >> 30} GiB of host memory could not be pinned ({result}): parking is slow")
        else:
            weakref.finalize(slab, _unpin, slab.data_ptr()).atexit = False
    return slab


def _unpin(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
