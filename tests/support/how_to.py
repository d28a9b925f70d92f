"""The how-to pages as files that a test imports or runs, beside a `billing` that the test drives."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

SUPPORT = Path(__file__).parent
PAGES = SUPPORT.parents[1] / "docs" / "how-to"


def blocks(page: str, language: str = "python") -> list[str]:
    """Return the pieces of code on a page."""
    text = (PAGES / f"{page}.md").read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


class Project:
    """A directory with the files of a page, and programs that run there."""

    def __init__(self, directory: Path, url: str) -> None:
        self.directory = directory
        self.url = url
        paths = [str(directory), str(SUPPORT), *filter(None, [os.environ.get("PYTHONPATH")])]
        where = {"REDIS_URL": url, "REDLEASE_URL": url, "PYTHONPATH": os.pathsep.join(paths)}
        self.environment = os.environ | where

    @property
    def log(self) -> str:
        """What the programs have written."""
        return (self.directory / "log").read_text()

    def write(self, page: str, **constants: object) -> list[Path]:
        """Write the blocks of a page under the names in their first lines, with other values for some constants."""
        left = set(constants)
        written = []
        for text in blocks(page):
            found = re.match(r"# (\S+\.py)\n", text)
            assert found, f"a block of {page}.md does not begin with the name of its file"
            for name, value in constants.items():
                text, count = re.subn(rf"^{name} = .*$", f"{name} = {value!r}", text, flags=re.MULTILINE)  # noqa: PLW2901
                left -= {name} if count else set()
            path = self.directory / found[1]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            written.append(path)
        assert not left, f"{page}.md has no {left}"
        return written

    @contextlib.asynccontextmanager
    async def running(self, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
        """Run a program of Python in a process group of its own, which is killed when the block ends."""
        with (self.directory / "log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *arguments,
                cwd=self.directory,
                env=self.environment,
                stdout=log,
                stderr=log,
                process_group=0,
            )
        try:
            yield process
        finally:
            await kill(process)


async def kill(process: asyncio.subprocess.Process) -> None:
    """End a program and its children with SIGKILL."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
