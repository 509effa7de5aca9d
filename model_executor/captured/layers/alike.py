"""Finds the layers of a model that compute the same with weights of their own.

While a model runs once without data, every op of a layer is written down with its constants and
with what it reads: a weight of the layer by its name in the layer, a result of the layer by its
number, a value of the model by what it is, and what the layer before passes on.  Layers of one
record are one graph with other weights, so one of them stands for all.  Nothing is concluded from
classes, attributes or configurations.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..interfaces import AttentionCall


class _UndividedError(Exception):
    """The model does more than to call its layers one after the other; the text says what."""


@dataclass
class _Layer:
    """The record says what a layer did, an op or a call of attention at a time.  ``carried`` and
    ``passed`` are what the layer before and it itself pass on."""

    record: list[Any] = field(default_factory=list)
    made: int = 0
    calls: int = 0
    carried: Tensor | None = None
    passed: Tensor | None = None


def first_tensor(values: Any) -> Tensor | None:
    """The first tensor among arguments or results: what a layer works on, and what it passes on."""
    return next((leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)), None)


class LayerRecords(TorchDispatchMode):
    """Writes down what the layers of a model do while it runs once in this mode.

    Attributes:
        layers: name of the outermost list of modules that is the longest.
        undivided: why no layer can stand for others; "" if one can.
    """

    def __init__(self, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        """``tensors`` are the parameters and buffers that the model runs with, by name."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.layers, self.undivided = _outermost(model), ""
        self._names = {id(tensor): name for name, tensor in tensors.items()}
        self._shapes = {n: (tuple(t.shape), str(t.dtype)) for n, t in tensors.items()}
        stack: Any = model.get_submodule(self.layers) if self.layers else ()
        self._all = [_Layer() for _ in stack]
        self._made: dict[int, tuple[Tensor, int | None, int]] = {}
        self._memory = {tensor.untyped_storage()._cdata: 0 for tensor in tensors.values()}
        self._begun, self._inside, self._outside = 0, False, 0
        self._hooks = [
            hook
            for number, layer in enumerate(stack)
            for hook in (
                layer.register_forward_pre_hook(self._enter(number), with_kwargs=True),
                layer.register_forward_hook(self._leave(number)),
            )
        ]

    def kinds(self) -> tuple[int, ...]:
        """For each layer, the first one that computes the same; ends the watch."""
        for hook in self._hooks:
            hook.remove()
        if self._begun < len(self._all):
            self._undivide(f"layer {self._begun} does not run")
        for number, layer in enumerate(self._all):
            if layer.calls != 1:
                self._undivide(f"layer {number} calls attention {layer.calls} times")
        seen: dict[str, int] = {}
        kinds = []
        for number, layer in enumerate(self._all):
            text = repr((layer.record, self._own_shapes(number)))
            kinds.append(seen.setdefault(hashlib.sha256(text.encode()).hexdigest(), number))
        return tuple(kinds)

    def attention(self, call: AttentionCall) -> None:
        """Write down a call of attention."""
        if self._inside:
            self._all[self._begun - 1].calls += 1
        read = [call.q, call.k, call.v, call.sinks]
        self._write(("attention", call.facts, call.scale, call.soft_cap, *map(self._label, read)))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable:
            self._check_written(func, args)
        self._write((func, self._described(args), self._described(kwargs)))
        out = func(*args, **kwargs) if kwargs else func(*args)
        for tensor in (out,) if isinstance(out, Tensor) else tree_leaves(out):
            if isinstance(tensor, Tensor) and id(tensor) not in self._made:
                self._number(tensor)
        return out

    def _check_written(self, func: Any, args: Any) -> None:
        """A layer may write to what it has made alone, and the model to nothing between layers."""
        written = [a.name for a in func._schema.arguments if a.is_write]
        own = written == [func._schema.arguments[0].name] and self._owner(args[0]) == self._begun
        if self._inside and not own:
            self._undivide(f"layer {self._begun - 1} writes by {func} to what it has not made")
        elif not self._inside and 0 < self._begun < len(self._all):
            self._undivide(f"the model writes by {func} between its layers")

    def _owner(self, tensor: Tensor) -> int:
        """The number of layers that had begun when memory was made."""
        return self._memory.get(tensor.untyped_storage()._cdata, 0)

    def _described(self, arg: Any) -> Any:
        if isinstance(arg, Tensor):
            return self._label(arg)
        if isinstance(arg, (list, tuple)):
            return tuple(map(self._described, arg))
        return tuple(map(self._described, arg.items())) if isinstance(arg, dict) else arg

    def _write(self, entry: Any) -> None:
        if self._inside:
            self._all[self._begun - 1].record.append(entry)

    def _number(self, tensor: Tensor) -> None:
        self._memory.setdefault(tensor.untyped_storage()._cdata, self._begun)
        if self._inside:
            number = self._begun - 1
            self._all[number].made += 1
            self._made[id(tensor)] = tensor, number, self._all[number].made
            return
        # A number that no layer knows, for what the model computes after its layers began.
        self._outside = -1 if self._begun else self._outside + 1
        self._made[id(tensor)] = tensor, None, self._outside

    def _label(self, tensor: Tensor | None) -> Any:
        """What a tensor is, in words that are the same in every layer of a kind."""
        if tensor is None:
            return None
        now = self._begun - 1
        if (name := self._names.get(id(tensor))) is not None:
            return self._label_of_weight(name, now)
        if id(tensor) not in self._made:
            return self._label_of_constant(tensor)
        _, layer, number = self._made[id(tensor)]
        if not self._inside:
            if layer is not None and self._all[-1].passed is not tensor:
                self._undivide(f"the model itself reads a result of layer {layer}")
            return ("outer", number)
        if tensor is self._all[now].carried:
            return "carried"
        if layer == now:
            return ("made", number)
        if layer is not None:
            self._undivide(f"layer {now} reads more of layer {layer} than what is passed on")
        elif number < 0:
            self._undivide(f"layer {now} reads what the model computes between its layers")
        return ("outer", number)

    def _label_of_weight(self, name: str, now: int) -> Any:
        own = f"{self.layers}.{now}."
        if not self._inside or not name.startswith(f"{self.layers}."):
            return ("model", name)
        if not name.startswith(own):
            self._undivide(f"layer {now} reads {name}")
        return ("own", name.removeprefix(own))

    def _label_of_constant(self, tensor: Tensor) -> Any:
        if isinstance(tensor, FakeTensor) or tensor.is_meta:
            self._undivide("a tensor is read that is neither a weight nor a result")
            return "unknown"
        with torch._C._DisableTorchDispatch():
            values = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
            return (str(tensor.dtype), tuple(tensor.shape), bytes(values.tolist()))

    def _own_shapes(self, number: int) -> list[Any]:
        own = f"{self.layers}.{number}."
        return [
            (name.removeprefix(own), *shape)
            for name, shape in self._shapes.items()
            if name.startswith(own)
        ]

    def _undivide(self, reason: str) -> None:
        self.undivided = self.undivided or reason

    def _enter(self, number: int) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if self._inside or number != self._begun:
                self._undivide(f"layer {number} runs out of its order, or again")
                return
            carried = first_tensor((args, kwargs))
            if carried is None or (number and self._all[number - 1].passed is not carried):
                self._undivide(f"layer {number} does not begin with what the one before passes on")
            self._all[number].carried = carried
            self._begun, self._inside = number + 1, True

        return hook

    def _leave(self, number: int) -> Any:
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            self._inside = False
            self._all[number].passed = first_tensor(out)

        return hook


def _outermost(model: nn.Module) -> str:
    """The name of the longest list of modules that is in no other; "" if there is none."""
    lists: dict[str, int] = {}
    for name, module in model.named_modules():
        within = any(name.startswith(f"{other}.") for other in lists)
        if isinstance(module, nn.ModuleList) and not within:
            lists[name] = len(module)
    return max(lists, key=lambda name: lists[name], default="")
