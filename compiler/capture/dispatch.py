"""Captures a model as one FX graph by running it on fake tensors of symbolic sizes.

The model's Python runs as it is written, and every op that reaches the dispatcher becomes a node.
So no bytecode is read, and nothing can break the graph but code that depends on data.  Captured
are ATen ops; ``respell`` gives them the spelling of Dynamo's graphs, which passes and emitters
read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_map

from ...config import Per
from ...passes.without_driver import WithoutDriver
from .respell import respell
from .source import WEIGHTS
from .trace import GraphInput, Traced, TraceError

_STACK = "nn_module_stack"


def trace_by_dispatch(
    model: nn.Module,
    args: tuple[Any, ...],
    named: Mapping[str, Tensor],
    dynamic: Mapping[str, Mapping[int, str]],
    why: Callable[[BaseException], str],
    is_used: Callable[[str], bool] = lambda name: True,
) -> Traced:
    """Capture ``model(*args)``; arguments and result are those of ``trace``.

    Args:
        why: an error of the model's code in one line.
        is_used: whether an input is one of the graph, by its name; the model has None for others.

    Raises:
        TraceError: the model's code depends on data, or on a size that differs between steps.
    """
    from torch._dispatch.python import enable_python_dispatcher
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    # To enter a value of symbolic sizes into its cache takes longer than to compute the value.
    mode.cache_enabled = False
    sizes: dict[str, tuple[torch.SymInt, GraphInput]] = {}
    for name, tensor in named.items():
        for dim, what in dynamic.get(name, {}).items():
            if what not in sizes:
                sizes[what] = _symbol(env, what, tensor.shape[dim]), GraphInput(name, dim)
    weights = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    weights = {name: tensor for name, tensor in weights.items() if is_used(WEIGHTS + name)}

    def like(tensor: Tensor, counts: Mapping[int, str]) -> Tensor:
        shape = [
            sizes[counts[dim]][0] if dim in counts else size
            for dim, size in enumerate(tensor.shape)
        ]
        with mode:
            if not counts:  # weights that a library transposes may lie in memory in another order
                return torch.empty_strided(
                    shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
                )
            return torch.empty(shape, dtype=tensor.dtype, device=tensor.device)

    inputs = {WEIGHTS + name: like(tensor, {}) for name, tensor in weights.items()}
    inputs |= {
        name: like(tensor, dynamic.get(name, {})) for name, tensor in named.items() if is_used(name)
    }
    names = {id(tensor): name for name, tensor in named.items()}

    def call(symbols: list[torch.SymInt], tensors: dict[str, Tensor]) -> Tensor:
        arguments = tree_map(
            lambda x: tensors.get(names[id(x)]) if isinstance(x, Tensor) else x, args
        )
        held = {name: tensors[WEIGHTS + name] for name in weights}
        with _paths(model), WithoutDriver():
            return torch.func.functional_call(model, held, arguments)  # type: ignore[no-any-return]

    try:
        with (
            torch.inference_mode(),
            mode,
            enable_python_dispatcher(),  # has definitions for symbolic sizes that C++ lacks
            fx.traceback.preserve_node_meta(),
        ):
            gm = make_fx(call, tracing_mode="real")([s for s, _ in sizes.values()], inputs)
    except Exception as error:
        raise TraceError(f"{type(model).__name__} cannot be captured: {why(error)}") from error
    sources = [source for _, source in sizes.values()] + [GraphInput(name) for name in inputs]
    dims = {str(symbol): what for what, (symbol, _) in sizes.items()}
    for what, (symbol, _) in sizes.items():
        if env.replace(symbol.node.expr).is_number:
            raise TraceError(f"the model made {what} static: {env.replace(symbol.node.expr)}")
        paths = [guard.expr for guard in env.guards if symbol.node.expr in guard.expr.free_symbols]
        if paths and what in Per.TOKEN.dims:
            raise TraceError(f"the model takes another path unless {what} satisfies {paths[0]}")
    return respell(Traced(gm, tuple(sources), dims))


def _symbol(env: Any, what: str, hint: int) -> torch.SymInt:
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    source = ConstantSource(what)
    symbol = env.create_symbol(hint, source, DimDynamic.DYNAMIC, constraint_dim=None)
    return env.create_symintnode(symbol, hint=hint, source=source)  # type: ignore[no-any-return]


@contextmanager
def _paths(model: nn.Module) -> Iterator[None]:
    """Let nodes say in which modules they were traced, as those that Dynamo makes do."""
    stack: dict[str, tuple[str, type]] = {}
    hooks = []

    def enter(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, *_: Any) -> None:
            stack[path] = (f"L['self'].{path}" if path else "", type(module))
            fx.traceback.current_meta[_STACK] = dict(stack)

        return hook

    def leave(path: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            stack.pop(path, None)
            fx.traceback.current_meta[_STACK] = dict(stack)

        return hook

    for path, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(enter(path)))
        hooks.append(module.register_forward_hook(leave(path)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        fx.traceback.current_meta.pop(_STACK, None)
