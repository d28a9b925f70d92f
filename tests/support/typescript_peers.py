"""Processes that use the TypeScript client beside a test."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import redlease

import typescript
from children import Child, running
from node import find_node

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


def programs_built() -> Path:
    """Return where the tests in TypeScript are, built."""
    return typescript.built(Path(redlease.__file__).parent) / "dist" / "test"


class Peer(Child):
    """A process in TypeScript; under load it takes its time."""

    async def event(self, name: str, within: float = 120.0) -> dict[str, Any]:
        """Wait for the next thing that the process says, which must be this."""
        return await super().event(name, within)


@contextlib.asynccontextmanager
async def peer(programs: Path, what: str, url: str, *, answers: bool = False, **options: Any) -> AsyncIterator[Peer]:
    """Start a process that does `what`, one of the roles in children.ts, and end it with the block."""
    command = [str(find_node()), str(programs / "children.js"), what, url, json.dumps(options)]
    settings = {"stdin": asyncio.subprocess.PIPE} if answers else {}
    async with running(*command, **settings) as process:
        yield Peer(process)
