"""The README says what is true: every example runs as it stands, and its tables name what there is."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import redlease
from redlease import Lock, Redlease, RedleaseError, Semaphore
from redlease.testing import fake_client

README = (Path(__file__).parents[2] / "README.md").read_text()
# What is for Temporal runs on its server, in tests/temporal/test_readme_temporal.py.
CORE = re.sub(r"^## In Temporal workflows\n.*?(?=^## )", "", README, flags=re.MULTILINE | re.DOTALL)
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", CORE, re.MULTILINE | re.DOTALL)
# Of the pages, what needs no Temporal.
SEQUENCES = (Path(__file__).parents[2] / "docs/sequences.md").read_text().split("\n## Without Temporal\n")[1]
ON_PAGES = re.findall(r"^```python\n(.*?)^```$", SEQUENCES, re.MULTILINE | re.DOTALL)


def title(code: str) -> str:
    """Return a name for an example: the first line that names a resource."""
    found = re.search(r'"([\w:-]+)"', code)
    return found[1] if found else code.splitlines()[0]


def table(heading: str) -> list[list[str]]:
    """Return the rows of the table under a heading, without its head."""
    section = README.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [line.strip("|").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


@pytest.mark.parametrize("code", [*EXAMPLES, *ON_PAGES], ids=title)
def test_an_example_runs_as_it_stands(code: str) -> None:
    """As in `python -m asyncio` with an open client; one with an event loop of its own runs as a script."""
    compiled = compile(code, "README.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    names: dict[str, Any] = {"__name__": "__main__"}
    if not compiled.co_flags & inspect.CO_COROUTINE:
        exec(compiled, names)
    tests = [value for name, value in names.items() if name.startswith("test_")]

    async def run_in_client() -> None:
        async with fake_client() as names["client"]:
            await eval(compiled, names)

    async def run_test(test: Any) -> None:
        async with fake_client() as client:
            await test(redlease_client=client)

    if compiled.co_flags & inspect.CO_COROUTINE:
        asyncio.run(asyncio.wait_for(run_in_client(), 10))
    for test in tests:
        asyncio.run(run_test(test))


def test_there_are_examples_of_every_kind() -> None:
    """The way they are found finds them all."""
    assert len(EXAMPLES) == CORE.count("```python") == 17
    assert max(len([line for line in code.splitlines() if line.strip()]) for code in EXAMPLES) <= 15


def test_every_error_is_in_the_table() -> None:
    """No error is missing there, and none is invented."""
    named = {row[0].strip("`") for row in table("Errors")} - {"ValueError"}
    public = {name for name in redlease.__all__ if isinstance(getattr(redlease, name), type)}
    assert named == {name for name in public if issubclass(getattr(redlease, name), RedleaseError)}


@pytest.mark.parametrize("row", table("Parameters"), ids=lambda row: row[0])
def test_every_parameter_is_where_the_table_says(row: list[str]) -> None:
    """Each name is a parameter of what it is said to be of."""
    name, of = row[0].strip("`"), [part.strip("` ") for part in row[1].split(",")]
    places: dict[str, list[Any]] = {
        "client": [Redlease, Redlease.from_url],
        "primitive": [Redlease.lock, Redlease.semaphore, Redlease.rwlock],
        "request": [Semaphore.hold, Semaphore.acquire, Semaphore.try_acquire],
        "semaphore": [Redlease.semaphore],
    }
    for part in of:
        for place in places.get(part) or [getattr(Lock, part)]:
            assert name in inspect.signature(place).parameters, f"{place} has no {name}"
