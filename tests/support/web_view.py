"""The web view as a process of its own, and a real browser that looks at it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass

from playwright.async_api import Browser, Page, async_playwright

from command_line import COMMAND

TOKEN = "a-token-of-the-tests"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), "/usr/bin/chromium")


@dataclass
class View:
    """A running `redlease web`."""

    url: str
    process: asyncio.subprocess.Process


@contextlib.asynccontextmanager
async def served(*options: str) -> AsyncIterator[View]:
    """Run `redlease web` on a free port, and end it as Ctrl-C does."""
    process = await asyncio.create_subprocess_exec(
        *(*COMMAND, "web", "--port", "0", "--json", *options),
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"REDLEASE_WEB_TOKEN": TOKEN},
    )
    try:
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), 60)
        yield View(json.loads(line)["url"], process)
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGINT)
        await asyncio.wait_for(process.wait(), 20)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


@contextlib.asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """Run Debian's Chromium, without a sandbox of its own: as root, or in a container, it cannot have one."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, chromium_sandbox=False)
        try:
            yield browser
        finally:
            await browser.close()


def complaints_of(page: Page) -> list[str]:
    """Collect what goes wrong on a page from now on: errors of its scripts, and what its policy forbids."""
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    return complaints
