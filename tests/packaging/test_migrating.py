"""Who takes both locks, as docs/migrating shows, excludes the old version of a program and the new one."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import sys
from typing import TYPE_CHECKING, Any

import pytest
import redis
import redis_lock

from redlease.sync import Redlease as BlockingRedlease

from pages import python_blocks

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import ModuleType

    from conftest import MakeClient, Servers

TURNS = 3


class Inside:
    """Counts who is inside at once, with a way to go in for each version of a program."""

    def __init__(self) -> None:
        self.now = self.most = self.turns = 0

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Be inside for the length of the block."""
        self.now += 1
        self.turns += 1
        self.most = max(self.most, self.now)
        yield
        self.now -= 1


@pytest.fixture
def both(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module that a page shows for the time of the change."""
    (block,) = python_blocks(f"docs/migrating/{request.param}.md")
    assert block.file == "both.py"
    (tmp_path / block.file).write_text(block.text)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("both")
    del sys.modules["both"]


@pytest.mark.parametrize("both", ["redis-py"], indirect=True)
@pytest.mark.parametrize("other", ["old", "new"])
async def test_redis_py(both: ModuleType, other: str, make_client: MakeClient, servers: Servers, prefix: str) -> None:
    """Two tasks that take both locks, and two that take the old or the new one alone, are inside one at a time."""
    url = servers["valkey9"].url
    client, inside, name = await make_client(url=url), Inside(), f"{prefix}:ledger"
    async with redis.asyncio.Redis.from_url(url) as old:
        alone: dict[str, Any] = {
            "old": lambda: old.lock(name, timeout=60, blocking_timeout=30, sleep=0.01),
            "new": lambda: client.lock(name).hold(timeout=30),
        }

        async def work(way: Any) -> None:
            for _ in range(TURNS):
                async with way():
                    with inside.counted():
                        await asyncio.sleep(0.005)

        ways = [lambda: both.locked(old, client, name), alone[other]] * 2
        await asyncio.gather(*(work(way) for way in ways))
    assert (inside.most, inside.turns) == (1, 4 * TURNS)


@pytest.mark.parametrize("both", ["python-redis-lock"], indirect=True)
@pytest.mark.parametrize("other", ["old", "new"])
async def test_python_redis_lock(both: ModuleType, other: str, servers: Servers, prefix: str) -> None:
    """Two threads that take both locks, and two that take the old or the new one alone, are inside one at a time."""
    url, inside, name = servers["valkey9"].url, Inside(), f"{prefix}:ledger"
    with redis.Redis.from_url(url) as old, BlockingRedlease.from_url(url, prefix=prefix) as client:
        alone: dict[str, Any] = {
            "old": lambda: redis_lock.Lock(old, name, expire=60, auto_renewal=True),
            "new": lambda: client.lock(name).hold(timeout=30),
        }

        def work(way: Any) -> None:
            for _ in range(TURNS):
                with way(), inside.counted():
                    old.ping()

        ways = [lambda: both.locked(old, client, name), alone[other]] * 2
        await asyncio.gather(*(asyncio.to_thread(work, way) for way in ways))
    assert (inside.most, inside.turns) == (1, 4 * TURNS)
