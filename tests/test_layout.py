"""What the shape of the code promises: who imports whom, whose clock is read, and how long a function is."""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import redlease
import redlease_temporal

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import ModuleType

# The package as it is installed, which in `make test` is the built wheel.
PACKAGE = Path(redlease.__file__).parent
TESTS = Path(__file__).parent

# A module imports from its own row and from the rows above it.
ROWS = (
    {"errors", "models", "clock", "limits"},
    {"wire", "schedule", "driver"},
    {"route"},
    {"addresses"},
    {"connection", "sentinel", "topology"},
    {"node"},
    {"cluster"},
    {"keeper"},
    {"waiting", "wish"},
    {"semaphore", "hold"},
    {"embedded", "urls"},
    {"client"},
    {"testing", "cli"},
)
FUNCTION_LINES_MAX = 60

MODULES = sorted(PACKAGE.rglob("*.py"))

# The same of the adapter; the first rows are what workflow code imports, into its sandbox too.
ADAPTER = Path(redlease_temporal.__file__).parent
ADAPTER_ROWS = (
    {"calls", "errors", "settings"},
    {"coordinator_calls", "registry"},
    {"slot_calls", "wishes"},
    {"bookkeeping", "post"},
    {"run"},
    {"backend", "hold"},
    {"limited", "sequences"},
    {"place_workflow", "sequence_workflow"},
    {"redis_backend", "coordinator_backend", "slot_backend"},
    {"primitives"},
    {"coordinator", "slot"},
    {"owners", "turns"},
    {"endings"},
    {"telling"},
    {"coordinator_activities", "slot_activities", "usher"},
    {"keepers"},
    {"admission", "slot_admission"},
    {"watcher", "admitted"},
    {"relay"},
    {"requests"},
    {"activities", "exclusive"},
    {"interceptors", "admission_client"},
    {"worker"},
    {"testing", "sequence_client", "outside"},
)
WORKFLOW_SIDE = {
    "",
    "calls",
    "coordinator_calls",
    "errors",
    "post",
    "run",
    "hold",
    "backend",
    "redis_backend",
    "coordinator_backend",
    "slot_backend",
    "slot_calls",
    "wishes",
    "primitives",
    "limited",
    "place_workflow",
    "sequences",
    "sequence_workflow",
}
# What these may import of the core: plain data, errors and checks.
PLAIN = {"errors", "models", "limits"}

ADAPTER_MODULES = sorted(ADAPTER.rglob("*.py"))

# The same of the benchmarks, which are a program and no package: its modules import each other by their bare names.
BENCHMARK_ROWS = (
    {"callers", "floor", "lua_steps", "meter", "server"},
    {"peers"},
    {"workloads"},
    {"growth"},
    {"trial"},
    {"report"},
    {"plots", "counts"},
    {"breakdown", "scaling_out"},
    {"__main__"},
)
BENCHMARKS = sorted((TESTS.parent / "benchmarks").glob("*.py"))


def module_name(path: Path, package: Path = PACKAGE) -> str:
    """Return the name of a module or subpackage directly under the package, such as ``wire``; empty for the package."""
    return path.relative_to(package).with_suffix("").parts[0].removeprefix("__init__")


def row_of(name: str, rows: Sequence[set[str]] = ROWS) -> int:
    """Return the row that a module stands in; the package itself, which imports every public name, is below all."""
    return next((number for number, row in enumerate(rows) if name in row), len(rows))


def imported(path: Path, package: Path = PACKAGE, of: str = "redlease", *, types: bool = True) -> Iterator[str]:
    """Yield the modules of a package that a file imports, inside a function too, and for its types if that counts."""
    tree = ast.parse(path.read_text())
    if not types:
        tree.body = [node for node in tree.body if not is_for_types(node)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            source = absolute_name(path, node, package)
            # `from . import wire` names a module, `from .wire import keys` a name inside one.
            names = [source, *(f"{source}.{alias.name}" for alias in node.names if source == of)]
        else:
            continue
        yield from (name.split(".")[1] for name in names if name.startswith(f"{of}."))


def is_for_types(node: ast.stmt) -> bool:
    """Tell whether a statement is what only a type checker sees."""
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def absolute_name(path: Path, node: ast.ImportFrom, package: Path = PACKAGE) -> str:
    """Return the full name of the module that a statement imports from."""
    parents = [package.name, *path.relative_to(package).parts[:-1]]
    base = parents[: len(parents) - node.level + 1] if node.level else []
    return ".".join([*base, *([node.module] if node.module else [])])


def module_id(path: Path) -> str:
    """Return how a module of either package, or of the benchmarks, is shown."""
    for root in (PACKAGE, ADAPTER.parent):
        if path.is_relative_to(root):
            return str(path.relative_to(root))
    return f"{path.parent.name}/{path.name}"


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
        assert ADAPTER.parent == PACKAGE.parent
        assert (ADAPTER / "py.typed").exists()
        assert list(ADAPTER.glob("lua/*.lua"))
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


def test_every_module_of_the_adapter_stands_in_a_row() -> None:
    """A new module of the adapter is given its place before it imports anything."""
    unknown = {module_name(path, ADAPTER) for path in ADAPTER_MODULES} - set().union(*ADAPTER_ROWS) - {""}
    assert not unknown, f"give these a row: {unknown}"


@pytest.mark.parametrize("path", ADAPTER_MODULES, ids=lambda path: path.name)
def test_a_row_of_the_adapter_imports_only_rows_above_it(path: Path) -> None:
    """No module of the adapter imports one from a row below its own, save for the name of its type."""
    name = module_name(path, ADAPTER)
    own = set(imported(path, ADAPTER, "redlease_temporal", types=False))
    row = row_of(name, ADAPTER_ROWS)
    below = sorted(other for other in own if row < row_of(other, ADAPTER_ROWS) < len(ADAPTER_ROWS))
    assert not below, f"{name} imports {below}, which stand below it"


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: f"benchmarks/{path.name}")
def test_a_row_of_the_benchmarks_imports_only_rows_above_it(path: Path) -> None:
    """Every module of the benchmarks has a row, and imports none from a row below its own."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Import | ast.ImportFrom)]
    names: set[str | None] = set()
    for node in nodes:
        names |= {node.module} if isinstance(node, ast.ImportFrom) else {alias.name for alias in node.names}
    assert path.stem in set().union(*BENCHMARK_ROWS)
    rows = {name: row_of(name, BENCHMARK_ROWS) for name in set().union(*BENCHMARK_ROWS) & names}
    assert not {name for name, row in rows.items() if row > row_of(path.stem, BENCHMARK_ROWS)}


@pytest.mark.parametrize("name", sorted(WORKFLOW_SIDE))
def test_the_workflow_side_needs_neither_relay_nor_redis(name: str) -> None:
    """What workflow code imports stands by itself, on the core's plain data."""
    path = ADAPTER / f"{name or '__init__'}.py"
    assert set(imported(path, ADAPTER, "redlease_temporal")) & set().union(*ADAPTER_ROWS) <= (WORKFLOW_SIDE)
    assert set(imported(path, ADAPTER)) <= PLAIN | set(redlease.__all__) - set(redlease._LATER)
    assert not re.search(r"^ *(?:import|from) redis\b", path.read_text(), re.MULTILINE)


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


@pytest.mark.parametrize("path", [*MODULES, *ADAPTER_MODULES], ids=module_id)
def test_no_module_reads_the_local_wall_clock(path: Path) -> None:
    """Time is the server's, or a local clock that nobody steps."""
    calls = [ast.unparse(node.func) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    wall_clocks = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.datetime.now"}
    assert not wall_clocks & set(calls)


@pytest.mark.parametrize("path", [*MODULES, *ADAPTER_MODULES, *BENCHMARKS], ids=module_id)
def test_no_function_is_long(path: Path) -> None:
    """A function is read in one glance."""
    lengths = {node.name: (node.end_lineno or node.lineno) - node.lineno + 1 for node in functions(path)}
    assert not {name: length for name, length in lengths.items() if length > FUNCTION_LINES_MAX}


@pytest.mark.parametrize(
    ("package", "name"),
    [(package, name) for package in (redlease, redlease_temporal) for name in sorted(package.__all__)],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_what_is_public_is_documented(package: ModuleType, name: str) -> None:
    """Every public name has a docstring, and so has every public method of a public class."""
    thing = getattr(package, name)
    assert inspect.isroutine(thing) or inspect.isclass(thing)
    assert inspect.getdoc(thing)
    methods = {key: value for key, value in vars(thing).items() if not key.startswith("_") and callable(value)}
    assert not [key for key, method in methods.items() if not inspect.getdoc(method)]


@pytest.mark.parametrize("path", ADAPTER_MODULES, ids=lambda path: path.name)
def test_what_stands_in_the_adapter_is_documented(path: Path) -> None:
    """Every module, class and function that stands at the head of a module and is not private has a docstring."""
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree)
    kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    public = [node for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")]
    assert not [node.name for node in public if not ast.get_docstring(node)]


@pytest.mark.parametrize("path", sorted(TESTS.rglob("test_*.py")), ids=lambda path: path.name)
def test_every_test_says_what_it_shows(path: Path) -> None:
    """Every test has a docstring."""
    silent = [node.name for node in functions(path) if node.name.startswith("test_") and not ast.get_docstring(node)]
    assert not silent
