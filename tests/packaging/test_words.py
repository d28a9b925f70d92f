"""The words of the project have one meaning each: those that had several are gone from names and messages."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import redlease
import redlease_temporal

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGES = (Path(redlease.__file__).parent, Path(redlease_temporal.__file__).parent)
MODULES = [path for package in PACKAGES for path in sorted(package.rglob("*.py"))]

# Words that are no part of any name; docs/architecture.md has those that took their place.
RETIRED_IN_NAMES = {
    "wish",
    "wishes",
    "fate",
    "keeper",
    "keepers",
    "told",
    "lapse",
    "lapsed",
    "anew",
    "guarded",
    "forgo",
}
# Phrases of no message, docstring or comment.
RETIRED = re.compile(r"\b(anew|lapsed?|lapses|so many wait|of late|save for|for ever|goes not|who holds)\b")


def module_id(path: Path) -> str:
    """Return the path of a module as it is imported."""
    return "/".join(path.parts[-3:])


def names(tree: ast.Module) -> Iterator[str]:
    """Yield each name that the module gives to something."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name
            case ast.arg():
                yield node.arg
            case ast.Name(ctx=ast.Store()):
                yield node.id
            case ast.Attribute(ctx=ast.Store()):
                yield node.attr
            case _:
                pass


def words(name: str) -> set[str]:
    """Return the words of a name, in whichever case it is written."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+", name)}


@pytest.mark.parametrize("path", MODULES, ids=module_id)
def test_names_have_no_retired_words(path: Path) -> None:
    """A reader meets each thing under one name."""
    found = {name for name in names(ast.parse(path.read_text())) if words(name) & RETIRED_IN_NAMES}
    assert not found


@pytest.mark.parametrize("path", MODULES, ids=module_id)
def test_texts_have_no_retired_phrases(path: Path) -> None:
    """Messages, docstrings and comments are in plain English."""
    assert not RETIRED.findall(path.read_text())


def test_retired_words_are_found() -> None:
    """A word is found in the middle of a name too, and in the name of a class."""
    assert [words(name) & RETIRED_IN_NAMES for name in ("_has_lapsed", "LeaseKeeper", "tolder")] == [
        {"lapsed"},
        {"keeper"},
        set(),
    ]
