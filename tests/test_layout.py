"""What the shape of the code promises: who imports whom, whose clock is read, and how long a function is."""

from __future__ import annotations

import ast
import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import redlease

if TYPE_CHECKING:
    from collections.abc import Iterator

# The package as it is installed, which in `make test` is the built wheel.
PACKAGE = Path(redlease.__file__).parent
TESTS = Path(__file__).parent

# A module imports from its own row and from the rows above it.
ROWS = (
    {"errors", "models", "clock", "limits"},
    {"wire", "schedule", "driver"},
    {"connection"},
    {"keeper"},
    {"waiting"},
    {"semaphore", "hold"},
    {"embedded"},
    {"client"},
    {"sync", "testing", "cli"},
)
FUNCTION_LINES_MAX = 60

MODULES = sorted(PACKAGE.rglob("*.py"))


def module_name(path: Path) -> str:
    """Return the name of a module or subpackage directly under the package, such as ``wire``; empty for the package."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0].removeprefix("__init__")


def row_of(name: str) -> int:
    """Return the row that a module stands in; the package itself, which imports every public name, is below all."""
    return next((number for number, row in enumerate(ROWS) if name in row), len(ROWS))


def imported(path: Path) -> Iterator[str]:
    """Yield the modules of this package that a file imports, for its types or inside a function too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            source = absolute_name(path, node)
            # `from . import wire` names a module, `from .wire import keys` a name inside one.
            names = [source, *(f"{source}.{alias.name}" for alias in node.names if source == "redlease")]
        else:
            continue
        yield from (name.split(".")[1] for name in names if name.startswith("redlease."))


def absolute_name(path: Path, node: ast.ImportFrom) -> str:
    """Return the full name of the module that a statement imports from."""
    parents = ["redlease", *path.relative_to(PACKAGE).parts[:-1]]
    base = parents[: len(parents) - node.level + 1] if node.level else []
    return ".".join([*base, *([node.module] if node.module else [])])


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield every function of a file, methods and inner ones included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def test_the_tests_run_against_the_wheel() -> None:
    """In `make test` the package under test is the installed one, and the source tree cannot be imported."""
    if os.environ.get("REDLEASE_TEST_WHEEL"):
        assert "site-packages" in PACKAGE.parts
        assert (PACKAGE / "py.typed").exists()
        assert list(PACKAGE.glob("lua/*.lua"))
        # A process that a test starts finds the same.
        told = subprocess.run(
            [sys.executable, "-c", "import redlease; print(redlease.__file__)"],
            capture_output=True,
            text=True,
            check=True,
        )
        assert told.stdout.strip() == redlease.__file__


def test_every_module_stands_in_a_row() -> None:
    """A new module is given its place before it imports anything."""
    unknown = {module_name(path) for path in MODULES} - set().union(*ROWS) - {""}
    assert not unknown, f"give these a row: {unknown}"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_row_imports_only_rows_above_it(path: Path) -> None:
    """No module imports one from a row below its own."""
    name = module_name(path)
    below = sorted(other for other in imported(path) if row_of(name) < row_of(other) < len(ROWS))
    assert not below, f"{name} imports {below}, which stand below it"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_the_core_knows_nothing_of_temporal(path: Path) -> None:
    """The dependency goes one way: the adapter imports the core."""
    text = path.read_text()
    assert "import temporalio" not in text
    assert "from temporalio" not in text
    assert "redlease_temporal" not in text


def test_the_package_holds_the_public_names_and_nothing_else() -> None:
    """`redlease/__init__.py` imports names, some of them later, lists them in `__all__`, and defines nothing else."""
    body = ast.parse((PACKAGE / "__init__.py").read_text()).body
    assert isinstance(body[0], ast.Expr), "it begins with a docstring"
    for node in body[1:]:
        if isinstance(node, ast.Assign):
            assert ast.unparse(node.targets[0]) in {"__all__", "_LATER"}
        elif isinstance(node, ast.If):
            assert ast.unparse(node.test) == "TYPE_CHECKING"
        elif isinstance(node, ast.FunctionDef):
            assert node.name in {"__getattr__", "__dir__"}
        else:
            assert isinstance(node, ast.ImportFrom), ast.unparse(node)
    assert sorted(redlease.__all__) == sorted(set(redlease.__all__))
    assert all(hasattr(redlease, name) for name in redlease.__all__)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_module_reads_the_local_wall_clock(path: Path) -> None:
    """Time is the server's, or a local clock that nobody steps."""
    calls = [ast.unparse(node.func) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    wall_clocks = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.datetime.now"}
    assert not wall_clocks & set(calls)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_function_is_long(path: Path) -> None:
    """A function is read in one glance."""
    lengths = {node.name: (node.end_lineno or node.lineno) - node.lineno + 1 for node in functions(path)}
    assert not {name: length for name, length in lengths.items() if length > FUNCTION_LINES_MAX}


@pytest.mark.parametrize("name", sorted(redlease.__all__))
def test_what_is_public_is_documented(name: str) -> None:
    """Every public name has a docstring, and so has every public method of a public class."""
    thing = getattr(redlease, name)
    assert inspect.isroutine(thing) or inspect.isclass(thing)
    assert inspect.getdoc(thing)
    methods = {key: value for key, value in vars(thing).items() if not key.startswith("_") and callable(value)}
    assert not [key for key, method in methods.items() if not inspect.getdoc(method)]


@pytest.mark.parametrize("path", sorted(TESTS.glob("test_*.py")), ids=lambda path: path.name)
def test_every_test_says_what_it_shows(path: Path) -> None:
    """Every test has a docstring."""
    silent = [node.name for node in functions(path) if node.name.startswith("test_") and not ast.get_docstring(node)]
    assert not silent
