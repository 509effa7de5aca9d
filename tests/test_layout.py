"""The house rules: the import table, no cycles, short files and functions, complete wheels."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tarfile
import zipfile
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.import_tables import CHECKOUT_ONLY, MAY_IMPORT, ROOMS
from tests.line_budget import Budget, count_lines, misfits, read_budgets, renewed

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "fusewright"

MAX_FILES = 20  # in a folder
# Folders that are flat and full, each with its number of files, which may only fall.
CROWDED: dict[str, int] = {"passes": 32, "config": 22}
MAX_FILE_LINES, MAX_KERNEL_FILE_LINES = 400, 600
MAX_FUNCTION_LINES, MAX_PARAMETERS = 80, 8
FILLERS = {"found", "made", "given"}
NAMED = ("config", "compiler", "graph_capture", "engine", "serve", "bench")
"""Folders whose functions take few parameters, and whose variables have names that say what they
are.  config/ has two modules, of tables, that do not keep to this yet."""

# "path" or "path:function" -> why it may be longer.
LENGTH_EXCEPTIONS: dict[str, str] = {}


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def module_name(path: Path) -> str:
    parts = [PACKAGE, *path.relative_to(ROOT).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


PACKAGE_FILES = [ROOT / "__init__.py", *python_files(*MAY_IMPORT)]
MODULES = {module_name(path): path for path in PACKAGE_FILES}


def top_folder(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def is_in(folder: str, module: str) -> bool:
    """Whether a module lies in a folder, such as ``serve/http``, or below it."""
    return f"{module}.".startswith(f"{PACKAGE}.{folder.replace('/', '.')}.")


def room_in(folder: str, module: str) -> str:
    """The room of a folder's module, by the table; "" for one beside the rooms."""
    name = [*module.split("."), ""][folder.count("/") + 2]
    return name if name in ROOMS[folder] else ""


@cache
def nodes(path: Path) -> list[ast.AST]:
    """The module and all that is in it."""
    return list(ast.walk(ast.parse(path.read_text())))


def name_of(node: ast.AST) -> str:
    return str(next((getattr(node, k) for k in ("attr", "id", "arg") if hasattr(node, k)), ""))


def functions(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [n for n in nodes(path) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]


def resolve_base(module: str, path: Path, level: int) -> str:
    """The package that `level` leading dots mean inside `module`."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for _ in range(level - 1):
        package = package.rpartition(".")[0]
    return package


def targets_of(node: ast.AST, module: str, path: Path) -> Iterator[str]:
    """Absolute names inside the package that one AST node imports."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = resolve_base(module, path, node.level) if node.level else ""
        source = ".".join(part for part in (base, node.module) if part)
        for alias in node.names:
            member = f"{source}.{alias.name}"
            # `from .ops import norm` means the module when there is one, else a name in ops.
            is_module = member in MODULES or (source == PACKAGE and alias.name in MAY_IMPORT)
            yield member if is_module else source
    elif isinstance(node, ast.Call) and name_of(node.func) == "import_module":
        match node.args[:1]:
            case [ast.Constant(value=str(name))]:
                dots = len(name) - len(name.lstrip("."))
                yield f"{resolve_base(module, path, dots)}.{name[dots:]}" if dots else name


@cache
def imports_of(module: str) -> list[tuple[int, str]]:
    """(line, target) of every import of the package, those inside functions included."""
    path = MODULES[module]
    return [
        (getattr(node, "lineno", 0), target)
        for node in nodes(path)
        for target in targets_of(node, module, path)
        if target == PACKAGE or target.startswith(f"{PACKAGE}.")
    ]


def place(module: str, line: int) -> str:
    return f"{MODULES[module].relative_to(ROOT)}:{line}"


def existing_module(name: str) -> str:
    """The module that holds `name`: `fusewright.ops.norm.rms_norm` -> `fusewright.ops.norm`."""
    while name not in MODULES and "." in name:
        name = name.rpartition(".")[0]
    return name


def test_the_import_tables_themselves_have_no_cycle() -> None:
    for table in (MAY_IMPORT, *ROOMS.values()):
        TopologicalSorter(table).prepare()


def test_folders_import_only_what_the_table_permits() -> None:
    wrong = []
    for module in MODULES:
        folder = top_folder(module)
        for line, target in imports_of(module):
            used = top_folder(target)
            if used in ("", folder) or used in MAY_IMPORT.get(folder, set()):
                continue
            wrong.append(f"{place(module, line)}: {folder or 'the root'}/ may not import {target}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("folder", ROOMS)
def test_rooms_import_only_what_their_table_permits(folder: str) -> None:
    wrong = []
    for module in (name for name in MODULES if is_in(folder, name)):
        room = room_in(folder, module)
        for line, target in imports_of(module):
            if not is_in(folder, target):
                continue
            if room_in(folder, target) not in {room, *ROOMS[folder][room]}:
                wrong.append(f"{place(module, line)}: may not import {target}")
    assert not wrong, "\n".join(wrong)


def test_quantizing_knows_neither_layers_nor_models() -> None:
    """What it needs of a layer is a protocol (``quant/layer.py``)."""
    room = f"{PACKAGE}.model_executor"
    allowed = {f"{room}.{name}" for name in ("checkpoint", "hf_json", "sharding")}
    wrong = []
    for module in (name for name in MODULES if name.startswith(f"{room}.quant")):
        for line, target in imports_of(module):
            found = existing_module(target)
            if found.startswith(f"{room}.") and found not in allowed and ".quant" not in found:
                wrong.append(f"{place(module, line)}: may not import {target}")
    assert not wrong, "\n".join(wrong)


def test_private_modules_are_imported_in_their_own_folder() -> None:
    wrong = []
    for module in MODULES:
        for line, target in imports_of(module):
            holder, _, name = existing_module(target).rpartition(".")
            if name.startswith("_") and not f"{module}.".startswith(f"{holder}."):
                wrong.append(f"{place(module, line)}: may not import {target}")
    assert not wrong, "\n".join(wrong)


def test_no_folder_is_flat_and_full() -> None:
    files = Counter(path.parent.relative_to(ROOT).as_posix() for path in PACKAGE_FILES)
    crowded = {name: n for name, n in files.items() if n > CROWDED.get(name, MAX_FILES)}
    assert not crowded, f"more than {MAX_FILES} files: {crowded}"
    assert not {name for name in CROWDED if files[name] <= MAX_FILES}, "needs no exception"


def test_models_never_import_the_compiler() -> None:
    reached: set[str] = set()
    pending = [module for module in MODULES if top_folder(module) == "model_executor"]
    while pending:
        module = pending.pop()
        if module not in reached:
            reached.add(module)
            pending.extend(existing_module(target) for _, target in imports_of(module))
            pending = [name for name in pending if name in MODULES and name != PACKAGE]
    assert not [module for module in reached if top_folder(module) in ("compiler", "passes")]


def test_modules_import_each_other_in_one_direction() -> None:
    graph = {
        module: {
            found
            for _, target in imports_of(module)
            if (found := existing_module(target)) in MODULES and found not in (module, PACKAGE)
        }
        for module in MODULES
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail("import cycle: " + " -> ".join(reversed(error.args[1])))


def is_kernel_file(path: Path) -> bool:
    parts = path.relative_to(ROOT).parts
    return parts[0] == "csrc" or (parts[0] == "ops" and "triton" in "/".join(parts))


def measured_files() -> list[Path]:
    csrc = [p for p in (ROOT / "csrc").rglob("*") if p.suffix in {".cu", ".cuh", ".cpp", ".h"}]
    python = python_files(*CHECKOUT_ONLY, "tests", "tools", "examples")
    return [*PACKAGE_FILES, *python, *sorted(csrc)]


@cache
def too_long() -> dict[str, str]:
    """Key in LENGTH_EXCEPTIONS -> what is too long there."""
    found = {}
    for path in measured_files():
        name, text = path.relative_to(ROOT).as_posix(), path.read_text()
        limit = MAX_KERNEL_FILE_LINES if is_kernel_file(path) else MAX_FILE_LINES
        if (lines := len(text.splitlines())) > limit:
            found[name] = f"{name}: {lines} lines, at most {limit}"
        if path.suffix != ".py":
            continue
        for node in functions(path):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                key = f"{name}:{node.name}"
                found[key] = f"{key}: {lines} lines, at most {MAX_FUNCTION_LINES}"
    return found


def test_files_and_functions_stay_short() -> None:
    long = [text for key, text in too_long().items() if key not in LENGTH_EXCEPTIONS]
    assert not long, "\n".join(long)
    assert not LENGTH_EXCEPTIONS.keys() - too_long().keys(), "exceptions that nothing needs"


def named_modules() -> list[Path]:
    tables = ("device_table.py", "expert_tables.py")
    return [path for path in python_files(*NAMED) if path.name not in tables]


def test_functions_take_few_parameters() -> None:
    many = []
    for path in named_modules():
        for node in functions(path):
            args = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            names = [arg.arg for arg in args if arg.arg not in ("self", "cls")]
            if len(names) > MAX_PARAMETERS:
                where = f"{path.relative_to(ROOT)}:{node.lineno}"
                many.append(f"{where}: {node.name} takes {len(names)} parameters")
    assert not many, "\n".join(many)


def test_variables_say_what_they_are() -> None:
    fillers = []
    for path in named_modules():
        for node in nodes(path):
            if isinstance(node, ast.Name | ast.arg) and (name := name_of(node)) in FILLERS:
                fillers.append(f"{path.relative_to(ROOT)}:{node.lineno}: {name} names nothing")
    assert not fillers, "\n".join(fillers)


def test_every_folder_keeps_to_its_line_budget() -> None:
    assert not (wrong := misfits(count_lines(), read_budgets())), "\n".join(wrong)


def test_a_line_budget_rises_with_a_reason_and_falls_by_itself() -> None:
    budgets = {"ops": Budget(100, "first"), "serve": Budget(1000, "second")}
    assert [line.partition(":")[0] for line in misfits({"ops": 101, "new": 1}, budgets)] == [
        *("new", "ops", "serve")
    ]
    assert not misfits({"ops": 80, "serve": 981}, budgets)
    assert len(misfits({"ops": 79, "serve": 979}, budgets)) == 2
    with pytest.raises(ValueError, match="ops grows from 100 to 101 lines"):
        renewed({"ops": 101}, budgets, "")
    both = renewed({"ops": 101, "serve": 900}, budgets, "third")
    assert both == {"ops": Budget(101, "third"), "serve": Budget(900, "second")}


def test_every_folder_of_the_package_says_what_it_is_for() -> None:
    silent = []
    rooms = [f"{folder}/{room}" for folder in ROOMS for room in ROOMS[folder] if room]
    for folder in (*MAY_IMPORT, *rooms):
        entry = ROOT / folder / "__init__.py"
        if not entry.is_file() or not ast.get_docstring(nodes(entry)[0]):
            silent.append(f"{folder}/__init__.py")
    assert not silent, f"missing, or without a docstring: {', '.join(silent)}"


@pytest.mark.parametrize("folder", ROOMS)
def test_every_folder_in_a_folder_of_rooms_is_a_room(folder: str) -> None:
    folders = {path.relative_to(ROOT / folder).parts[0] for path in python_files(folder)}
    assert {name for name in folders if not name.endswith(".py")} == {*ROOMS[folder]} - {""}


def modules_loaded_by(code: str) -> set[str]:
    """Top-level modules in sys.modules after `code` ran in a fresh interpreter."""
    probe = f"""
import sys
try:
{"".join(f"    {line}" for line in code.splitlines(keepends=True))}
except SystemExit as exit:
    assert not exit.code, exit.code
print("LOADED", *sorted({{name.split(".")[0] for name in sys.modules}}))
"""
    done = subprocess.run(
        [sys.executable, "-P", "-c", probe], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.rpartition("LOADED")[2].split())


def test_the_engine_core_imports_no_torch() -> None:
    loaded = modules_loaded_by("import fusewright.engine.core.loop")
    assert "msgspec" in loaded
    assert not loaded & {"torch", "triton", "tokenizers", "safetensors"}


def test_importing_the_package_imports_no_torch() -> None:
    loaded = modules_loaded_by("import fusewright")
    assert PACKAGE in loaded
    assert not loaded & {"torch", "triton", "numpy"}


@pytest.mark.skipif(not (ROOT / "serve" / "cli.py").exists(), reason="serve/cli.py is not there")
@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_the_command_line_answers_without_torch(flag: str) -> None:
    loaded = modules_loaded_by(
        f"sys.argv = ['fusewright', {flag!r}]\nfrom fusewright.serve.cli import main\nmain()"
    )
    assert not loaded & {"torch", "triton", "numpy", "transformers"}


def build(kind: str, folder: Path) -> set[str]:
    """Names in a wheel or sdist of this checkout; kernels off, so that it takes seconds."""
    code = (
        "import sys; sys.path.insert(0, 'tools'); import build_backend as build\n"
        f"build.build_{kind}(sys.argv[1], {{'kernels': 'off'}})"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (archive,) = folder.iterdir()
    if kind == "wheel":
        with zipfile.ZipFile(archive) as wheel:
            return set(wheel.namelist())
    with tarfile.open(archive) as sdist:
        return {name.partition("/")[2] for name in sdist.getnames()}


def package_data() -> set[str]:
    """Files under the package's folders that are not Python sources but belong in it."""
    suffixes = {".json", ".safetensors", ".jinja", ".txt"}
    files = (path for folder in MAY_IMPORT for path in (ROOT / folder).rglob("*"))
    names = {p.relative_to(ROOT).as_posix() for p in files if p.suffix in suffixes}
    return {name for name in names if not name.startswith("bench/results/")}


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_nothing_else(tmp_path: Path) -> None:
    names = build("wheel", tmp_path)
    sources = {path.relative_to(ROOT).as_posix() for path in PACKAGE_FILES}
    expected = {f"{PACKAGE}/{name}" for name in sources | package_data() | {"py.typed"}}
    assert not expected - names
    outside = {name for name in names if not re.match(rf"{PACKAGE}(/|-[^/]*\.dist-info/)", name)}
    assert not outside
    packed = {name.split("/")[1] for name in names if name.startswith(f"{PACKAGE}/")}
    assert packed == {"py.typed", *(name.partition("/")[0] for name in sources)}


@pytest.mark.slow
def test_the_sdist_can_build_the_kernels(tmp_path: Path) -> None:
    names = build("sdist", tmp_path)
    kernels = {p.relative_to(ROOT).as_posix() for p in (ROOT / "csrc").rglob("*") if p.is_file()}
    needed = {"CMakeLists.txt", "pyproject.toml", "LICENSE", "__init__.py", "py.typed"}
    needed |= {"tools/build_backend.py", "tools/toolchain.py"}
    assert not (needed | kernels | package_data()) - names
    assert not {name for name in names if name.startswith((".venv", "build/", ".git/"))}
