"""The pages of the documentation, and the blocks of code on them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


class Block(NamedTuple):
    """A block of code: its page, its number there, its language, the file that it is to be, and its text."""

    page: str
    number: int
    language: str
    file: str | None
    text: str


def blocks(page: Path) -> list[Block]:
    """Return the blocks of a page in their order."""
    found = re.findall(r'^```(\w+)(?: title="([\w.]+)")?\n(.*?)^```$', page.read_text(), re.MULTILINE | re.DOTALL)
    name = str(page.relative_to(ROOT))
    return [Block(name, number, language, file or None, text) for number, (language, file, text) in enumerate(found)]


def python_blocks(page: str) -> list[Block]:
    """Return those of Python on a page, which is named from the root."""
    return [block for block in blocks(ROOT / page) if block.language == "python"]


def make_targets() -> set[str]:
    """Return what `make` can be asked for."""
    return set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
