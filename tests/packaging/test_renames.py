"""The table of renamed public names in the change log."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import redlease
import redlease.integrations.celery
import redlease.integrations.rq
import redlease.sync
from redlease._cli.app import app

CHANGELOG = Path(__file__).parents[2] / "CHANGELOG.md"
FACES = {"Semaphore": (redlease.Semaphore, redlease.sync.Semaphore)}
FUNCTIONS = {
    "celery.exclusive": redlease.integrations.celery.exclusive,
    "rq.exclusive": redlease.integrations.rq.exclusive,
}


def renames() -> list[tuple[str, str]]:
    """Return the rows of the table, old and new."""
    _, _, section = CHANGELOG.read_text().partition("### Renamed\n")
    return re.findall(r"^\| `([^`]+)` \| `([^`]+)` \|$", section.partition("\n### ")[0], re.MULTILINE)


def exists(name: str) -> bool:
    """Return whether a command, an attribute or a parameter has that name: `Class.method(parameter=)`."""
    if command := name.removeprefix("redlease ") if name.startswith("redlease ") else "":
        return command in {each.name or each.callback.__name__ for each in app.registered_commands if each.callback}
    path, _, parameter = name.rstrip("=)").partition("(")
    if path in FUNCTIONS:
        return parameter in inspect.signature(FUNCTIONS[path]).parameters
    owner, _, attribute = path.partition(".")
    places = FACES.get(owner, (getattr(redlease, owner),))
    if not parameter:
        return any(hasattr(place, attribute) for place in places)
    methods = [getattr(place, attribute, None) for place in places]
    return any(parameter in inspect.signature(method).parameters for method in methods if method is not None)


@pytest.mark.parametrize(("old", "new"), renames(), ids=lambda name: name)
def test_the_new_name_exists_and_the_old_one_does_not(old: str, new: str) -> None:
    """Who replaces each name of the table by its neighbour has a program that runs."""
    assert exists(new)
    if old not in {after for _, after in renames()}:  # `key` changed its meaning
        assert not exists(old)


def test_the_table_is_read() -> None:
    """A table that is written in another form would be none."""
    assert ("Semaphore.limit", "Semaphore.set_limit") in renames()
