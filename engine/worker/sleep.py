"""Takes weights and KV cache off the device while an engine sleeps, and brings them back.

A storage is emptied and filled again in place, so that every tensor over it stays what it was: the
program and the modules need not be told.  Its address may change, which only captured graphs
remember, so these are captured anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, UntypedStorage

from ...compiler.capture.source import WEIGHTS
from ...compiler.run.program import Program
from ...config import UserError
from ...model_executor.loader import Model, out_of_memory

PARTS = ("weights", "kv_cache")
"""These parts sleep; each may be woken by itself."""


@dataclass
class Sleeping:
    """The record says what is off the device.

    Attributes:
        parts: those of ``PARTS`` that sleep.
        reads: the weights are read from their files again; else ``copies`` has them.
    """

    parts: set[str] = field(default_factory=set)
    reads: bool = False
    copies: list[tuple[UntypedStorage, Tensor]] = field(default_factory=list)


def drop_weights(model: Model, *, keep: bool) -> list[tuple[UntypedStorage, Tensor]]:
    """Free the device memory of a model's weights.

    Args:
        keep: copy them to the host's memory first, pinned if the device is a GPU.

    Returns:
        Each storage with its bytes, which ``restore_weights`` takes; none unless ``keep``.

    Raises:
        UserError: the host has no room for them.
    """
    storages = list(_storages(model))
    with _having_room("the host", storages):
        copies = [(storage, _copy(storage)) for storage in storages] if keep else []
    _synchronize()
    for storage in storages:
        storage.resize_(0)
    return copies


def restore_weights(copies: list[tuple[UntypedStorage, Tensor]]) -> None:
    """Fill storages again with the bytes that ``drop_weights`` has kept.

    Raises:
        UserError: the device has no room for them; call it again when it has.
    """
    with _having_room("the device", [copy.untyped_storage() for _, copy in copies]):
        for storage, copy in copies:
            storage.resize_(copy.numel())
            _bytes(storage).copy_(copy, non_blocking=True)
    _synchronize()
    copies.clear()
    if torch.cuda.is_available():
        torch._C._host_emptyCache()  # else torch keeps the pinned memory


def read_weights(model: Model, program: Program, load: Callable[[], Model]) -> None:
    """Give the tensors of a model the memory of one that is loaded anew, and bind them to its
    program, which computes its constants from them."""
    fresh = dict(_tensors(load()))
    for name, tensor in _tensors(model):
        tensor.data = fresh[name].data
    program.bind({WEIGHTS + name: tensor for name, tensor in _tensors(model)})


def _tensors(model: Model) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _storages(model: Model) -> Iterator[UntypedStorage]:
    """The storages of a model's tensors, each once; not those whose memory is another's."""
    seen: set[int] = set()
    for _, tensor in _tensors(model):
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.resizable() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            yield storage


def _bytes(storage: UntypedStorage) -> Tensor:
    empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return empty.set_(storage, 0, (storage.nbytes(),), (1,))


def _copy(storage: UntypedStorage) -> Tensor:
    pinned = storage.device.type == "cuda"
    host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pinned)
    return host.copy_(_bytes(storage), non_blocking=True)


@contextmanager
def _having_room(place: str, storages: Iterable[UntypedStorage]) -> Iterator[None]:
    needed = sum(storage.nbytes() for storage in storages)
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        raise UserError(
            f"{place} has no room for {needed / 1e9:.2f} GB of weights; free memory there"
        ) from error


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
