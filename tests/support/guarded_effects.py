"""A database that takes effects under a fence, and refuses those under an older one than it has seen."""

from __future__ import annotations

import os
import sqlite3
import time
from typing import NamedTuple, Self


class Effect(NamedTuple):
    """An effect that somebody wanted to have, at a moment of the machine's monotonic clock."""

    at: float
    fence: int
    workflow: str
    pid: int
    taken: bool


class RefusedError(Exception):
    """The effect came under an older fence than one that was seen."""


class Effects:
    """The database, a file that processes share."""

    def __init__(self, path: str) -> None:
        """Open it; the first who does makes it."""
        self._connection = sqlite3.connect(path, timeout=10, isolation_level=None)
        self._connection.execute("PRAGMA synchronous = OFF")
        self._connection.execute(
            "CREATE TABLE IF NOT EXISTS effects (resource TEXT, at REAL, fence INT, workflow TEXT, pid INT, taken INT)"
        )

    def __enter__(self) -> Self:
        """Use it in a block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self._connection.close()

    def attempt(self, resource: str, workflow: str, fence: int) -> None:
        """Have an effect, or raise when it is refused; both are written down."""
        self._connection.execute("BEGIN IMMEDIATE")
        (newest,) = self._connection.execute(
            "SELECT coalesce(max(fence), 0) FROM effects WHERE resource = ?", (resource,)
        ).fetchone()
        taken = fence >= newest
        self._connection.execute(
            "INSERT INTO effects VALUES (?, ?, ?, ?, ?, ?)",
            (resource, time.monotonic(), fence, workflow, os.getpid(), taken),
        )
        self._connection.execute("COMMIT")
        if not taken:
            raise RefusedError(f"fence {fence} is older than {newest}")

    def of(self, resource: str) -> list[Effect]:
        """Return all effects on a resource, in the order they came."""
        rows = self._connection.execute(
            "SELECT at, fence, workflow, pid, taken FROM effects WHERE resource = ? ORDER BY rowid", (resource,)
        )
        return [Effect(at, fence, workflow, pid, bool(taken)) for at, fence, workflow, pid, taken in rows]
