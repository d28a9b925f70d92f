"""The command `redlease` as people and scripts run it: as a process, with a terminal or without."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

COMMAND = (sys.executable, "-c", "from redlease._cli import main; main()")

# What a ticket may hold: markup, the name of a picture, and what a terminal obeys. Then as it is to be shown.
HOSTILE = "order[/7] [b]7 :cat: \x1b[2J\n\x9b\u202e"
HARMLESS = r"order[/7] [b]7 :cat: \x1b[2J\n\x9b\u202e"


def seen_on_terminal(*arguments: str, columns: int) -> str:
    """Run the command on a terminal of so many columns, and return what it wrote there without the colours."""
    terminal, end = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": str(columns), "LINES": "30"}
    command = subprocess.Popen([*COMMAND, *arguments], stdout=end, stderr=end, env=environment)
    os.close(end)
    shown = b""
    with contextlib.suppress(OSError):  # how a terminal tells that nobody is left to write to it
        while piece := os.read(terminal, 65536):
            shown += piece
    os.close(terminal)
    assert command.wait() == 0, shown.decode(errors="replace")[-2000:]
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.decode()).replace("\r\n", "\n")


def run(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command as a process of its own."""
    environment = os.environ | {"NO_COLOR": "1", "COLUMNS": "80"}
    return subprocess.run(
        [*COMMAND, *arguments], check=False, capture_output=True, text=True, timeout=110, cwd=cwd, env=environment
    )


async def run_async(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command while this process goes on."""
    return await asyncio.to_thread(run, *arguments)
