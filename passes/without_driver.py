"""Stands in for the methods of tensors that ask the driver for the tensor's device.

Code for a GPU can be made where none is, on fake tensors; there is no driver then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_ATEN = torch.ops.aten


class WithoutDriver(TorchFunctionMode):
    """Lets these methods be computed by ATen's ops."""

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        stands_in = None if kwargs else _METHODS.get(func)
        return stands_in(*args) if stands_in else func(*args, **(kwargs or {}))


def contiguous(x: Tensor) -> Tensor:
    """``x.contiguous()``."""
    if x.is_contiguous():
        return x
    made: Tensor = _ATEN.clone.default(x, memory_format=torch.contiguous_format)
    return made


def item(x: Tensor, index: Any) -> Any:
    """``x[index]``, by views, and by ``index`` where tensors are among the indices."""
    indices = list(index) if isinstance(index, tuple) else [index]
    if any(isinstance(one, (bool, list, range)) for one in indices):
        return _plain(x, index)
    taken = sum(one is not None and one is not Ellipsis for one in indices)
    rest = [slice(None)] * (x.dim() - taken)
    if Ellipsis not in [one for one in indices if not isinstance(one, Tensor)]:
        indices.append(Ellipsis)
    at = next(i for i, one in enumerate(indices) if one is Ellipsis)
    indices[at : at + 1] = rest
    dim, tensors = 0, dict[int, Tensor]()
    for one in indices:
        if one is None:
            x = _ATEN.unsqueeze.default(x, dim)
        elif isinstance(one, slice):
            if one != slice(None):
                x = _ATEN.slice.Tensor(x, dim, one.start, one.stop, one.step or 1)
        elif isinstance(one, Tensor):
            tensors[dim] = one
        else:
            x = _ATEN.select.int(x, dim, one)
            continue
        dim += 1
    if not tensors:
        return _ATEN.alias.default(x)
    return _ATEN.index.Tensor(x, [tensors.get(i) for i in range(max(tensors) + 1)])


def _plain(x: Tensor, index: Any) -> Any:
    get: Callable[[Tensor, Any], Any] = Tensor.__getitem__
    with torch._C.DisableTorchFunctionSubclass():
        return get(x, index)


_METHODS: dict[Any, Callable[..., Any]] = {
    Tensor.__getitem__: item,
    Tensor.contiguous: contiguous,
}
