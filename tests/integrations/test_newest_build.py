"""Only the newest build of a branch: what the page's function does when commits follow each other."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from helpers import eventually
from how_to import blocks

if TYPE_CHECKING:
    from redlease import Redlease


async def test_an_older_build_gives_way(client: Redlease) -> None:
    """Of three commits of a branch the last is published; a build of another branch is not disturbed."""
    (code,) = blocks("newest-build")
    names: dict[str, Any] = {"__name__": "newest_build"}
    exec(compile(code, "newest-build.md", "exec"), names)
    begun: list[str] = []
    ends = asyncio.Event()

    async def compile_and_publish(commit: str, fence: int) -> None:
        assert fence
        begun.append(commit)
        await ends.wait()

    names["compile_and_publish"] = compile_and_publish
    builds = []
    for branch, commit in (("main", "1"), ("other", "2"), ("main", "3"), ("main", "4")):
        builds.append(asyncio.create_task(names["build"](client, branch, commit)))
        await eventually(lambda: begun[-1:] == [commit])  # noqa: B023  it is awaited at once
    ends.set()
    assert await asyncio.gather(*builds) == [
        "1 gave way: LeaseLost",
        "2 is published",
        "3 gave way: LeaseLost",
        "4 is published",
    ]
