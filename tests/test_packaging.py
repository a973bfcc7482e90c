"""What is installed and how: the lock, the wheel, the version, the command, and what `make` says when it cannot go on."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import trainer

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
LOCKS = ["requirements.lock", "requirements-test.lock"]

#: Where a package's name and the name it is imported by differ.
IMPORTED_AS = {
    "pillow": "PIL",
    "python-dotenv": "dotenv",
    "nvidia-ml-py": "pynvml",
    "prometheus-client": "prometheus_client",
}


def pins_of(lock: str) -> dict[str, tuple[str, frozenset[str]]]:
    """Read a lock: version and hashes by package name."""
    text = (ROOT / lock).read_text().replace("\\\n", " ")
    pins: dict[str, tuple[str, frozenset[str]]] = {}
    for line in text.splitlines():
        if line and not line.lstrip().startswith("#"):
            match = re.match(r"([A-Za-z0-9._-]+)==(\S+)", line)
            assert match, f"{lock} holds a line that is no pin: {line}"
            pins[canonicalize_name(match[1])] = (match[2], frozenset(re.findall(r"--hash=sha256:([0-9a-f]{64})", line)))
    return pins


def unmet(requirements: list[str], *, lock: str) -> list[str]:
    """Return the requirements that a lock does not pin within their range."""
    pins = pins_of(lock)
    parsed = [Requirement(line) for line in requirements]
    return [
        str(item)
        for item in parsed
        if not item.specifier.contains(pins.get(canonicalize_name(item.name), ("0", None))[0])
    ]


@pytest.mark.parametrize("lock", LOCKS)
def test_lock_gives_every_package_a_hash_and_names_no_host(lock: str) -> None:
    pins = pins_of(lock)
    assert [name for name, (_, hashes) in pins.items() if not hashes] == []
    assert not re.search(r"://|--(?!hash)\w|\bfile:|@ ", (ROOT / lock).read_text())


@pytest.mark.parametrize("lock", LOCKS)
def test_lock_holds_what_pyproject_asks_for(lock: str) -> None:
    assert unmet(PYPROJECT["project"]["dependencies"], lock=lock) == []
    assert unmet(PYPROJECT["build-system"]["requires"], lock=lock) == []


def test_test_lock_is_the_lock_and_the_test_group() -> None:
    assert unmet(PYPROJECT["dependency-groups"]["test"], lock="requirements-test.lock") == []
    assert pins_of("requirements.lock").items() <= pins_of("requirements-test.lock").items()


def test_dependencies_are_what_the_code_imports() -> None:
    nodes = [node for path in (ROOT / "trainer").rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    imported = {name.split(".")[0] for name in names} - sys.stdlib_module_names - {"trainer"}
    declared = {Requirement(line).name for line in PYPROJECT["project"]["dependencies"]}
    assert imported == {IMPORTED_AS.get(name, name) for name in declared}


def test_version_is_that_of_the_package() -> None:
    assert "version" in PYPROJECT["project"]["dynamic"]
    try:
        installed = importlib.metadata.version("trainer")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the project is not installed; `make test` installs it")
    assert installed == trainer.__version__


def test_installed_command_answers() -> None:
    command = shutil.which("trainer", path=str(Path(sys.executable).parent))
    if command is None:
        pytest.skip("the project is not installed; `make test` installs it")
    run = subprocess.run([command, "--help"], capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL)
    assert "train" in run.stdout


def test_wheel_holds_the_package_and_nothing_else(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(ROOT / "trainer", source / "trainer", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "-w"]
    subprocess.run([*command, tmp_path, source], check=True, capture_output=True, text=True)
    (wheel,) = tmp_path.glob(f"trainer-{trainer.__version__}-py3-none-any.whl")
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert held == {
        str(path.relative_to(ROOT)) for path in (ROOT / "trainer").rglob("*") if path.suffix in (".py", ".typed")
    }


def make(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["make", *args], cwd=cwd, capture_output=True, text=True, stdin=subprocess.DEVNULL)


def test_make_alone_lists_every_target() -> None:
    text = (ROOT / "Makefile").read_text()
    (phony,) = re.findall(r"^\.PHONY: (.*)", text, flags=re.M)
    shown = re.findall(r"^  make (\S+) +\S", make(cwd=ROOT).stdout, flags=re.M)
    assert sorted(shown) == sorted(phony.split())


def test_recipes_of_the_makefile_are_one_line_each() -> None:
    assert not re.search(r"^\t.*\n\t", (ROOT / "Makefile").read_text().split(".DEFAULT_GOAL")[1], flags=re.M)


@pytest.mark.parametrize(
    ("patch", "said"),
    [
        ("sys.version_info = (3, 10, 9)", "Python 3.11 to 3.13 is needed"),
        ("sys.version_info = (3, 14, 0)", "Python 3.11 to 3.13 is needed"),
        ("import importlib.util; importlib.util.find_spec = lambda name: None", "cannot make a venv"),
    ],
)
def test_make_setup_refuses_an_unfit_python_in_one_line(tmp_path: Path, patch: str, said: str) -> None:
    python = tmp_path / "python"
    python.write_text(f"""#!/bin/sh\nexec {sys.executable} -c 'import sys; {patch}; exec(sys.argv[1])' "$2"\n""")
    python.chmod(0o755)
    (tmp_path / "trainer").mkdir()
    for name in ("requirements.lock", "pyproject.toml", "trainer/__init__.py"):
        (tmp_path / name).touch()
    shutil.copy(ROOT / "Makefile", tmp_path)

    run = make("setup", f"PYTHON={python}", cwd=tmp_path)

    assert run.returncode != 0
    first, *rest = run.stderr.splitlines()
    assert said in first
    assert [line for line in rest if not line.startswith("make")] == []
    assert not (tmp_path / ".venv").exists()
