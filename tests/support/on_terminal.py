"""The command `redlease` on a terminal of its own, whose keys a test presses and whose screen it reads."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import TYPE_CHECKING, Self

from helpers import eventually

if TYPE_CHECKING:
    from types import TracebackType

# As a shell starts it: the terminal sends it signals too, such as that of Ctrl-C.
START = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); from redlease._cli import main; main()"
SIZE = {"COLUMNS", "LINES"}  # where these are set, they outrank the size of the terminal
PATIENCE_S = 50.0  # how long a process may take to start on a busy machine


class OnTerminal:
    """A run of the command.

    Attributes:
        process: Its process.
        written: Everything that it has written to the terminal.
    """

    def __init__(self, *arguments: str, rows: int = 24, columns: int = 100) -> None:
        self._terminal, self._end = pty.openpty()
        self.resize(rows, columns)
        self._before = termios.tcgetattr(self._end)
        self.written = ""
        self.process = subprocess.Popen(
            [sys.executable, "-c", START, *arguments],
            stdin=self._end,
            stdout=self._end,
            stderr=self._end,
            env={name: value for name, value in os.environ.items() if name not in SIZE} | {"TERM": "xterm-256color"},
            start_new_session=True,
        )

    async def __aenter__(self) -> Self:
        asyncio.get_running_loop().add_reader(self._terminal, self._read)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        asyncio.get_running_loop().remove_reader(self._terminal)
        self.process.kill()
        self.process.wait()
        os.close(self._end)
        os.close(self._terminal)

    def _read(self) -> None:
        self.written += os.read(self._terminal, 65536).decode(errors="replace")

    def resize(self, rows: int, columns: int) -> None:
        """Give the terminal so many rows and columns, of which it tells the command."""
        fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def press(self, keys: str) -> None:
        """Type these keys."""
        os.write(self._terminal, keys.encode())

    @property
    def screen(self) -> str:
        """What the screen shows, without the colours."""
        *_, last = self.written.split("\x1b[H")
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", last).replace("\r\n", "\n")

    @property
    def drawn(self) -> int:
        """How often the screen was drawn."""
        return self.written.count("\x1b[H")

    @property
    def cpu_s(self) -> float:
        """Seconds of processor time that the process has taken, as Linux counts them."""
        _, _, numbers = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")
        return sum(map(int, numbers.split()[11:13])) / os.sysconf("SC_CLK_TCK")

    async def shows(self, *parts: str) -> str:
        """Wait until the screen shows all of these, and return it."""

        def is_shown() -> bool:
            assert all(part in self.screen for part in parts), self.screen
            return True

        await eventually(is_shown, within=PATIENCE_S)
        return self.screen

    async def status(self) -> int:
        """Wait until the command has ended, and return its status."""
        return await asyncio.wait_for(asyncio.to_thread(self.process.wait), PATIENCE_S)

    @property
    def is_restored(self) -> bool:
        """Whether the terminal is as it was: its modes, the ordinary screen, and the cursor."""
        modes = termios.tcgetattr(self._end) == self._before
        return modes and self._last("\x1b[?1049") == "l" and self._last("\x1b[?25") == "h"

    def _last(self, mode: str) -> str:
        _, _, rest = self.written.rpartition(mode)
        return rest[:1]
