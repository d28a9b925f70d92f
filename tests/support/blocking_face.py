"""The blocking face is written from the asyncio one: signatures, docstrings, and what merely calls the asyncio twin.

`python tests/support/blocking_face.py` writes the modules of MODULES, as `make face` does; with `--check` it fails if
one is not as it would be written. The tables say in what the two faces differ. A text that a table replaces must be
there: who changes it in the asyncio face decides here what threads read.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
CORE, SYNC = "redlease/_core/", ROOT / "redlease" / "sync"
WIDTH = 120


@dataclass(frozen=True)
class Face:
    """A class of a generated module.

    Attributes:
        sources: Where its methods come from, as `path:class`, the class that users see first.
        base: Its base class, if it has one.
        twin: How its methods get the asyncio twin that they call; empty if they are those of the twin without `await`.
    """

    sources: tuple[str, ...]
    base: str = ""
    twin: str = "self._twin"


@dataclass(frozen=True)
class Module:
    """A generated module: its docstring, its classes, and the rules of style that it breaks as its source does."""

    docstring: str
    faces: dict[str, Face]
    noqa: str = ""


POOL = f"{CORE}primitives/semaphore.py"
MODULES = {
    "client": Module(
        "The blocking client, which makes the primitives: from a URL, a redis-py client, or with an embedded server.",
        {
            "Redlease": Face(
                (f"{CORE}client.py:Redlease", f"{CORE}primitives/factory.py:PrimitiveFactory"),
                twin="self._client.twin",
            )
        },
        noqa="A002, B008",
    ),
    "semaphore": Module(
        "The semaphore and the lock, for threads.",
        {
            "Semaphore": Face(
                (f"{POOL}:Semaphore", f"{CORE}primitives/control.py:ResourceControl"), "BlockingSemaphore"
            ),
            "Lock": Face((f"{POOL}:Lock",), "Semaphore"),
        },
    ),
    "rwlock": Module(
        "The read-write lock, for threads.", {"RWLock": Face((f"{CORE}primitives/rwlock.py:RWLock",), twin="")}
    ),
    "leader": Module(
        "One leader among the processes that stand for it, for threads.",
        {"Leader": Face((f"{CORE}primitives/leader.py:Leader",), twin="")},
    ),
    "guard": Module(
        "The guard in Redis, for threads.",
        {"Guard": Face(("redlease/guards/redis.py:Guard",), "Bound[redlease.Guard]")},
    ),
}

# Where a generated module finds what the blocking face has of its own; all else it imports as its source does.
OWN = {
    ".acquiring": "BlockingSemaphore Units",
    ".all_of": "AllRequest",
    ".decorator": "Decorator",
    ".guard": "Guard",
    ".hold": "Hold HoldRequest OnLost checked_on_lost",
    ".leader": "Leader",
    ".redis_clients": "non_blocking",
    ".rwlock": "RWLock",
    ".semaphore": "Lock Semaphore",
    ".sequence": "SequenceRun",
    ".term": "Term terms_of",
    ".thread.bound": "Bound ProcessClient with_own_server",
    ".watching": "Watch",
    "collections.abc": "Callable Generator",
}
OWN_IMPORTS = {name: f"from {module} import {name}" for module, names in OWN.items() for name in names.split()}
OWN_IMPORTS |= {"redlease": "import redlease", "redis": "import redis\nimport redis.asyncio"}

# What syntax calls, which has another name in the blocking face.
SPELLED = {"__aenter__": "__enter__", "__aexit__": "__exit__"}
ANNOTATIONS = {
    "AsyncGenerator[Snapshot, None]": "Watch",
    "AsyncGenerator[Term, None]": "Generator[Term, None, None]",
    "Callable[[Item, Hold], Awaitable[Any]]": "Callable[[Item, Hold], Any]",
    "Redis | RedisCluster": "redis.Redis | redis.RedisCluster | redis.asyncio.Redis | redis.asyncio.RedisCluster",
}
RETURNS = {"Semaphore.adopt": "Hold"}
DEFAULTS = {"on_lost": "'exit'"}
SIGNATURES = {"RWLock.__init__": "self, client: ProcessClient, make: Callable[[redlease.Redlease], redlease.RWLock]"}

# The bodies that are more than a call of the twin. `{args}`: all parameters, as the twin takes them; `{keywords}`:
# those given by keyword; `{signal}`: all, with `on_lost="signal"`, as the blocking hold tells of a loss by itself.
_MADE = "self = cls.__new__(cls)\nself._client = ProcessClient({})\nreturn self"
_PRIMITIVE = "return {}(self._client, lambda client: client.{}({{args}}))"
BODIES = {
    "Redlease.__init__": "self._client = ProcessClient("
    "lambda: redlease.Redlease(non_blocking(redis_client), {keywords}))",
    "Redlease.from_url": _MADE.format("lambda: redlease.Redlease.from_url({args})"),
    "Redlease.embedded": _MADE.format("with_own_server(settings)"),
    "Redlease.__repr__": "return repr(self._client)",
    "Redlease.__aenter__": "self._client.open()\nreturn self",
    "Redlease.__aexit__": "self.close()",
    "Redlease.close": "self._client.close(redlease.Redlease.close)",
    "Redlease.abandon": "self._client.close(redlease.Redlease.abandon)",
    "Redlease.lock": _PRIMITIVE.format("Lock", "lock"),
    "Redlease.semaphore": _PRIMITIVE.format("Semaphore", "semaphore"),
    "Redlease.rwlock": _PRIMITIVE.format("RWLock", "rwlock"),
    "Redlease.guard": _PRIMITIVE.format("Guard", "guard"),
    "Redlease.all": "return AllRequest(self._client, parts, {keywords})",
    "Redlease.sequence": "return SequenceRun(self._client, {args})",
    "Semaphore.hold": "return HoldRequest(self._client, lambda: self._twin.hold({signal}), on_lost)",
    "Semaphore.holding": "return self._decorator({args})",
    "Semaphore.acquire": "return self._client.call(lambda: self._twin.acquire({args}), undo=self._give_back)",
    "Semaphore.try_acquire": "return self._client.call(lambda: self._twin.try_acquire({args}), undo=self._give_back)",
    "Semaphore.adopt": "checked_on_lost(on_lost)\n"
    "return self._client.call(lambda: self._adopt({args}), undo=Hold._give_up)",
    "Semaphore.release": "return self._client.release(lambda: self._twin.release({args}))",
    "Semaphore.release_all": "return self._client.release(lambda: self._twin.release_all({args}))",
    "Semaphore.watch": "return Watch(self._client, self._twin.watch)",
    "RWLock.__init__": "self.read = Semaphore(client, lambda client: make(client).read)\n"
    "self.write = Semaphore(client, lambda client: make(client).write)",
    "Leader.terms": "return terms_of(self._lock, metadata)",
}

# The words of tasks as those of threads, everywhere.
WORDS = {
    r"\(await ([^()]*(?:\([^()]*\))?)\)": r"\1",
    r"\bawait (?=\w)": "",
    r"\basync (?=with|for|def)": "",
    r"`def` function": "function",
    r"contextlib\.aclosing\(aiter\(": "contextlib.closing(iter(",
    r"contextlib\.aclosing": "contextlib.closing",
    r"\btask(s?)\b": r"thread\1",
}
# What must be left of none of them in a text that no table of texts replaces.
OF_TASKS = re.compile(r"\b(async|await\w*|asyncio|aiter|aclosing|event loop|coroutine|cancel\w*|tasks?)\b")

# What is true of threads in place of what is true of tasks.
TEXTS: dict[str, dict[str, str]] = {
    "Redlease": {
        "A client: one connection": "A client for threads: one connection",
        "A client belongs to the event loop of its first use. Entering it connects and checks the server;": (
            "All clients of a process share one background thread, which runs from the first use of a client until the "
            "last one is closed. A client that was made before a fork, used or not, is a client of its own in each "
            "child. Entering it connects and checks the server, as its first use does otherwise;"
        ),
        "A client of `redis.asyncio` (`Redis`, `RedisCluster`, a Sentinel's `master_for`) or of fakeredis.": (
            "A client of redis-py (`Redis`, `RedisCluster`, a Sentinel's `master_for`), blocking or of "
            "`redis.asyncio`, or of fakeredis."
        ),
        "in the thread of the event loop: it": "in the background thread, which serves all clients of the process: it",
    },
    "Redlease.embedded": {
        "Takes the settings of the class by keyword.": (
            "Takes the settings of the class by keyword. The server is that of the process which entered the client. A "
            "child that is forked then uses it too."
        )
    },
    "Redlease.close": {
        "Releases the holds, removes the waiting calls from their queues, and closes the connection, within seconds.": (
            "Releases the holds, ends the waiting calls of all threads with `Withdrawn`, and closes the connection.\n\n"
            "Idempotent, and for any thread; it takes seconds at most. In a forked child it closes what the child has "
            "opened. A program that ends without it leaves its permits to expire."
        ),
        "The client belongs to another event loop, which still runs.": "It is called in redlease's own thread.",
    },
    "Redlease.all": {
        '"cancel" cancels the body when one of the permits is lost, "signal" only sets': (
            'As for `Semaphore.hold`; "signal" only sets'
        )
    },
    "Redlease.sequence": {
        "`await` it for the list of results, or iterate with `async for`": (
            "Call `results()` for the list of results, or iterate with `for`"
        ),
        "An async function of an item and the `Hold`.": (
            "A plain function of an item and the `Hold`, which runs in the calling thread."
        ),
        'await client.sequence("ledger", payments, post, id="2026-11")': (
            'client.sequence("ledger", payments, post, id="2026-11").results()'
        ),
    },
    "Semaphore.hold": {
        "`hold = await pool.hold()`": "`hold = pool.hold().acquire()`",
        "Do not `yield` from an async generator inside it, except in an `asynccontextmanager`: a loss cancels the "
        "task, which at a `yield` runs the code that iterates. With `contextlib.aclosing`, that code gets "
        "`LeaseLost`.": ("A thread is not cancelled when the permit is lost, so its body has to look at `hold.lost`."),
        '"cancel" cancels the body when the permit is lost, "signal"': (
            '"exit" raises `LeaseLost` when the block is left, "raise" also at the next call of redlease in the thread '
            'that entered the block, "signal"'
        ),
    },
    "Semaphore.holding": {
        "or it decorates no `async def` function.": (
            "or it decorates what goes on after its call: an `async def` function, a generator."
        )
    },
    "Semaphore.adopt": {
        "and as that it is awaited or entered: `async with pool.adopt(permit) as hold:`.": (
            "and the hold can be entered: `with pool.adopt(permit) as hold:`. A call that is interrupted as it ends "
            "releases the permit, whose new fence nobody knows."
        )
    },
    "Semaphore.watch": {
        "Wrap it in `contextlib.aclosing` if": (
            "`close()`, which any thread may call, ends the loop; use it, or the watch as a `with` block, if"
        )
    },
    "Leader.terms": {
        "A body that does not enter its term (`async with term:`) is not cancelled by a loss:": (
            "A body is not cancelled by a loss:"
        )
    },
}


# Docstrings


def indent_of(line: str) -> int:
    """Return how many spaces a line begins with."""
    return len(line) - len(line.lstrip())


def is_example(line: str) -> bool:
    """Whether a line is of an example."""
    return line.lstrip().startswith((">>>", "..."))


def blocks(text: str) -> Iterator[str]:
    """Yield the paragraphs, the entries of lists and the lines of examples of a docstring, as they are wrapped."""
    block: list[str] = []
    for line in text.splitlines():
        # A paragraph goes on without an indent, an entry with a deeper one than it began with.
        goes_on = block and block[0].strip() and line.strip() and not is_example(line)
        if goes_on and (indent_of(line) > indent_of(block[0]) > 0 or indent_of(line) == indent_of(block[0]) == 0):
            block.append(line)
            continue
        if block:
            yield "\n".join(block)
        block = [line]
    yield "\n".join(block)


def for_threads(text: str, where: str, width: int) -> str:
    """Return a docstring of the asyncio face as the blocking one has it; `where`: the class, or class and method."""
    left = dict(TEXTS.get(where, {}))
    done = "\n".join(block_for_threads(block, where, left, width) for block in blocks(text))
    if left:
        raise ValueError(f"{where} no longer says {next(iter(left))!r}: say in TEXTS what threads read")
    return done


def block_for_threads(block: str, where: str, left: dict[str, str], width: int) -> str:
    """Return a block as threads read it; takes out of `left` what it has replaced."""
    indent = " " * indent_of(block)
    before = block.strip() if is_example(block) else " ".join(block.split())
    after, replaced = before, [old for old in left if old in before]
    for number, old in enumerate(replaced):
        after = after.replace(old, f"\0{number}")
    for pattern, replacement in WORDS.items():
        after = re.sub(pattern, replacement, after)
    for number, old in enumerate(replaced):
        after = after.replace(f"\0{number}", left.pop(old))
    if not replaced and (found := OF_TASKS.search(after)):
        raise ValueError(f"{where} speaks of tasks ({found[0]!r}): say in TEXTS what threads read: {after}")
    if after == before:
        return block
    if is_example(block):
        return indent + after
    further = indent + "    " if indent else ""
    return "\n\n".join(
        textwrap.fill(part, width, initial_indent=indent, subsequent_indent=further, break_on_hyphens=False)
        for part in after.split("\n\n")
    )


def docstring(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, where: str, indent: int) -> str:
    """Return the docstring of a class or a method as that of the blocking face, ready to stand in it."""
    text = ast.get_docstring(node)
    if text is None:
        return ""
    done = for_threads(text, where, WIDTH - indent)
    return f'"""{done}\n"""' if "\n" in done else f'"""{done}"""'


# Methods


class WithoutAwait(ast.NodeTransformer):
    """Makes of `await x` what `x` returns."""

    def visit_Await(self, node: ast.Await) -> ast.expr:
        """Replace one."""
        inner: ast.expr = self.visit(node.value)
        return inner


def method(node: ast.FunctionDef | ast.AsyncFunctionDef, kind: str, face: Face) -> str:
    """Return a method of the blocking face."""
    where = f"{kind}.{node.name}"
    given = parameters(node, where)
    returned = "" if node.returns is None else ast.unparse(node.returns)
    returned = RETURNS.get(where, ANNOTATIONS.get(returned, returned))
    decorators = "".join(f"@{ast.unparse(each)}\n" for each in node.decorator_list)
    head = f"{decorators}def {SPELLED.get(node.name, node.name)}({ast.unparse(given)}) -> {returned}:\n"
    return head + textwrap.indent(f"{docstring(node, where, 8)}\n{body(node, where, face)}".strip(), "    ") + "\n"


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef, where: str) -> ast.arguments:
    """Return the parameters of a method, with the annotations and defaults of the blocking face."""
    if where in SIGNATURES:
        made = ast.parse(f"def made({SIGNATURES[where]}): ...").body[0]
        assert isinstance(made, ast.FunctionDef)
        return made.args
    given = node.args
    for each in ast.walk(given):
        if isinstance(each, ast.arg) and each.annotation and (text := ast.unparse(each.annotation)) in ANNOTATIONS:
            each.annotation = ast.parse(ANNOTATIONS[text], mode="eval").body
    for each, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        if default is not None and each.arg in DEFAULTS:
            given.kw_defaults[given.kwonlyargs.index(each)] = ast.parse(DEFAULTS[each.arg], mode="eval").body
    return given


def body(node: ast.FunctionDef | ast.AsyncFunctionDef, where: str, face: Face) -> str:
    """Return what a method does: what a table says, a call of the twin, or what that does without `await`."""
    positional = [each.arg for each in (*node.args.posonlyargs, *node.args.args)][1:]
    positional += [f"*{node.args.vararg.arg}"] if node.args.vararg else []
    keywords = [f"{each.arg}={each.arg}" for each in node.args.kwonlyargs]
    keywords += [f"**{node.args.kwarg.arg}"] if node.args.kwarg else []
    args = ", ".join([*positional, *keywords])
    if where in BODIES:
        signal = args.replace("on_lost=on_lost", 'on_lost="signal"')
        return BODIES[where].format(args=args, keywords=", ".join(keywords), signal=signal)
    if face.twin and isinstance(node, ast.AsyncFunctionDef):
        called = f"lambda: {face.twin}.{node.name}({args})" if args else f"{face.twin}.{node.name}"
        returns = "" if isinstance(node.returns, ast.Constant) and node.returns.value is None else "return "
        return f"{returns}self._client.call({called})"
    if face.twin and any(ast.unparse(each) == "property" for each in node.decorator_list):
        return f"return {face.twin}.{node.name}"
    own = node.body[1:] if ast.get_docstring(node) is not None else node.body
    return "\n".join(ast.unparse(WithoutAwait().visit(each)) for each in own)


# Modules


def is_generated(name: str, kind: str, face: Face) -> bool:
    """Whether the blocking class gets that method: a public one, and what syntax calls unless its base has that."""
    return not name.startswith("_") or f"{kind}.{name}" in BODIES or (name.startswith("__") and not face.twin)


def class_text(kind: str, face: Face, imports: dict[str, str]) -> str:
    """Return a class of the blocking face; adds to `imports` how the modules of its sources import each name."""
    nodes = []
    for source in face.sources:
        path, name = source.split(":")
        tree = ast.parse((ROOT / path).read_text())
        imports |= imports_of(tree, path)
        nodes += [each for each in tree.body if isinstance(each, ast.ClassDef) and each.name == name]
    methods = {
        each.name: method(each, kind, face)
        for node in nodes
        for each in node.body
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) and is_generated(each.name, kind, face)
    }
    base = f"({face.base})" if face.base else ""
    members = "\n".join([docstring(nodes[0], kind, 4), *methods.values()])
    return f"class {kind}{base}:\n{textwrap.indent(members, '    ')}\n"


def imports_of(tree: ast.Module, path: str) -> dict[str, str]:
    """Return how a module imports each name that it does, from the root of the package."""
    package = path.split("/")[:-1]
    found: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            parents = package[: len(package) + 1 - node.level] if node.level else []
            source = ".".join([*parents, *([node.module] if node.module else [])])
            found |= {each.name: f"from {source} import {each.name}" for each in node.names}
    return found


def written(name: str, formatted: Callable[[str, str], str]) -> str:
    """Return the text of a generated module."""
    module = MODULES[name]
    imports: dict[str, str] = {}
    classes = "\n".join(class_text(kind, face, imports) for kind, face in module.faces.items())
    imports |= OWN_IMPORTS
    used = {node.id for node in ast.walk(ast.parse(classes)) if isinstance(node, ast.Name)} - module.faces.keys()
    sources = sorted({source.split(":")[0] for face in module.faces.values() for source in face.sources})
    head = [
        "# Generated by tests/support/blocking_face.py: do not edit it, run `make face`. It is made from",
        f"# {' and '.join(sources)}.",
        *([f"# ruff: noqa: {module.noqa}"] if module.noqa else []),
        f'"""{module.docstring}"""',
        "from __future__ import annotations",
        *sorted(imports[each] for each in used & imports.keys()),
    ]
    return formatted("\n".join([*head, classes]), f"redlease/sync/{name}.py")


def formatted_by_ruff(text: str, path: str) -> str:
    """Return a module with its imports in order, and formatted."""
    ruff = [sys.executable, "-m", "ruff"]
    for command in (["check", "--select", "I", "--fix", "--quiet"], ["format", "--quiet"]):
        done = subprocess.run(
            [*ruff, *command, "--stdin-filename", path, "-"],
            input=text,
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        text = done.stdout
    return text


def main(*options: str) -> int:
    """Write the modules, or with `--check` only name those that are not current."""
    stale = []
    for name in MODULES:
        path = SYNC / f"{name}.py"
        text = written(name, formatted_by_ruff)
        if not path.exists() or path.read_text() != text:
            stale.append(path.name)
            if "--check" not in options:
                path.write_text(text)
    if stale and "--check" in options:
        sys.stderr.write(f"not as the asyncio face is: {', '.join(stale)}. Run `make face`\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
