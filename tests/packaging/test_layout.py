"""What the shape of the code promises: who imports whom, whose clock is read, and how long a function is."""

from __future__ import annotations

import ast
import collections
import functools
import inspect
import itertools
import os
import re
import shutil
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
TESTS = Path(__file__).parents[1]

# From the lowest layer up: a module imports from its own layer and from those below. What stands in one group knows
# nothing of the other groups in its layer. A name stands for everything in that folder.
LAYERS = (
    "errors models _core.clock _core.log events _core.block_task",
    "_core.limits | embedded",
    "_core.protocol",
    "_core.transport",
    "_core.session",
    "_core.options _core.hold _core.operations",
    "guards",
    "_core.primitives",
    "_core.client",
    "sync",
    "_web",
    "_cli | testing | otel | integrations",
)
ADAPTER_LAYERS = (
    "_payloads",
    "errors",
    "_workflow_side | _common",
    "_backends.redis | _backends.slots | _backends.coordinator | _backends.nexus",
    "_exclusive | _admission | _sequence | _nexus",
    "_plugin",
    "worker",
    "outside | sequence_client | testing",
)
FUNCTION_LINES_MAX = 50
FILES_MAX = 14
TYPESCRIPT_LINES_MAX = 820
ALIASES = (redlease.Duration, redlease.OnLost)

MODULES = sorted(PACKAGE.rglob("*.py"))

ADAPTER = Path(redlease_temporal.__file__).parent
# What workflow code may import of the core: plain data, errors and checks.
PLAIN = {"redlease", "redlease.errors", "redlease.models"} | {
    f"redlease._core{name}" for name in ("", ".limits", ".block_task")
}

ADAPTER_MODULES = sorted(ADAPTER.rglob("*.py"))

# The same of the benchmarks, which are a program and no package: its modules import each other by their bare names.
BENCHMARK_ROWS = (
    {"before", "callers", "filling", "floor", "lua_steps", "meter", "server"},
    {"peers"},
    {"workloads"},
    {"fleet", "growth"},
    {"trial"},
    {"report"},
    {"plots", "counts"},
    {"breakdown", "fairness", "scaling_out", "tenants", "worst"},
    {"__main__"},
)
BENCHMARKS = sorted((TESTS.parent / "benchmarks").glob("*.py"))


class Imports:
    """Which modules of a package import which, for their types too."""

    def __init__(self, package: Path) -> None:
        self.package = package
        self.paths = {self.name(path): path for path in sorted(package.rglob("*.py"))}

    @functools.cached_property
    def of(self) -> dict[str, set[str]]:
        """Return what each module imports."""
        return {name: self.imported(path) for name, path in self.paths.items()}

    def name(self, path: Path) -> str:
        """Return the dotted name of a module, such as ``redlease._core.protocol.scripts``."""
        return ".".join(path.relative_to(self.package.parent).with_suffix("").parts).removesuffix(".__init__")

    def imported(self, path: Path) -> set[str]:
        """Return the dotted names of what a file imports, wherever in it that stands."""
        found: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                source = self.source(path, node)
                # What is imported from a package may be a module in it.
                found |= {f"{source}.{alias.name}" for alias in node.names} | {source}
        return found

    def source(self, path: Path, node: ast.ImportFrom) -> str:
        """Return the dotted name of what a statement imports from."""
        parents = path.relative_to(self.package.parent).parts[:-1]
        base = parents[: len(parents) - node.level + 1] if node.level else ()
        return ".".join([*base, *([node.module] if node.module else [])])

    def first_in(self, folders: str) -> str:
        """Return a module that stands in the first of these folders, or is the first of these."""
        begin = f"{self.package.name}.{folders.split(maxsplit=1)[0]}"
        return next(
            name for name, path in self.paths.items() if f"{name}.".startswith(f"{begin}.") and path.stem != "__init__"
        )

    def own(self, name: str) -> set[str]:
        """Return the modules of this package that a module imports, but for the packages around it."""
        return {other for other in self.of[name] & self.paths.keys() if not name.startswith(f"{other}.")} - {name}

    def reachable(self, name: str) -> set[str]:
        """Return a module and all that is imported with it."""
        found, ahead = set(), [name]
        while ahead:
            each = ahead.pop()
            if each not in found:
                found.add(each)
                ahead.extend(self.own(each))
        return found

    def circle(self) -> list[str]:
        """Return modules that import each other in a circle, if there are any."""
        return next((sorted(others) for name in self.paths if len(others := self.around(name)) > 1), [])

    def around(self, name: str) -> set[str]:
        """Return the modules that import this one and are imported by it."""
        return {other for other in self.reachable(name) if name in self.reachable(other)}


def place_of(name: str, layers: Sequence[str]) -> tuple[int, int] | None:
    """Return the layer and the group that a module stands in, None for the package itself."""
    for layer, row in enumerate(layers):
        for group, folders in enumerate(row.split(" | ")):
            if any(f"{name}.".startswith(f"{folder}.") for folder in folders.split()):
                return layer, group
    return None


def breaches(imports: Imports, layers: Sequence[str]) -> list[str]:
    """Return each import of a higher layer, or of another group in the same."""
    found = []
    for name in imports.paths:
        own = place_of(name.partition(".")[2], layers)
        for other in imports.own(name):
            place = place_of(other.partition(".")[2], layers)
            if own and place and (place[0] > own[0] or (place[0] == own[0] and place[1] != own[1])):
                found.append(f"{name} imports {other}")
    return found


IMPORTS = {"redlease": Imports(PACKAGE), "redlease_temporal": Imports(ADAPTER)}
BOTH = pytest.mark.parametrize(
    ("package", "layers"), [("redlease", LAYERS), ("redlease_temporal", ADAPTER_LAYERS)], ids=list(IMPORTS)
)


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
        assert list(PACKAGE.glob("_core/lua/*.lua"))
        assert ADAPTER.parent == PACKAGE.parent
        assert (ADAPTER / "py.typed").exists()
        assert list(ADAPTER.rglob("lua/*.lua"))
        # A process that a test starts finds the same.
        told = subprocess.run(
            [sys.executable, "-c", "import redlease; print(redlease.__file__)"],
            capture_output=True,
            text=True,
            check=True,
        )
        assert told.stdout.strip() == redlease.__file__


@BOTH
def test_every_module_stands_in_a_layer(package: str, layers: Sequence[str]) -> None:
    """A new module is given its place before it imports anything; folders are no more than their modules."""
    names = {name for name, path in IMPORTS[package].paths.items() if path.name != "__init__.py"}
    assert not {name for name in names if place_of(name.partition(".")[2], layers) is None}


@BOTH
def test_a_layer_imports_only_layers_below_it(package: str, layers: Sequence[str]) -> None:
    """No module imports one of a higher layer, nor of another group in its own, not even for its types."""
    assert breaches(IMPORTS[package], layers) == []


@BOTH
def test_an_import_that_breaks_the_layers_is_found(package: str, layers: Sequence[str], tmp_path: Path) -> None:
    """An import of the next layer, or of another group in its own, that is put into a module of a layer is found."""
    copy = shutil.copytree(IMPORTS[package].package, tmp_path / package)
    imports = Imports(copy)
    in_groups = [row.split(" | ") for row in layers]
    pairs = [(row[0], above[0]) for row, above in itertools.pairwise(in_groups)]
    pairs += [(group, other) for row in in_groups for group, other in itertools.permutations(row, 2)]
    for breaking, broken in pairs:
        name, other = imports.first_in(breaking), imports.first_in(broken)
        path = imports.paths[name]
        before = path.read_text()
        path.write_text(f"{before}\nif TYPE_CHECKING:\n    import {other}\n")
        imports.of[name] = imports.imported(path)
        assert f"{name} imports {other}" in breaches(imports, layers)
        path.write_text(before)
        imports.of[name] = imports.imported(path)


@pytest.mark.parametrize("package", list(IMPORTS))
def test_no_modules_import_each_other_in_a_circle(package: str) -> None:
    """Whichever module one begins with, what it stands on does not stand on it."""
    assert IMPORTS[package].circle() == []


@pytest.mark.parametrize("path", [PACKAGE, ADAPTER], ids=lambda path: path.name)
def test_folders_can_be_seen_whole(path: Path) -> None:
    """No folder has more than fourteen files."""
    folders = collections.Counter(each.parent for each in path.rglob("*") if each.suffix in {".py", ".lua", ".typed"})
    assert not {folder: count for folder, count in folders.items() if count > FILES_MAX}


def test_the_typescript_client_stays_small() -> None:
    """It has no more than 820 lines, without comments, blank lines and the copies of the scripts."""
    folder = TESTS.parent / "adapters" / "typescript" / "src"
    sources = [path for path in folder.glob("*.ts") if path.name != "lua.ts"]
    without_comments = [re.sub(r"/\*\*.*?\*/", "", path.read_text(), flags=re.DOTALL) for path in sources]
    lines = [line.strip() for text in without_comments for line in text.splitlines()]
    assert 700 < sum(bool(line) and not line.startswith("//") for line in lines) <= TYPESCRIPT_LINES_MAX


def row_of(name: str, rows: Sequence[set[str]]) -> int:
    """Return the row that a module of the benchmarks stands in."""
    return next((number for number, row in enumerate(rows) if name in row), len(rows))


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


def test_the_adapter_imports_one_module_of_the_inside_of_the_core() -> None:
    """Public names, plain data, the clock, block tasks, and `operations`, through which it runs every script."""
    seam = PLAIN | {"redlease._core.clock", "redlease._core.operations", "redlease.testing"}
    for name, imported in IMPORTS["redlease_temporal"].of.items():
        assert imported & IMPORTS["redlease"].paths.keys() <= seam, name


def test_workflow_code_needs_neither_relay_nor_redis() -> None:
    """What is imported with workflow code, into its sandbox too, stands on the core's plain data alone."""
    imports = IMPORTS["redlease_temporal"]
    begun = {name for name in imports.paths if name.split(".")[1:2] in ([], ["_payloads"], ["_workflow_side"])}
    begun |= {"redlease_temporal._admission.slot_workflow", "redlease_temporal._sequence.workflow"}
    begun |= {"redlease_temporal._nexus.acquire_workflow"}
    for each in set().union(*map(imports.reachable, begun)):
        core = {other for other in imports.of[each] if other.split(".")[0] == "redlease"}
        names = {other for other in core if other in IMPORTS["redlease"].paths}
        assert names <= PLAIN, each
        later = {f"redlease.{public}" for public in redlease._LATER}
        assert not core & later, each
        assert not {other for other in imports.of[each] if other.split(".")[0] == "redis"}, each


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
            assert ast.unparse(node.targets[0]) in {"__all__", "__version__", "_LATER"}
        elif isinstance(node, ast.If):
            assert ast.unparse(node.test) == "TYPE_CHECKING"
        elif isinstance(node, ast.FunctionDef):
            assert node.name in {"__getattr__", "__dir__"}
        else:
            assert isinstance(node, ast.ImportFrom), ast.unparse(node)
    assert sorted(redlease.__all__) == sorted(set(redlease.__all__))
    assert all(hasattr(redlease, name) for name in redlease.__all__)


@pytest.mark.parametrize(
    "path", [path for path in (*MODULES, *ADAPTER_MODULES) if path.parent.name != "otel"], ids=module_id
)
def test_no_module_reads_the_local_wall_clock(path: Path) -> None:
    """Time is the server's, or a local clock that nobody steps; only spans are dated by the wall clock."""
    calls = [ast.unparse(node.func) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    wall_clocks = {"time.time", "time.time_ns", "time_ns", "datetime.now", "datetime.utcnow", "datetime.datetime.now"}
    assert not wall_clocks & set(calls)


@pytest.mark.parametrize("path", [*MODULES, *ADAPTER_MODULES, *BENCHMARKS], ids=module_id)
def test_no_function_is_long(path: Path) -> None:
    """A function is read in one glance, unless a program writes it."""
    if path.read_text().startswith("# Generated by "):
        return
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
    if thing in ALIASES:
        return  # which have no docstring of their own; docs/reference tells of them
    assert inspect.isroutine(thing) or inspect.isclass(thing)
    assert inspect.getdoc(thing)
    methods = {key: value for key, value in vars(thing).items() if not key.startswith("_") and callable(value)}
    assert not [key for key, method in methods.items() if not inspect.getdoc(method)]


@pytest.mark.parametrize("path", ADAPTER_MODULES, ids=lambda path: path.name)
def test_what_stands_in_the_adapter_is_documented(path: Path) -> None:
    """Every module, class and function that stands at the head of a module and is not private has a docstring.

    Of a function with overloads it is the last that has it.
    """
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree)
    kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    public = [node for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")]
    documented = {node.name for node in public if ast.get_docstring(node)}
    assert not [node.name for node in public if node.name not in documented]


@pytest.mark.parametrize("path", sorted(TESTS.rglob("test_*.py")), ids=lambda path: path.name)
def test_every_test_says_what_it_shows(path: Path) -> None:
    """Every test has a docstring."""
    silent = [node.name for node in functions(path) if node.name.startswith("test_") and not ast.get_docstring(node)]
    assert not silent
