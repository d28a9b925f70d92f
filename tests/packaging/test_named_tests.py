"""The tests that pages name exist, so that a page says nothing which nobody holds."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from pages import DOCS, PAGES, ROOT

NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


@cache
def names_in(path: str) -> frozenset[str]:
    """Return the tests of a file, as pytest collects them."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    names = (node.name for node in ast.parse((ROOT / path).read_text()).body if isinstance(node, functions))
    return frozenset(name for name in names if name.startswith("test_"))


def named_on(text: str) -> list[tuple[str, str]]:
    """Return the files and tests that a text names."""
    return [(found[1], found[2]) for found in NAMED.finditer(text)]


@pytest.mark.parametrize("page", [page for page in PAGES if named_on(page.read_text())], ids=lambda page: page.stem)
def test_each_test_that_a_page_names_exists(page: Path) -> None:
    """In the file that the page says, under that name."""
    named = named_on(page.read_text())
    assert not [f"{path}::{name}" for path, name in named if name not in names_in(path)]


@pytest.mark.parametrize("page", ["scenarios.md", "track-record.md"])
def test_each_row_names_a_test(page: str) -> None:
    """No scenario and no defect stands in a table without a test that holds it."""
    rows = [line for line in (DOCS / page).read_text().splitlines() if line.startswith("| ")]
    told = [row for row in rows if "---" not in row and not row.endswith("| test |")]
    assert len(told) > 20
    assert not [row for row in told if not named_on(row.rsplit(" | ", 1)[1])]
