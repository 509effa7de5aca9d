"""Weight formats from outside of the package: what they mean, how they are loaded, and bad ones."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fusewright import ops
from fusewright.config import UserError
from fusewright.config.weight_format import (
    INT_BITS,
    STORED_FORMATS,
    Packing,
    StoredFormat,
    StoredTensor,
)
from fusewright.model_executor.hf_config import read_spec
from fusewright.model_executor.loader import load_model
from fusewright.model_executor.parallel import check_parallel
from fusewright.model_executor.quant.scheme import LINEARS
from fusewright.model_executor.spec import quantize_online
from fusewright.ops.core.target import Target
from fusewright.ops.linear import formats
from fusewright.ops.linear.desc import LinearDesc
from fusewright.ops.linear.kernels import DEQUANTIZING, admit_weight_format, select
from tests.model_executor import stored_formats
from tests.model_executor.quant_checkpoints import FUSED
from tests.model_executor.stored_formats import INT4, INT8, STORE, TINY, save
from tests.model_executor.test_parallel import check_together, ranks_of
from tests.model_executor.tiny_models import BY_NAME

both = pytest.mark.parametrize("name", STORE)
N, K = 48, 128
AWQ, GROUP = (0, 2, 4, 6, 1, 3, 5, 7), (1, 32)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _form(name: str, weight: StoredTensor, scale: StoredTensor, **more: Any) -> StoredFormat:
    return StoredFormat(name=name, weight=weight, scale=scale, **more)


# What other projects write, each a row of data.
KNOWN = [
    INT8,
    INT4,
    _form(
        "AWQ",
        StoredTensor(("qweight",), "int32", packing=Packing(4, "rows", order=AWQ), transposed=True),
        StoredTensor(("scales",), "float16", GROUP, transposed=True),
        zero=StoredTensor(("qzeros",), "int32", GROUP, Packing(4, "rows", order=AWQ), True),
    ),
    _form(
        "GPTQ v1",
        StoredTensor(("qweight",), "int32", packing=Packing(4), transposed=True),
        StoredTensor(("scales",), "float16", GROUP, transposed=True),
        zero=StoredTensor(("qzeros",), "int32", GROUP, Packing(4, "rows"), True),
        zero_offset=1,
    ),
    _form(
        "compressed-tensors symmetric",
        StoredTensor(("weight_packed",), "int32", packing=Packing(4)),
        StoredTensor(("weight_scale",), "bfloat16", GROUP),
        offset=8,
    ),
    _form(
        "two's complement, whole columns",
        StoredTensor(("weight",), "uint8", packing=Packing(4, signed=True)),
        StoredTensor(("weight_scale",), "bfloat16", (1, 0)),
    ),
    _form(
        "MXFP4",
        StoredTensor(("blocks",), "uint8", packing=Packing(4)),
        StoredTensor(("scales",), "float8_e8m0fnu", GROUP),
        values=(*E2M1, *(-value for value in E2M1)),
    ),
    _form(
        "int4 by FP8",
        StoredTensor(("weight_packed",), "int32", packing=Packing(4)),
        StoredTensor(("weight_scale",), "bfloat16", GROUP),
        offset=8,
        x_dtype="float8_e4m3fn",
    ),
]


@pytest.fixture(autouse=True)
def both_are_admitted() -> Iterator[None]:
    with stored_formats.admitted():
        yield


@pytest.fixture
def admitted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> StoredFormat:
    form: StoredFormat = request.param
    if form.name not in STORED_FORMATS:
        monkeypatch.setitem(STORED_FORMATS, form.name, form)
        monkeypatch.setitem(formats.WEIGHT_FORMATS, form.name, formats.WeightFormat.of(form))
    return form


every = pytest.mark.parametrize("admitted", KNOWN, ids=lambda form: form.name, indirect=True)


@every
def test_linear_multiplies_by_what_a_format_stands_for(admitted: StoredFormat) -> None:
    """Quantized to nearest, a weight is off by half a step, and ``linear`` by nothing more; shapes
    are those of the format, and packing is undone to the bit."""
    weight, x = torch.randn(N, K), torch.randn(5, K)
    stored = formats.quantize(admitted, weight)
    for name, tensor in admitted.tensors.items():
        assert tuple(stored[name].shape) == tensor.shape(N, K)
        again = formats.pack(tensor, formats.unpack(tensor, stored[name]))
        assert torch.equal(again.view(torch.uint8), stored[name].view(torch.uint8))
    operands = (stored["weight"], stored["weight_scale"], stored.get("weight_zero"))
    numbers = formats.dequantize(admitted, *operands)
    levels = 12 if admitted.values else 2**admitted.weight.bits - 2
    groups = weight.unflatten(1, (-1, admitted.scale.unit[1] or K))
    span = 2 * groups.abs().amax(-1, keepdim=True) / levels
    halves = 2.2 if admitted.values else 0.52  # E8M0 rounds up by as much as two
    assert ((numbers.view_as(groups) - groups).abs() <= halves * span).all()
    q, scale = ops.quant_fp8_dynamic(x, 0) if admitted.x_dtype else (x, None)
    x = x if scale is None else q.float() * scale
    how = (None if scale is None else torch.float32, None, None, operands[2], admitted.name)
    y = ops.linear(q, operands[0], None, scale, operands[1], *how)
    torch.testing.assert_close(y, x @ numbers.T)


def test_layouts_are_those_of_their_libraries() -> None:
    """Single numbers where AutoAWQ, GPTQ and gpt-oss put them."""
    _, _, awq, gptq, *_ = KNOWN
    assert formats.unpack(awq.weight, torch.tensor([[0x76543210]], dtype=torch.int32)).tolist() == [
        [0], [4], [1], [5], [2], [6], [3], [7]
    ]  # fmt: skip
    column = torch.tensor([[0x76543210 - 2**32 + 0x80000000]], dtype=torch.int32)
    assert formats.unpack(gptq.weight, column).tolist() == [[*range(7), 15]]
    mxfp4 = next(form for form in KNOWN if form.name == "MXFP4")
    scale = torch.tensor([[4.0]]).to(torch.float8_e8m0fnu)
    blocks = torch.full((1, 16), 0xF2, dtype=torch.uint8)
    assert formats.dequantize(mxfp4, blocks, scale)[0, :2].tolist() == [4.0, -24.0]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("along", ["rows", "columns"])
def test_packed_numbers_are_fields_of_elements(along: Any, signed: bool, transposed: bool) -> None:
    """In every integer dtype, by shifts of Python's integers, in ascending and in another order."""
    for (dtype, width), bits, turned in product(INT_BITS.items(), (1, 2, 4, 8, 16), (0, 1)):
        if bits > width:
            continue
        fields = [*range(0, width // bits, 2), *range(1, width // bits, 2)]
        packing = Packing(bits, along, signed, tuple(fields) if turned else ())
        tensor = StoredTensor(("w",), dtype, packing=packing, transposed=transposed)
        elements = torch.randint(-(2**63), 2**63 - 1, (3, 5)).to(getattr(torch, dtype))
        numbers = formats.unpack(tensor, elements.t() if transposed else elements)
        expected = torch.zeros(numbers.shape, dtype=torch.int64)
        for (row, column), field in product(product(range(3), range(5)), range(len(fields))):
            number = int(elements[row, column]) >> bits * field & (1 << bits) - 1
            number -= signed * (number >> bits - 1) << bits
            place, axis = [row, column], along == "columns"
            place[axis] = place[axis] * len(fields) + (fields[field] if turned else field)
            expected[tuple(place)] = number
        assert torch.equal(numbers.long(), expected), tensor


@pytest.mark.parametrize("form", [*KNOWN, *STORED_FORMATS.values()], ids=lambda form: form.name)
def test_numbers_are_those_of_the_formula_to_the_bit(form: StoredFormat) -> None:
    stored = formats.quantize(form, torch.randn(N, K))
    integers, scale = (
        formats.unpack(tensor, stored[name]).double()
        for name, tensor in (("weight", form.weight), ("weight_scale", form.scale))
    )
    zero: Any = form.offset
    if form.zero is not None:
        zeros = formats.unpack(form.zero, stored["weight_zero"]).double() + form.zero_offset
        zero = zeros.repeat_interleave(K // zeros.shape[1], 1)
    units = torch.tensor(form.values).double()[integers.long()] if form.values else integers - zero
    expected = (units * scale.repeat_interleave(K // scale.shape[1], 1)).float()
    if (of_rows := stored.get("weight_row_scale")) is not None:
        expected *= of_rows
    operands = (stored["weight"], stored["weight_scale"], stored.get("weight_zero"), of_rows)
    numbers = formats.dequantize(form, *operands)
    assert torch.equal(numbers.view(torch.int32), expected.view(torch.int32))


@every
def test_ranks_hold_every_layout_together(admitted: StoredFormat, tmp_path: Path) -> None:
    """Transposed and packed along either axis.  Of whole columns a rank that has a part of them
    finds a scale of its own, as in FP8."""
    TINY.save(tmp_path)
    spec = quantize_online(read_spec(tmp_path), admitted.name)
    whole, ranks = load_model(spec, tmp_path, "cpu"), ranks_of(spec, tmp_path, 2, "auto")
    if admitted.scale.unit[1]:
        check_together(whole, ranks)
    for name in ("attention.qkv", "mlp.gate_up"):
        rows = whole.get_submodule(f"layers.0.{name}").shape[0]
        assert [r.get_submodule(f"layers.0.{name}").shape for r in ranks] == [(rows // 2, 128)] * 2


@both
def test_every_tensor_of_a_checkpoint_lands_in_its_place(name: str, tmp_path: Path) -> None:
    """Parts of merged layers one below the other, packed and with their scales and zero points."""
    save(name, tmp_path, ignore=("layers.1.mlp",))
    spec, tensors = read_spec(tmp_path), load_file(tmp_path / "model.safetensors")
    assert spec.quant is not None and spec.quant.kind == name
    assert spec.quant.unquantized == ((), ("mlp.gate_up", "mlp.down"))
    model = load_model(spec, tmp_path, "cpu")
    for layer in range(2):
        for linear in LINEARS:
            held = model.get_submodule(f"layers.{layer}.{linear}")
            names = [f"model.layers.{layer}.{part}" for part in FUSED[linear]]
            if layer == 1 and linear.startswith("mlp"):
                whole = torch.cat([tensors[f"{n}.weight"] for n in names])
                assert torch.equal(held.weight, whole)
                continue
            for kind, tensor in STORED_FORMATS[name].tensors.items():
                whole = torch.cat([tensors[f"{n}.{tensor.suffixes[0]}"] for n in names])
                assert torch.equal(getattr(held, kind), whole), f"{linear}.{kind}"
                assert getattr(held, kind).dtype == whole.dtype


@both
@pytest.mark.parametrize("load_format", ["safetensors", "dummy"])
def test_ranks_hold_the_model_together(name: str, load_format: str, tmp_path: Path) -> None:
    save(name, tmp_path)
    spec = read_spec(tmp_path)
    whole = load_model(spec, tmp_path, "cpu", load_format=load_format)
    check_together(whole, ranks_of(spec, tmp_path, 2, load_format))
    if load_format == "dummy":
        linear = whole.get_submodule("layers.0.mlp.down")
        zero = getattr(linear, "weight_zero", None)
        operands = (linear.weight, linear.weight_scale, zero)
        numbers = formats.dequantize(STORED_FORMATS[name], *operands)
        assert numbers.shape == (128, 256) and 0.018 < numbers.std() < 0.022


@both
def test_weights_are_quantized_while_they_are_loaded(name: str, tmp_path: Path) -> None:
    """To the bits that a checkpoint in the format would hold; each rank what it holds itself."""
    saved = TINY.save(tmp_path).state_dict()
    spec = quantize_online(read_spec(tmp_path), name)
    whole = load_model(spec, tmp_path, "cpu")
    for linear in LINEARS:
        held = whole.get_submodule(f"layers.1.{linear}")
        numbers = torch.cat([saved[f"model.layers.1.{part}.weight"] for part in FUSED[linear]])
        for kind, tensor in STORE[name](numbers)[0].items():
            stored = STORED_FORMATS[name].tensors.items()
            for argument in (a for a, t in stored if kind in t.suffixes):
                assert torch.equal(getattr(held, argument), tensor), f"{linear}.{argument}"
    check_together(whole, ranks_of(spec, tmp_path, 2, "auto"))
    odd = replace(spec, quant=None, intermediate_size=240)
    assert "mlp.down" in quantize_online(odd, name).quant.unquantized[0]  # type: ignore[union-attr]


def test_an_admitted_kernel_is_chosen_and_where_it_refuses_the_next_of_the_table_is() -> None:
    stored = formats.quantize(INT8, torch.randn(N, K))
    call = (torch.randn(3, K), stored["weight"], None, None, stored["weight_scale"])
    described = ops.BY_NAME["linear"].describe((*call, None, None, None, None, INT8.name))
    choice = ops.choose(ops.BY_NAME["linear"], described, inline_first=False)
    assert choice.name == "admitted" and "multiply_int8 is admitted" in str(choice)
    layer = LinearDesc(INT8.name, torch.float32, N, K)
    gpu = Target(torch.device("meta"), 90, csrc=True)
    for target, behind in (
        (Target(torch.device("cpu")), DEQUANTIZING.name),
        (gpu, "_linear_lowbit_kernel"),
    ):
        assert select(layer, 16, target).kernel.name == "multiply_int8"
        chosen = select(layer, 17, target)
        assert chosen.kernel.name == behind
        assert dict(chosen.refused)["multiply_int8"] == "17 rows > 16"


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("weight_format", {"weight_format": "int3"}, "weight_format is 'int3', expected one of"),
    ("weight_zero", {"weight_zero": None}, "weight_zero is missing, expected torch.int32 [6, 4]"),
    ("weight", {"weight": torch.zeros(N, 15, dtype=torch.int32)}, "[48, 15], expected torch.int32"),
    ("weight", {"weight": torch.zeros(N, K)}, "weight is torch.float32 [48, 128], expected"),
    ("weight_scale", {"weight_scale": torch.zeros(N, 3).bfloat16()}, "[48, 3], expected"),
    ("x", {"x": torch.zeros(5, 132)}, "132 columns, of which 8 share an element of weight_packed"),
    ("x", {"x": torch.zeros(5, K, dtype=torch.int8)}, "x is torch.int8 without x_scale"),
    ("x_scale", {"x_scale": torch.ones(5, 1)}, "the weight alone is quantized"),
    ("weight_zero", {"weight_format": None}, "weight_zero is given, expected weight_format"),
]


@pytest.mark.parametrize(("argument", "change", "message"), REFUSED)
def test_operands_that_do_not_fit_a_format_are_named(
    argument: str, change: dict[str, Any], message: str
) -> None:
    operands = formats.quantize(INT4, torch.randn(N, K))
    call = {"x": torch.randn(5, K), **operands, "weight_format": INT4.name, **change}
    with pytest.raises(ValueError) as error:
        ops.linear(**call)
    assert message in str(error.value) and argument in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": replace(INT4.weight, dtype="float32")}, "weight is of float32, expected one"),
        ({"weight": replace(INT4.weight, packing=Packing(3))}, "3 bits, expected a divisor"),
        ({"weight": replace(INT4.weight, packing=Packing(4, order=(1,)))}, "order of weight is"),
        ({"scale": replace(INT4.scale, dtype="int8")}, "scale is of int8"),
        ({"scale": replace(INT4.scale, unit=(1, 64))}, "a zero point is for (1, 32), a scale for"),
        ({"zero": None, "values": E2M1}, "8 values, expected 16"),
        ({"x_dtype": "int4"}, "x_dtype is 'int4', expected one of"),
        ({"static": True}, "static is true, expected an x_dtype"),
    ],
)
def test_a_format_that_contradicts_itself_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="weight format 'int4 of 32, zero points': ") as error:
        replace(INT4, **change)
    assert message in str(error.value)
    with pytest.raises(ValueError, match="'int8 of 64' is there already"):
        admit_weight_format(INT8)


Change = Callable[[dict[str, Tensor]], object]
Q = "model.layers.1.self_attn.q_proj"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{Q}.weight_zero_point"), f"lacks weight {Q}.weight_zero_point"),
        (lambda t: t.pop(f"{Q}.weight_packed"), f"lacks weight {Q}.weight_packed"),
        (
            lambda t: t.update({f"{Q}.weight_packed": t[f"{Q}.weight_packed"][:, 1:].contiguous()}),
            f"{Q}.weight_packed in",
        ),
        (
            lambda t: t.update({f"{Q}.weight_packed": t[f"{Q}.weight_packed"].to(torch.int64)}),
            "is of type I64, expected I32",
        ),
        (lambda t: t.update({f"{Q}.g_idx": torch.zeros(1)}), f"{Q}.g_idx, unknown"),
    ],
)
def test_a_checkpoint_that_does_not_fit_its_format_is_named(
    change: Change, message: str, tmp_path: Path
) -> None:
    save(INT4.name, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError) as error:
        load_model(read_spec(tmp_path), tmp_path, "cpu")
    assert message in str(error.value) and "\n" not in str(error.value)


def refused(message: str) -> Any:
    return pytest.raises(UserError, match=re.escape(message))


def _edit(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def test_a_config_that_asks_for_what_is_not_there_is_named(tmp_path: Path) -> None:
    save(INT8.name, tmp_path)
    section = {"quant_method": "stored", "format": "int3 of 64"}
    _edit(tmp_path, quantization_config=section)
    with refused("'int3 of 64'; expected one of int4_g32, "):
        read_spec(tmp_path)
    _edit(tmp_path, quantization_config=section | {"format": INT8.name}, intermediate_size=224)
    with refused("weight_scale of mlp.down would have 224 columns, of which 64 share"):
        read_spec(tmp_path)
    moe = tmp_path / "moe"
    BY_NAME["mixtral"].save(moe)
    _edit(moe, quantization_config=section | {"format": INT4.name})
    with refused("which kernels of experts do not read: zero points are packed"):
        read_spec(moe)


def test_ranks_that_would_cut_a_group_are_refused(tmp_path: Path) -> None:
    """A group of 64 columns of ``mlp.down`` would lie on two of eight ranks, and loading says so
    too; so would zero points of eight rows that are one element."""
    save(INT8.name, tmp_path)
    spec = replace(read_spec(tmp_path), num_heads=8, num_kv_heads=8, head_dim=64)
    with refused(
        "tensor_parallel_size=8: weight_scale of mlp.down would have 32 columns, of which 64 share "
        "an element of weight_scale in the format 'int8 of 64'; this model spreads over 1, 2, 4"
    ):
        check_parallel(spec, 8)
    check_parallel(spec, 2)
    save(INT4.name, tmp_path)
    spec = replace(read_spec(tmp_path), head_dim=4, hidden_size=128)
    with refused("weight_zero of attention.qkv would have 4 rows, of which"):
        check_parallel(spec, 2)
