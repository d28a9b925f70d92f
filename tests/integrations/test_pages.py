"""Every page about a framework is run by a test."""

from __future__ import annotations

from pathlib import Path

from how_to import PAGES


def test_every_page_is_run() -> None:
    """There is a module of tests for each page that is not about workflows."""
    tested = {path.stem.removeprefix("test_").replace("_", "-") for path in Path(__file__).parent.glob("test_*.py")}
    assert {page.stem for page in PAGES.glob("*.md") if "temporalio" not in page.read_text()} == tested - {"pages"}
