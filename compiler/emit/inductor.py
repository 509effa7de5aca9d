"""Compiles a piece with Inductor and keeps what runs, its ``call`` and its kernels, as files.

Inductor writes a Python module that calls its kernels in turn; that module imports Inductor, which
compiles or finds the kernels.  Here only the function is kept, its kernels are taken out of the
loaded module, and ``runtime`` provides the rest: a name that it does not know is an error.
"""

from __future__ import annotations

import ast
import builtins
import copy
import inspect
import re
import symtable
import unittest.mock
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensor

from ...passes import Subgraph, fake_value
from ..run import runtime
from .cpp_compiler import machine_faults
from .inductor_triton import choose_configurations, triton_kernel
from .piece_code import (
    EmitError,
    PieceCode,
    describe,
    module_docstring,
    output_values,
    placeholders,
)

MAX_SIZE = 2**14
"""Largest dynamic size that compiled code must be valid for."""
_SIZES = (1, 2, 3, 17, 300, MAX_SIZE)


@dataclass(frozen=True)
class InductorModule:
    """Inductor's loaded module for one piece, and what its ``call`` expects.

    ``check`` has the indices of inputs that its kernels take to be aligned, ``mutated`` of those
    that they write to.
    """

    source: str
    module: Mapping[str, Any]
    call: Callable[..., Any]
    check: frozenset[int]
    mutated: frozenset[int]


def emit_inductor(piece: Subgraph, dims: Mapping[str, str], *, tune: bool) -> PieceCode:
    """Compile ``piece`` into a module that needs torch and ``runtime``.

    Args:
        dims: name of each size symbol, for names and comments.
        tune: search each Triton kernel's configuration by coordinate descent.

    Raises:
        EmitError: Inductor's code needs something that the runtime does not have, or holds for
            some sizes only.
        MachineError: there is no C++ compiler that works, or no space for its files.
    """
    compiled = compile_piece(piece, tune=tune)
    tree = ast.parse(compiled.source)
    kernels: list[str] = []
    files: dict[str, bytes] = {}
    for name, kind, text in _kernel_definitions(tree):
        suffix, construct, more = _kernel(name, kind, compiled.module[name])
        kernels.append(construct)
        files |= more | {f"{name}.{suffix}": text.encode()}
    call = _rewrite_call(piece, compiled, tree, dims)
    body = "\n".join([*kernels, "", call])
    how = (
        f"Compiled by Inductor, torch {torch.__version__}; kernels lie beside this file and are\n"
        "read through `kernel_files`, which the loader puts here."
    )
    values = {n.name: fake_value(n) for n in placeholders(piece)}
    sizes = [
        f"{n}_1 = {describe(v, dims)}" for n, v in values.items() if isinstance(v, torch.SymInt)
    ]
    imports = runtime_imports(body)
    return PieceCode(f"{module_docstring(piece, how, sizes)}\n{imports}\n{body}", "inductor", files)


def compile_piece(piece: Subgraph, *, tune: bool) -> InductorModule:
    """Compile ``piece`` into Inductor's module, and choose its kernels' configurations."""
    from torch._inductor import config
    from torch._inductor.codegen import simd
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    recorded: list[InductorModule] = []

    def record(gm: fx.GraphModule, example_inputs: Any, **options: Any) -> Any:
        _check_signature(piece, gm)
        result: Any = compile_fx_inner(gm, example_inputs, **options)
        recorded.append(_loaded(result))
        return result

    options = {
        "coordinate_descent_tuning": tune,
        "graph_partition": False,  # else `call` is a class of several
        "triton.store_cubin": True,  # else kernels drop their machine code once loaded
        # Trust the processor's flags: trying each instruction set costs g++ 7 s on a cold start.
        "cpp.vec_isa_ok": True,
    }
    examples = [fake_value(node) for node in placeholders(piece)]
    tensors = [value for value in examples if isinstance(value, FakeTensor)]
    fake_mode = tensors[0].fake_mode
    guards = fake_mode.shape_env.guards if fake_mode.shape_env else []
    known = len(guards)
    with (
        torch.inference_mode(),
        config.patch(options),
        # Inductor asks the example's sizes, and adds a guard that larger ones break.
        unittest.mock.patch.object(simd, "expr_fits_within_32bit", fits_32_bits),
        # A hit in this cache would return the outer wrapper without calling `record`.
        torch._functorch.config.patch(enable_autograd_cache=False),
        torch._guards.tracing(torch._guards.TracingContext(fake_mode)),
    ):
        with machine_faults(needs_cpp=all(v.device.type == "cpu" for v in tensors)):
            compile_fx(copy.deepcopy(piece.module), examples, inner_compile=record)
        (compiled,) = recorded
        choose_configurations(compiled.module, compiled.call, examples)
    check_guards(guards[known:])
    return compiled


def fits_32_bits(expr: sympy.Expr) -> bool:
    """Whether a count of elements is below 2**31 at every size; else indices have 64 bits."""
    largest = expr.subs(dict.fromkeys(expr.free_symbols, MAX_SIZE))
    return bool(largest <= torch.iinfo(torch.int32).max)


def _loaded(result: Any) -> InductorModule:
    call = result.current_callable
    while (wrapped := inspect.getclosurevars(call).nonlocals.get("model")) is not None:
        call = wrapped
    if result.constants:
        raise EmitError(
            f"a piece holds the constants {', '.join(result.constants)}: make them buffers of the "
            "model, which are inputs"
        )
    return InductorModule(
        source=result.source_code,
        module=call.__globals__,
        call=result.current_callable,
        check=frozenset(result.inputs_to_check),
        mutated=frozenset(result.mutated_input_idxs),
    )


def _check_signature(piece: Subgraph, gm: fx.GraphModule) -> None:
    """Refuse a graph whose inputs or outputs AOTAutograd has changed: its wrapper would make up for
    that, and our code has none."""
    values = [n.meta["val"] for n in gm.graph.find_nodes(op="placeholder")]
    (output,) = gm.graph.find_nodes(op="output")
    returned: Any = output.args[0]
    outputs = [n.meta["val"] for n in returned]
    for what, ours, theirs in (
        ("inputs", [fake_value(n) for n in placeholders(piece)], values),
        ("outputs", output_values(piece), outputs),
    ):
        if [_layout(v) for v in ours] != [_layout(v) for v in theirs]:
            raise EmitError(
                f"AOTAutograd changed the {what} of a piece from {describe(ours, {})} to "
                f"{describe(theirs, {})}: split the graph elsewhere"
            )


def _layout(value: Any) -> Any:
    if isinstance(value, Tensor):
        return str(value.dtype), [str(d) for d in value.shape], [str(s) for s in value.stride()]
    return str(value)


def check_guards(guards: list[Any]) -> None:
    """Refuse code for which Inductor assumed something that does not hold for every size."""
    for guard in guards:
        for size in _SIZES:
            if guard.expr.subs(dict.fromkeys(guard.expr.free_symbols, size)) is sympy.false:
                raise EmitError(
                    f"Inductor's code holds only if {guard.expr}, which it does not for {size}: "
                    "the program must run for every size"
                )


def _kernel_definitions(tree: ast.Module) -> Iterator[tuple[str, str, str]]:
    """(name, kind, source) of each ``name = async_compile.kind(…)``."""
    for node in tree.body:
        match node:
            case ast.Assign(
                targets=[ast.Name(id=name)],
                value=ast.Call(
                    func=ast.Attribute(value=ast.Name(id="async_compile"), attr=kind), args=args
                ),
            ):
                text = args[1].value if isinstance(args[1], ast.Constant) else ""
                yield name, kind, str(text)


def _kernel(name: str, kind: str, kernel: Any) -> tuple[str, str, dict[str, bytes]]:
    """For one kernel: (suffix of its source, the expression that loads it, its files)."""
    if kind == "cpp_pybinding":
        library = Path(kernel.__self__.__file__).read_bytes()
        construct = f'{name} = cpp_kernel(kernel_files, "{name}.so")'
        return "cpp", construct, {f"{name}.so": library}
    if kind == "triton":
        construct, cubin = triton_kernel(name, kernel)
        return "triton.py", construct, {f"{name}.cubin": cubin}
    raise EmitError(f"Inductor made {name} by async_compile.{kind}: no loader for its kernels")


def _rewrite_call(
    piece: Subgraph, compiled: InductorModule, tree: ast.Module, dims: Mapping[str, str]
) -> str:
    """The text of ``call``, rewritten: its inputs are parameters, sizes have names, and it runs on
    the current device."""
    function = next(
        (n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "call"), None
    )
    match function.body[:2] if function else []:
        case [
            ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Name(id="args")),
            ast.Expr(value=ast.Call()) as clear,
        ]:
            names = [ast.unparse(target) for target in targets]
        case _:
            raise EmitError("Inductor's call() does not begin by unpacking its arguments")
    assert function is not None
    text = _Text(compiled.source)
    parameters = "".join(
        f"    {name},  # {describe(fake_value(node), dims)}\n"
        for name, node in zip(names, placeholders(piece), strict=True)
    )
    head = f"def call(\n{parameters}):" + _alignment(compiled, names)
    text.replace(function, clear, head)
    for node in (n for statement in function.body[2:] for n in ast.walk(statement)):
        if isinstance(node, ast.Name) and node.id in dims:
            text.replace(node, node, dims[node.id])
        elif isinstance(node, ast.Call) and (index := _device_index(node)) is not None:
            text.replace(index, index, "current_device()")
        elif isinstance(node, ast.For) and ast.unparse(node.iter) == "globals().values()":
            text.replace(node, node, "")  # it keeps the machine code of its kernels
    return re.sub(r"\n\s*\n", "\n", text.cut(function))


def _alignment(compiled: InductorModule, names: list[str]) -> str:
    """Code that checks the inputs that kernels take to be aligned, unless Inductor's code does."""
    lines = []
    for index in sorted(compiled.check):
        name = names[index]
        if index in compiled.mutated:
            lines.append(f'\n    require_aligned({name}, "{name}")')
        elif f"copy_if_misaligned({name})" not in compiled.source:
            lines.append(f"\n    {name} = copy_if_misaligned({name})")
    return "".join(lines)


_INDEXED = ("torch.cuda._DeviceGuard", "torch.cuda.set_device", "get_raw_stream")


def _device_index(call: ast.Call) -> ast.expr | None:
    """The argument of a call that names the GPU of the build; the piece may run on another one."""
    function = ast.unparse(call.func)
    if function in _INDEXED:
        return call.args[0]
    if function in ("device", "torch.device"):
        return next((k.value for k in call.keywords if k.arg == "index"), None)
    return None


class _Text:
    """Python source in which syntax nodes are replaced, and the rest stays as it was."""

    def __init__(self, source: str) -> None:
        self._source = source.encode()
        self._starts = [0, *(m.end() for m in re.finditer(b"\n", self._source))]
        self._edits: list[tuple[int, int, bytes]] = []

    def _start(self, node: Any) -> int:
        return self._offset(node.lineno, node.col_offset)

    def _end(self, node: Any) -> int:
        return self._offset(node.end_lineno, node.end_col_offset)

    def _offset(self, line: int, column: int) -> int:
        return self._starts[line - 1] + column

    def replace(self, first: ast.AST, last: ast.AST, text: str) -> None:
        """Replace the source from the start of ``first`` to the end of ``last`` by ``text``."""
        self._edits.append((self._start(first), self._end(last), text.encode()))

    def cut(self, node: ast.AST) -> str:
        """The text of ``node`` with all replacements, which must lie inside it."""
        parts, position = [], self._start(node)
        for start, end, text in sorted(self._edits):
            parts += [self._source[position:start], text]
            position = end
        return b"".join([*parts, self._source[position : self._end(node)], b"\n"]).decode()


def runtime_imports(body: str) -> str:
    """The import statements that ``body`` needs.

    Raises:
        EmitError: it reads a name that neither it nor torch nor the runtime defines.
    """
    tree = ast.parse(body)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            _check_attribute(node)
    free = _free_names(body) - set(dir(builtins)) - {"torch", "kernel_files"}
    if unknown := sorted(free - runtime.PROVIDED):
        raise EmitError(
            f"Inductor's code uses {', '.join(unknown)}, which {runtime.__name__} does not provide"
        )
    names = "".join(f"    {name},\n" for name in sorted(free))
    return f"import torch\n\nfrom {runtime.__name__} import (\n{names})\n"


def _check_attribute(node: ast.Attribute) -> None:
    text = ast.unparse(node)
    if text.startswith(("torch._inductor", "torch._dynamo", "torch.ops.inductor")):
        raise EmitError(f"Inductor's code uses {text}, which is not there without Inductor")
    owner, _, name = text.partition(".")
    if owner == "extern_kernels" and not hasattr(runtime.extern_kernels, name):
        raise EmitError(f"Inductor's code calls {text}, which {runtime.__name__} does not provide")


def _free_names(body: str) -> set[str]:
    """Names that a module reads and does not define."""
    table = symtable.symtable(body, "piece", "exec")
    defined = {s.get_name() for s in table.get_symbols() if s.is_assigned()}
    names: set[str] = set()
    pending = [table]
    while pending:
        scope = pending.pop()
        pending += scope.get_children()
        names |= {s.get_name() for s in scope.get_symbols() if s.is_referenced() and s.is_global()}
        if scope is table:
            names |= {s.get_name() for s in table.get_symbols() if s.is_referenced()}
    return names - defined
