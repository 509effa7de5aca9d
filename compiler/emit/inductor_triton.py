"""Turns Inductor's Triton kernels into cubins: which configuration won, and how it is launched."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .piece_code import EmitError

_SCALARS = ("i32", "i64", "fp32")
"""Types of run-time arguments, besides pointers, that the launcher packs."""


def choose_configurations(
    module: Mapping[str, Any], call: Callable[..., Any], examples: Sequence[Any]
) -> None:
    """Run the piece once if a kernel in ``module`` has yet to choose among its configurations.

    Args:
        call: takes the list of inputs.
        examples: fake values of the inputs.  The run is on data of their example sizes; integers
            are zero, so that every index is in range.
    """
    kernels = [value for value in module.values() if hasattr(value, "launchers")]
    if any(len(k.launchers) != 1 or _is_untuned(k) for k in kernels):
        with torch.inference_mode():
            call([_concrete(value) for value in examples])


def _is_untuned(kernel: Any) -> bool:
    tuned = getattr(kernel.launchers[0].config, "found_by_coordesc", False)
    return bool(kernel.inductor_meta.get("coordinate_descent_tuning")) and not tuned


def _concrete(value: Any) -> Any:
    if isinstance(value, torch.SymInt):
        return int(value.node.hint)
    if not isinstance(value, Tensor):
        return value
    shape = [int(_concrete(d)) for d in value.shape]
    stride = [int(_concrete(s)) for s in value.stride()]
    tensor = torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device)
    return (
        tensor.normal_()
        if value.dtype in (torch.float32, torch.bfloat16, torch.float16)
        else (tensor.zero_())
    )


def triton_kernel(name: str, kernel: Any) -> tuple[str, bytes]:
    """The Python statement that loads a tuned kernel, and the kernel's cubin.

    Args:
        kernel: Inductor's autotuner, with one launcher that keeps its binary.

    Raises:
        EmitError: the kernel needs something that our launcher does not provide.
    """
    (launcher,) = kernel.launchers
    binary = launcher.bin
    metadata = binary.metadata
    _check_launch(name, metadata)
    types = {str(key): str(kind) for key, kind in binary.src.signature.items()}
    taken = set(launcher.call_args)
    parameters = {arg: types[arg] if arg in taken else "constexpr" for arg in launcher.def_args}
    for arg, kind in parameters.items():
        if kind != "constexpr" and not kind.startswith("*") and kind not in _SCALARS:
            raise EmitError(f"{name} takes {arg} of type {kind}; expected one of {_SCALARS}")
    spelled = ", ".join(f'"{arg}": "{kind}"' for arg, kind in parameters.items())
    target = metadata.target
    lines = [
        f"{name} = cuda_kernel(",
        f'    kernel_files, "{name}.cubin",',
        f'    function="{metadata.name}", sm={target.arch},',
        f"    num_warps={metadata.num_warps}, shared_bytes={launcher.shared},",
        f"    parameters={{{spelled}}},",
        f"    grid=lambda {', '.join(parameters)}: {_grid(kernel, launcher.config)},",
        ")",
    ]
    return "\n".join(lines), bytes(binary.asm["cubin"])


def _check_launch(name: str, metadata: Any) -> None:
    """Refuse launches that need more than a grid of blocks and parameters."""
    expected = {
        "num_ctas": 1,
        "global_scratch_size": 0,
        "profile_scratch_size": 0,
        "launch_cooperative_grid": False,
        "launch_pdl": False,
    }
    for key, value in expected.items():
        if (actual := getattr(metadata, key, value)) != value:
            raise EmitError(f"{name} has {key}={actual}, expected {value}")


def _grid(kernel: Any, config: Any) -> str:
    """The grid as an expression of the kernel's arguments, by Inductor's own rules."""
    from torch._inductor.runtime.triton_heuristics import GridExpr

    grid = GridExpr.from_meta(kernel.inductor_meta, config, mode="python")
    sizes = f"({grid.x_grid}, {grid.y_grid}, {grid.z_grid})"
    if not grid.prefix:
        return sizes
    steps = [f"({line.replace(' = ', ' := ', 1)})" for line in grid.prefix]
    return f"({', '.join([*steps, sizes])})[-1]"
