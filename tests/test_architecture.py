"""The rules of the house that a machine can check: who may import whom, how long things get, who may touch the outside world."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "trainer"

#: A module imports only from lower levels, never sideways or up. A package counts as one module.
LEVELS = {
    0: "config codes launch stop log beat parent",
    1: "devices group data models optim checkpoint metrics progress",
    2: "evaluate",
    3: "train agent",
    4: "cli",
    5: "__main__",
}
LEVEL = {name: level for level, names in LEVELS.items() for name in names.split()}

#: The exceptions: every module may import it, the rest of level 0 too.
FREE_FOR_ALL = "codes"

FORBIDDEN_NAMES = {"utils", "helpers", "common", "misc", "core", "base", "manager", "handler"}
PICKLES = {"pickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
#: It reads what others have pickled, and lets nothing pass but arrays.
READS_PICKLES = {"data/cifar.py": "Unpickler"}
MAX_FILE_LINES = 300
MAX_FUNCTION_LINES = 40
LONGER_FUNCTIONS = {("train", "fit"): 60}

#: What of the outside world only these modules may touch.
OUTSIDE = {
    "os.environ": {"cli"},
    "os.environb": {"cli"},
    "os.getenv": {"cli"},
    "os.putenv": {"cli"},
    "os.unsetenv": {"cli"},
    "sys.argv": {"cli"},
    "sys.exit": {"cli", "__main__"},
    "torch.save": set[str](),
    "torch.load": {"models"},  # with weights_only
}

#: The subject and what is done with it, as in parse(setting, text) or rename(source, target); all else is named by the caller.
MAX_POSITIONAL = 2

Function = ast.FunctionDef | ast.AsyncFunctionDef

FILES = sorted(PACKAGE.rglob("*.py"))
every_file = pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))


def module_of(path: Path) -> str:
    """Return the module of the table that a file belongs to: `data` for trainer/data/order.py."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def imports_of(path: Path) -> set[str]:
    """Return the dotted names that a file imports anywhere, also inside functions."""
    found = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} has a relative import; write it from trainer on"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def siblings_of(path: Path) -> set[str]:
    """Return the modules of the table that a file imports, its own package left out."""
    parts = [name.split(".") for name in imports_of(path)]
    ours = {part[1] for part in parts if part[0] == "trainer" and len(part) > 1}
    return ours - {"__version__", module_of(path)}


def functions_of(path: Path) -> Iterator[tuple[str, Function]]:
    """Yield the functions and methods of a file with their dotted names, functions inside functions left out."""
    prefix = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    for node in tree_of(path).body:
        if isinstance(node, Function):
            yield f"{prefix}.{node.name}", node
        elif isinstance(node, ast.ClassDef):
            yield from ((f"{prefix}.{node.name}.{item.name}", item) for item in node.body if isinstance(item, Function))


def is_public(name: str) -> bool:
    return not any(part.startswith("_") for part in name.split(".")[1:])


def lines_of(function: Function) -> int:
    """Count a function's lines without its docstring."""
    first = function.body[0]
    documented = ast.get_docstring(function) is not None
    docstring = (first.end_lineno or 0) - first.lineno + 1 if documented else 0
    return (function.end_lineno or 0) - function.lineno + 1 - docstring


def test_every_module_is_in_the_table() -> None:
    unknown = {module_of(path) for path in FILES} - {"__init__"} - LEVEL.keys()
    assert not unknown, f"{unknown} is new: give it a level in LEVELS, in tests/test_architecture.py"


@every_file
def test_imports_only_from_lower_levels(path: Path) -> None:
    level = LEVEL.get(module_of(path), 0)
    wrong = {name for name in siblings_of(path) - {FREE_FOR_ALL} if LEVEL.get(name, 99) >= level}
    assert not wrong, f"{module_of(path)} is on level {level} and imports {wrong}"


@every_file
def test_level_0_needs_the_standard_library_alone(path: Path) -> None:
    if LEVEL.get(module_of(path), 0) == 0:
        roots = {name.split(".")[0] for name in imports_of(path)}
        assert roots <= sys.stdlib_module_names | {"trainer"}


@every_file
def test_name_says_what_lives_there(path: Path) -> None:
    assert not FORBIDDEN_NAMES & {path.stem, path.parent.name}


@every_file
def test_file_is_short_and_says_what_it_is(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_FILE_LINES
    assert ast.get_docstring(tree_of(path)), "the module docstring is missing"


@every_file
def test_functions_are_short(path: Path) -> None:
    for name, function in functions_of(path):
        allowed = LONGER_FUNCTIONS.get((module_of(path), function.name), MAX_FUNCTION_LINES)
        assert lines_of(function) <= allowed, f"{name} has {lines_of(function)} lines without its docstring"


@every_file
def test_public_functions_have_docstrings(path: Path) -> None:
    missing = [name for name, function in functions_of(path) if is_public(name) and not ast.get_docstring(function)]
    assert not missing


@every_file
def test_public_functions_take_two_positional_arguments_at_most(path: Path) -> None:
    wrong = []
    for name, function in functions_of(path):
        positional = [
            item.arg for item in function.args.posonlyargs + function.args.args if item.arg not in ("self", "cls")
        ]
        if is_public(name) and len(positional) > MAX_POSITIONAL:
            wrong.append(f"{name}({', '.join(positional)})")
    assert not wrong


@every_file
def test_outside_world_enters_at_one_door(path: Path) -> None:
    used = imports_of(path) | {
        f"{node.value.id}.{node.attr}"
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }
    wrong = {name for name, allowed in OUTSIDE.items() if name in used and module_of(path) not in allowed}
    assert not wrong, f"{module_of(path)} may not use {wrong}"


@every_file
def test_nothing_is_pickled(path: Path) -> None:
    found = PICKLES & {name.split(".")[0] for name in imports_of(path)}
    restriction = READS_PICKLES.get(str(path.relative_to(PACKAGE)))
    assert not found if restriction is None else restriction in path.read_text()
    loads = re.findall(r"(?<!safetensors\.)torch\.load\([^\n]*", path.read_text())
    assert all("weights_only=True" in line for line in loads)


@every_file
def test_nothing_is_left_to_do(path: Path) -> None:
    assert not re.findall(r"\b(?:TODO|FIXME|XXX)\b", path.read_text())


@pytest.mark.parametrize("module", sorted({module_of(path) for path in FILES} - {"__init__", "__main__"}))
def test_module_has_tests_of_its_name(module: str) -> None:
    tests = ROOT / "tests"
    assert [*tests.glob(f"test_{module}*.py"), *tests.glob(f"{module}/test_*.py")], (
        f"no tests/test_{module}.py or tests/{module}/"
    )


def test_command_line_and_agent_start_without_torch() -> None:
    code = "import sys, trainer.cli, trainer.agent, trainer.launch, trainer.config; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    heavy = {"torch", "torchvision", "numpy", "PIL"} & set(run.stdout.split())
    assert not heavy, f"imported at start: {heavy}"
