"""Porcupine, a checker of linearizability by Anish Athalye, on a model of locks and semaphores: `porcupine/`."""

from __future__ import annotations

import functools
import hashlib
import json
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import golang
from caches import cached
from records import History

SOURCE = Path(__file__).parent / "porcupine"


@functools.cache
def program() -> Path:
    """Return the program: built before from the same source, else built now by Go.

    Raises:
        RuntimeError: It could not be built.
    """
    source = b"".join((SOURCE / name).read_bytes() for name in ("go.mod", "go.sum", "main.go"))
    return cached(f"porcupine-{hashlib.sha256(source).hexdigest()[:12]}", _build) / "porcupine"


def _build(directory: Path) -> None:
    golang.build(["build", "-o", str(directory / "porcupine"), "."], directory, {}, source=SOURCE)


def judge(histories: Iterable[History]) -> dict[str, dict[str, Any]]:
    """Return for each history its "verdict" ("Ok", "Illegal" or "Unknown"), "operations" and "seconds"."""
    lines = (operation.line(history) for history in histories for operation in history.operations)
    done = subprocess.run([program()], input="\n".join(lines), capture_output=True, text=True, check=True)
    verdicts = (json.loads(line) for line in done.stdout.splitlines())
    return {verdict.pop("history"): verdict for verdict in verdicts}
