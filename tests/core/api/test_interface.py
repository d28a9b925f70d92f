"""What users see of the objects: their names, what they print, what they log, and what importing them costs."""

from __future__ import annotations

import ast
import asyncio
import logging
import re
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

import pytest
from pydantic import TypeAdapter, ValidationError, create_model

import redlease
from redlease import Permit, Redlease
from redlease.guards.sql import fenced
from redlease.testing import fake_client

from helpers import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from conftest import MakeClient, OwnServer

PAGE_OF_LOG = Path(__file__).parents[3] / "docs/logging.md"
HEAVY = {"asyncio", "logging", "pydantic", "redis", "ssl", "redlease._core.client"}
HOLD = {
    "check",
    "detach",
    "downgrade",
    "fence",
    "lost",
    "permit",
    "release",
    "remaining",
    "resource",
    "ticket",
    "wait_lost",
}


@pytest.fixture
async def client() -> AsyncIterator[Redlease]:
    """A client without a server."""
    async with fake_client(prefix="p", owner="svc") as client:
        yield client


async def test_the_names_of_a_hold(client: Redlease) -> None:
    """A hold shows what is documented and nothing else; a request for one shows nothing but how it is begun."""
    request = client.lock("r").hold(ticket="t")
    assert not {name for name in dir(request) if not name.startswith("_")}
    async with request as hold:
        assert {name for name in dir(hold) if not name.startswith("_")} == HOLD
        assert (hold.resource, hold.ticket, hold.fence) == ("r", "t", hold.permit.fence)
        with pytest.raises(AttributeError):
            hold.fence = 7  # type: ignore[misc]


async def test_holds_tell_of_themselves(client: Redlease) -> None:
    """What is printed of a hold says what it is of and how it stands."""
    lock = client.lock("r")
    request = lock.hold(ticket="t", on_lost="signal")
    assert repr(request) == "<hold() of 'r', neither awaited nor entered yet>"
    hold = await request
    assert repr(request) == "<hold() of 'r', awaited>"
    assert repr(hold).startswith(f"<Hold of 'r': ticket 't', fence {hold.fence}, ")
    assert repr(hold).endswith(" s left>")
    await lock.release("t")
    await hold.wait_lost()
    assert repr(hold).endswith(", lost>")
    async with (request := lock.hold()) as other:
        assert repr(request) == "<hold() of 'r', entered>"
    assert repr(other).endswith(", given up>")


async def test_a_client_tells_of_itself_and_no_secret() -> None:
    """Its prefix, its owner and how it stands, for every kind of client; no password, wherever that stood."""
    for url in ("redis://u:geheim@h/0", "redis+cluster://u:geheim@h:1", "redis+sentinel://u:geheim@h:1/mymaster"):
        shown = repr(Redlease.from_url(url, owner="svc", prefix="p"))
        assert shown == "<Redlease prefix='p' owner='svc', not connected>"
    client = fake_client(prefix="p", owner="svc")
    async with client:
        assert repr(client) == "<Redlease prefix='p' owner='svc', connected, RESP2 on two connections>"
    assert repr(client) == "<Redlease prefix='p' owner='svc', closed>"


def test_the_version_is_one() -> None:
    """The package and the wheel name the same."""
    assert redlease.__version__ == version("redlease")


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import redlease; from redlease import LeaseLost", {*HEAVY, "dataclasses", "inspect", "redlease.models"}),
        ("import redlease._cli", {*HEAVY, "rich", "typer"}),
        ("from redlease import Duration, OnLost, Permit, Snapshot", HEAVY),
        ("from redlease import *; import redlease.sync", {"pydantic", "redlease._cli", "sqlalchemy", "starlette"}),
    ],
)
def test_an_import_loads_no_more_than_it_needs(code: str, absent: set[str]) -> None:
    """The package alone loads the errors, redis-py comes with the client, and pydantic is loaded by nobody."""
    script = f"import sys; before = {{*sys.modules}}; {code}; print(*({{*sys.modules}} - before) & {absent})"
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert told.stdout == "\n"


@pytest.mark.parametrize("function", [fake_client, fenced])
def test_types_are_known_while_the_program_runs(function: Callable[..., object]) -> None:
    """Those of functions that take what an optional package brings too, whether or not it is installed."""
    assert "return" in get_type_hints(function)


# One thread is in the midst of importing redis-py when another one asks for a name: it goes on once the other waits.
MET = """
import sys, threading, time
from importlib import _bootstrap, import_module
from importlib.machinery import PathFinder, SourceFileLoader
import redlease

begun, errors = threading.Event(), []

class Paused(SourceFileLoader):
    def exec_module(self, module):
        begun.set()
        while threading.current_thread() is first and not _bootstrap._blocking_on.get(second.ident):
            time.sleep(0.01)
        super().exec_module(module)

class Finder:
    def find_spec(self, name, path=None, target=None):
        spec = PathFinder.find_spec(name, path, target) if name == "redis" else None
        if spec is not None:
            spec.loader = Paused(name, spec.origin)
        return spec

def run(action):
    try:
        action()
    except BaseException as error:
        errors.append(repr(error))

sys.meta_path.insert(0, Finder())
first = threading.Thread(target=run, args=(lambda: import_module("redis"),))
second = threading.Thread(target=run, args=(lambda: begun.wait() and ASKED,))
for each in (first, second):
    each.start()
for each in (first, second):
    each.join()
print(*errors)
"""


@pytest.mark.parametrize("asked", ["redlease.Redlease", "import_module('redlease.sync')"])
def test_threads_that_import_at_once_meet_no_deadlock(asked: str) -> None:
    """A thread that asks for a name while another one imports redis-py waits for it, before it holds a lock itself."""
    told = subprocess.run(
        [sys.executable, "-c", MET.replace("ASKED", asked)], capture_output=True, text=True, check=True, timeout=50
    )
    assert (told.stdout, told.stderr) == ("\n", "")


@pytest.mark.parametrize(
    "wrong", [{"fence": "7"}, {"fence": -1}, {"lease_ms": "x"}, {"lease_ms": 1.5}, {"weight": "1"}, {"ticket": 3}]
)
async def test_a_permit_that_is_none_is_refused_where_it_is_used(client: Redlease, wrong: dict[str, Any]) -> None:
    """Neither json nor a dataclass looks at the types of its fields, so each use of a permit does."""
    lock = client.lock("r")
    permit = await lock.acquire()
    bad = replace(permit, **wrong)
    for use in (lock.renew, lock.release, lock.is_held, lock.adopt):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            await use(bad)
    assert await lock.release(permit)


def test_pydantic_reads_permits() -> None:
    """It makes one of what is right, with its coercions, in a model too, and refuses what is wrong."""
    said = {"resource": "r", "ticket": "t", "fence": "7", "weight": 1, "capacity": 1}
    said |= {"lease_ms": 1000, "granted_at_ms": 0, "expires_at_ms": 1000}
    permit = TypeAdapter(Permit).validate_python(said)
    assert permit == Permit("r", "t", 7, 1, 1, 1000, 0, 1000, "", {})
    model = create_model("Model", permit=(Permit, ...))
    assert model.model_validate_json(model(permit=permit).model_dump_json()) == model(permit=permit)
    with pytest.raises(ValidationError, match="fence"):
        TypeAdapter(Permit).validate_python(said | {"fence": "x"})


def logged() -> Iterator[tuple[Path, ast.Call]]:
    """Yield each call of a logger in the core, and the file that it stands in."""
    for path in sorted(Path(redlease.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("logger."):
                yield path, node


def test_every_record_says_what_it_is_about() -> None:
    """Each call of a logger in the core gives the fields that docs/logging.md names."""
    for path, call in logged():
        assert "extra" in {keyword.arg for keyword in call.keywords}, f"{path.name}:{call.lineno}"


def test_the_page_of_the_log_has_every_record() -> None:
    """Each message of the core fits one row of docs/logging.md, and each row a message."""
    rows = re.findall(r"^\| (?!message|---)([^|]+) \|", PAGE_OF_LOG.read_text(), re.MULTILINE)
    patterns = {row: re.compile(".*".join(map(re.escape, row.split("...")))) for row in rows}
    messages = [ast.literal_eval(call.args[0]) for _, call in logged()]
    found = [[row for row, pattern in patterns.items() if pattern.search(message)] for message in messages]
    assert sorted(found) == sorted([row] for row in rows)


async def test_a_lost_connection_comes_back_in_the_log(
    own_server: OwnServer, make_client: MakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    """One line says that it was lost and one that it is there again, at one level, so that both are seen or none."""
    server = own_server("valkey9")
    client = await make_client(url=server.url)
    assert not caplog.records
    server.restart()
    await eventually(lambda: len(caplog.records) == 2)
    lost, found = caplog.records
    assert "was lost" in lost.getMessage()
    assert "reconnected to Redis" in found.getMessage()
    assert lost.levelno == found.levelno == logging.WARNING
    assert not await client.lock("r").locked()


async def test_a_loss_is_logged_with_its_fields(client: Redlease, caplog: pytest.LogCaptureFixture) -> None:
    """Formatters and filters find the resource, the ticket and the fence beside the text."""
    lock = client.lock("r")
    hold = await lock.hold(ticket="t")
    await lock.release("t")
    await asyncio.wait_for(hold.wait_lost(), 15)
    (record,) = caplog.records
    assert (record.name, record.__dict__["resource"], record.__dict__["ticket"]) == ("redlease", "r", "t")
    assert record.__dict__["fence"] == hold.fence
