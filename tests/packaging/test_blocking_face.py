"""The modules of the blocking face that a program writes are as it writes them from the asyncio face.

`tests/core/sync/test_signatures.py` compares the methods of the two faces one by one.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import blocking_face
from blocking_face import MODULES, SYNC, for_threads, formatted_by_ruff, written


@pytest.mark.parametrize("name", MODULES)
def test_what_is_generated_is_current(name: str) -> None:
    """Each generated module is what the program writes now: after a change of the asyncio face, `make face`."""
    assert (SYNC / f"{name}.py").read_text() == written(name, formatted_by_ruff)


def test_a_stale_module_fails_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of `make lint` fails for a module that somebody has edited, and `make face` repairs it."""
    for name in MODULES:
        (tmp_path / f"{name}.py").write_text((SYNC / f"{name}.py").read_text())
    monkeypatch.setattr(blocking_face, "SYNC", tmp_path)
    assert blocking_face.main("--check") == 0
    before = (tmp_path / "guard.py").read_text()
    (tmp_path / "guard.py").write_text(before + "EDITED = True\n")
    assert blocking_face.main("--check") == 1
    assert blocking_face.main() == 0
    assert (tmp_path / "guard.py").read_text() == before


def test_a_docstring_of_tasks_needs_words_for_threads() -> None:
    """A text that speaks of tasks stops the program until a table says what threads read; so does a lost one."""
    assert for_threads("Enter it: `async with pool.hold() as hold:`.", "Semaphore.new", 80) == (
        "Enter it: `with pool.hold() as hold:`."
    )
    with pytest.raises(ValueError, match="speaks of tasks"):
        for_threads("Runs in the event loop.", "Semaphore.new", 80)
    with pytest.raises(ValueError, match="no longer says"):
        for_threads("Yields snapshots.", "Semaphore.watch", 80)
