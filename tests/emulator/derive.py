"""Derives from csrc/ the sources that the emulator compiles: C++ for a CPU, otherwise unchanged.

`derive(root, folder)` writes a file of csrc/ and all that it includes. What C++ cannot say is
replaced: declarations of shared memory, and inline PTX, instruction by instruction. A replacement
is stated once, in the tables below. PTX that they lack is an error, and test_kernels.py fails on an
entry that nothing uses.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

CSRC = Path(__file__).resolve().parents[2] / "csrc"

# PTX, with blanks made one and macros' parameters in <>, and what it becomes: %0 is an operand.
# Nothing is to be done where the emulated machine knows no other order.
INSTRUCTIONS = {
    "": "",
    # Order.
    "fence.mbarrier_init.release.cluster;": "",
    "griddepcontrol.launch_dependents;": "",
    "griddepcontrol.wait;": "emulator::wait_for_previous()",
    "wgmma.fence.sync.aligned;": "",
    "fence.proxy.async.shared::cta;": "emulator::machine.thread->known.fence()",
    "setmaxnreg.dec.sync.aligned.u32 %0;": "",
    "setmaxnreg.dec.sync.aligned.u32 24;": "",
    "setmaxnreg.inc.sync.aligned.u32 %0;": "",
    # Barriers.
    "bar.sync %0, %1;": "emulator::sync_named(%0, %1)",
    "bar.arrive %0, %1;": "emulator::arrive_named(%0, %1)",
    "bar.sync 1, %0;": "emulator::sync_named(1, %0)",
    "barrier.cluster.arrive.release.aligned;": "emulator::arrive_cluster()",
    "barrier.cluster.wait.acquire.aligned;": "emulator::wait_cluster()",
    "mbarrier.init.shared::cta.b64 [%0], 1;": "emulator::init_barrier(%0, 1)",
    "mbarrier.init.shared::cta.b64 [%0], %1;": "emulator::init_barrier(%0, %1)",
    "mbarrier.arrive.shared::cta.b64 _, [%0];": "emulator::arrive(%0)",
    "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;": "emulator::arrive(%0, %1)",
    "mbarrier.init.shared::cta.b64 [%0], 1; fence.mbarrier_init.release.cluster; "
    "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;": (
        "emulator::init_barrier(%0, 1), emulator::arrive(%0, %1)"
    ),
    "{ .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; "
    "@!done bra again; }": "emulator::wait_for_parity(%0, %1)",
    "{ .reg .pred over; again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 over, "
    "[%0], %1; @!over bra again; }": "emulator::wait_for_parity(%0, %1)",
    # Clusters.
    "mov.u32 %0, %%cluster_ctarank;": "%0 = emulator::machine.block().rank",
    "mov.u32 %0, %%cluster_nctarank;": "%0 = emulator::machine.cluster().blocks.size()",
    "mapa.shared::cluster.u32 %0, %1, %2;": "%0 = emulator::address_in(%1, %2)",
    "{ .reg .b32 to, counted; mapa.shared::cluster.u32 to, %0, %2; "
    "mapa.shared::cluster.u32 counted, %1, %2; "
    "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [to], {%3, %4, %5, %6}, "
    "[counted]; }": (
        "emulator::store_remote(emulator::address_in(%0, %2), emulator::address_in(%1, %2), "
        "%3, %4, %5, %6)"
    ),
    "{ .reg .b32 place, counted; mapa.shared::cluster.u32 place, %0, %2; "
    "mapa.shared::cluster.u32 counted, %1, %2; "
    "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b64 [place], %3, [counted]; }": (
        "emulator::store_remote(emulator::address_in(%0, %2), emulator::address_in(%1, %2), %3)"
    ),
    "{ .reg .b32 place, counted; mapa.shared::cluster.u32 place, %0, %2; "
    "mapa.shared::cluster.u32 counted, %1, %2; "
    "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [place], %3, [counted]; }": (
        "emulator::store_remote(emulator::address_in(%0, %2), emulator::address_in(%1, %2), %3)"
    ),
    "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];": (
        "emulator::store_remote(%0, %3, %1, %2)"
    ),
    # Copies.
    "cp.async.cg.shared.global [%0], [%1], 16, %2;": "emulator::copy_async(%0, %1, 16, %2)",
    "cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;": (
        "emulator::copy_async(%0, %1, 16, %2)"
    ),
    "cp.async.ca.shared.global [%0], [%1], 4;": "emulator::copy_async(%0, %1, 4, 4)",
    "cp.async.commit_group;": "emulator::commit_copies()",
    "cp.async.wait_group %0;": "emulator::wait_for_copies(%0)",
    "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];": "emulator::arrive_after_copies(%0)",
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];": (
        "emulator::copy_bulk(%0, %1, %2, %3)"
    ),
    "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
    "[%0], [%1, {%2, %3, %4}], [%5], %6;": "emulator::copy_box(%0, %1, %5, %2, %3, %4)",
    "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
    "[%0], [%1, {%2, %3, %4, %5}], [%6], %7;": "emulator::copy_box(%0, %1, %6, %2, %3, %4, %5)",
    "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
    "[%0], [%1, {%2, %3, %4}], [%5];": "emulator::copy_box(%0, %1, %5, %2, %3, %4)",
    "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
    "[%0], [%1, {%2, %3, %4, %5}], [%6];": "emulator::copy_box(%0, %1, %6, %2, %3, %4, %5)",
    # Loads and stores.
    "ld.shared.f32 %0, [%1];": "emulator::load_shared(%1, %0)",
    "ld.shared.u16 %0, [%1];": "emulator::load_shared(%1, %0)",
    "ld.shared.u8 %0, [%1];": "%0 = emulator::load_shared_as<uint8_t>(%1)",
    "ld.shared.v2.b32 {%0, %1}, [%2];": "emulator::load_shared(%2, %0, %1)",
    "ld.shared::cluster.v2.f32 {%0, %1}, [%2];": "emulator::load_shared(%2, %0, %1)",
    "ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];": "emulator::load_shared(%4, %0, %1, %2, %3)",
    "ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];": "emulator::load_shared(%4, %0, %1, %2, %3)",
    "ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];": "emulator::load_shared(%4, %0, %1, %2, %3)",
    "st.shared.v2.b32 [%0], {%1, %2};": "emulator::store_shared(%0, %1, %2)",
    "st.shared.v4.u32 [%0], {%1, %2, %3, %4};": "emulator::store_shared(%0, %1, %2, %3, %4)",
    "st.shared.v4.b32 [%0], {%1, %2, %3, %4};": "emulator::store_shared(%0, %1, %2, %3, %4)",
    "st.shared.v4.f32 [%0], {%1, %2, %3, %4};": "emulator::store_shared(%0, %1, %2, %3, %4)",
    "ld.global.nc.L1::no_allocate.L2::128B.v4.b32 {%0, %1, %2, %3}, [%4];": (
        "{ const uint4 four = *reinterpret_cast<const uint4*>(%4); "
        "%0 = four.x; %1 = four.y; %2 = four.z; %3 = four.w; }"
    ),
    "ld.relaxed.sys.global.u32 %0, [%1];": "%0 = *%1",
    "st.relaxed.sys.global.u32 [%0], %1;": "*%0 = %1",
    "ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];": (
        'emulator::fail("ranks are not emulated")'
    ),
    "st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};": (
        'emulator::fail("ranks are not emulated")'
    ),
    # Matrices.
    "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];": (
        "{ uint32_t words[4]; emulator::load_matrices(words, %4, false); "
        "%0 = words[0]; %1 = words[1]; %2 = words[2]; %3 = words[3]; }"
    ),
    "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];": (
        "{ uint32_t words[4]; emulator::load_matrices(words, %4, true); "
        "%0 = words[0]; %1 = words[1]; %2 = words[2]; %3 = words[3]; }"
    ),
    "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};": (
        "emulator::store_matrices(%0, %1, %2, %3, %4)"
    ),
    "movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;": "%0 = emulator::transpose_matrix(%1)",
    "wgmma.commit_group.sync.aligned;": "emulator::commit_multiplications()",
    "wgmma.wait_group.sync.aligned %0;": "emulator::wait_for_multiplications(%0)",
    "{ .reg .pred add; setp.ne.b32 add, %66, 0; "
    "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {<FW_NAMES_64>}, %64, %65, add, 1, 1; "
    "}": "emulator::multiply_group<emulator::Element::kE4M3>(d, a, b, fresh)",
    # Numbers.
    "ex2.approx.ftz.f32 %0, %1;": "%0 = exp2f(%1)",
    "rcp.approx.ftz.f32 %0, %1;": "%0 = 1.0f / %1",
    "prmt.b32 %0, %1, %2, %3;": "%0 = emulator::permute_bytes(%1, %2, %3)",
    "prmt.b32 %0, %1, 0, %2;": "%0 = emulator::permute_bytes(%1, 0, %2)",
    "lop3.b32 %0, %1, %2, %3, 0xEA;": "%0 = (%1 & %2) | %3",
    "mul.rn.bf16x2 %0, %1, %2;": "%0 = emulator::multiply_bf16_pairs(%1, %2)",
    "sub.rn.bf16x2 %0, %1, %2;": "%0 = emulator::subtract_bf16_pairs(%1, %2)",
    "{ .reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, low; }": (
        "%0 = emulator::half_pair_of_e4m3(%1)"
    ),
}

FROM_SHARED = "emulator::multiply_group<emulator::element_of({})>(d, a, b, fresh)"
TRANSPOSED = "emulator::multiply_transposed<emulator::element_of(TYPE)>(d, a, b)"
# Macros that hold PTX, and their new bodies.
MACROS = {
    "FW_MMA(NAME)": (
        "emulator::multiply_warp<emulator::element_of(NAME)>(d, a0, a1, a2, a3, b0, b1)"
    ),
    "FW_FROM_SHARED(TYPE)": FROM_SHARED.format("TYPE"),
    "FW_FROM_SHARED_64(TYPE)": FROM_SHARED.format("TYPE"),
    "FW_FROM_REGISTERS(TYPE)": TRANSPOSED,
    "FW_FROM_REGISTERS_64(TYPE)": TRANSPOSED,
    "FW_FROM_REGISTERS_256(TYPE)": TRANSPOSED,
    "FW_BF16(ROWS, NAMES, A, B, ADD, ...)": FROM_SHARED.format('"bf16"'),
    "FW_BF16_RS(ROWS, NAMES, A, B, ADD, ...)": FROM_SHARED.format('"bf16"'),
    "FW_MULTIPLY(FUNCTION, KIND, MAJORS, COUNT, ROWS, NAMES, A, B, ADD, ...)": (
        "inline void FUNCTION(float (&d)[COUNT], uint64_t a, uint64_t b, bool fresh) { "
        + FROM_SHARED.format("KIND")
        + "; }"
    ),
}

# Declarations, as regular expressions.
DECLARATIONS = {
    r"extern __shared__ __align__\(\d+\) (\w+) (\w+)\[\];": (
        r"auto* \2 = reinterpret_cast<\1*>(emulator::dynamic_memory());"
    ),
    r"(?<!extern )__shared__ ([\w<>]+) (\w+);": (
        r"auto& \2 = emulator::shared_variable<\1>(__FILE__, __LINE__);"
    ),
    r"(?<!extern )__shared__ (\w+) (\w+)((?:\[\w+\])+);": (
        r"auto& \2 = emulator::shared_variable<\1\3>(__FILE__, __LINE__);"
    ),
}


class UnknownSourceError(Exception):
    """csrc/ has what the tables lack, or lacks what an edit names."""


class Edit(NamedTuple):
    """A change of a source before it is derived; the old text stands there once."""

    file: str
    old: str
    new: str


def included(root: Path) -> list[Path]:
    """The file and those of csrc/ that it includes, directly or not."""
    found: list[Path] = []
    pending = [root]
    while pending:
        path = pending.pop()
        if path in found:
            continue
        found.append(path)
        names = re.findall(r'^#include "([^"]+)"', path.read_text(), re.MULTILINE)
        pending += [(path.parent / name).resolve() for name in names]
    return found


def split_outside(text: str, separator: str) -> list[str]:
    """The parts of a text between separators that stand in no string and no brackets."""
    parts, depth, quoted, begin = [], 0, False, 0
    for match in re.finditer(r'\\.|["()\[\]{}' + re.escape(separator) + "]", text):
        symbol = match.group()
        if symbol == '"':
            quoted = not quoted
        elif quoted:
            continue
        elif depth == 0 and symbol == separator:
            parts.append(text[begin : match.start()])
            begin = match.end()
        elif symbol in "([{":
            depth += 1
        elif symbol in ")]}":
            depth -= 1
    return [*parts, text[begin:]]


def instruction_of(strings: str) -> str:
    """The PTX of neighbouring strings and macros."""
    tokens = re.findall(r'"((?:\\.|[^"\\])*)"|(\w+)', strings)
    joined = "".join(string if not name else f"<{name}>" for string, name in tokens)
    return re.sub(r"(\\n|\\t|\s)+", " ", joined).strip()


def replace_statement(statement: str, used: set[str]) -> str:
    """The C++ for what stands in the brackets of an asm."""
    template, *sections = split_outside(statement, ":")
    instruction = instruction_of(template)
    if instruction not in INSTRUCTIONS:
        raise UnknownSourceError(f"no emulation of the PTX {instruction!r}")
    used.add(instruction)
    operands = [
        operand.strip().partition("(")[2].removesuffix(")")
        for section in sections[:2]
        for operand in split_outside(section, ",")
        if operand.strip()
    ]
    return re.sub(
        r"%(\d+)", lambda match: f"({operands[int(match[1])]})", INSTRUCTIONS[instruction]
    )


def statements(source: str) -> Iterator[tuple[int, int, str]]:
    """Where each asm begins and ends, and what stands in its brackets."""
    for match in re.finditer(r"\basm\b(?:\s+volatile)?\s*\(", source):
        inside = split_outside(source[match.end() :], ")")[0]
        yield match.start(), match.end() + len(inside) + 1, inside


def derive_source(source: str, used: set[str]) -> str:
    """Derive one file. Lines keep their numbers."""
    for macro, body in MACROS.items():
        pattern = rf"#define {re.escape(macro)}(?:[^\n]*\\\n)*[^\n]*"
        for definition in re.findall(pattern, source):
            used.add(macro)
            lines = "\n" * definition.count("\n")
            source = source.replace(definition, f"#define {macro} {body}{lines}")
    for pattern, replacement in DECLARATIONS.items():
        source, count = re.subn(pattern, replacement, source)
        if count:
            used.add(pattern)
    result, end = "", 0
    for begin, behind, inside in statements(source):
        lines = "\n" * source[begin:behind].count("\n")
        result += source[end:begin] + replace_statement(inside, used) + lines
        end = behind
    result += source[end:]
    if left := re.search(r"\basm\b|__shared__[^\n]*", result):
        raise UnknownSourceError(f"{left.group()!r} is left")
    return result


def edited(source: str, name: str, edits: Sequence[Edit]) -> str:
    """The source with the edits of the file of that name."""
    for edit in edits:
        if edit.file == name:
            if source.count(edit.old) != 1:
                raise UnknownSourceError(f"{name} has {source.count(edit.old)} times {edit.old!r}")
            source = source.replace(edit.old, edit.new)
    return source


def derive(root: str, folder: Path, edits: Sequence[Edit] = ()) -> set[str]:
    """Write the emulated sources of a root, a file of csrc/, to a folder; the replacements used."""
    used: set[str] = set()
    names = {str(path.relative_to(CSRC)) for path in included(CSRC / root)}
    if missed := {edit.file for edit in edits} - names:
        raise UnknownSourceError(f"csrc/{root} does not include {sorted(missed)}")
    for name in sorted(names):
        try:
            derived = derive_source(edited((CSRC / name).read_text(), name, edits), used)
        except UnknownSourceError as error:
            raise UnknownSourceError(f"csrc/{name}: {error}") from None
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(derived)
    return used
