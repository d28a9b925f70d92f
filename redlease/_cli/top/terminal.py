"""A terminal whose keys are read one by one, and which is as it was before when the program ends, however that is."""

from __future__ import annotations

import asyncio
import codecs
import os
import re
import signal
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live

KEY = re.compile(r"\x1b\[[0-9;]*[A-Za-z~]|\x1bO[A-Za-z]|.", re.DOTALL)
_LETTERS = {"A": "up", "B": "down", "C": "right", "D": "left", "H": "home", "F": "end"}
_NUMBERS = {"1": "home", "4": "end", "5": "page up", "6": "page down", "7": "home", "8": "end"}
_CONTROLS = {"\r": "enter", "\n": "enter", "\x7f": "backspace", "\b": "backspace", "\x1b": "escape", "\x04": "q"}
NAMES = (
    {f"\x1b{begin}{letter}": name for letter, name in _LETTERS.items() for begin in "[O"}
    | {f"\x1b[{number}~": name for number, name in _NUMBERS.items()}
    | _CONTROLS
)
ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def is_terminal() -> bool:
    """Returns True if there is a terminal to draw on and to read keys from."""
    return sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM") not in {None, "", "dumb"}


def keys_in(text: str) -> Iterator[str]:
    """Yields the keys: characters as they are, others by their names, unknown ones not at all."""
    for key in KEY.findall(text):
        if name := NAMES.get(key, key if len(key) == 1 else None):
            yield name


class Terminal:
    """The terminal of this process, in the use of one program.

    Args:
        on_key: Called with each key.
        on_change: Called when the size has changed, or the program goes on after Ctrl-Z.

    Attributes:
        ended_by: The number of the signal that asks the program to end, SIGHUP if the terminal is gone; 0 for none.
    """

    def __init__(self, on_key: Callable[[str], None], on_change: Callable[[], None]) -> None:
        self._on_key = on_key
        self._on_change = on_change
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.ended_by = 0
        self.console = Console(highlight=False)
        self.live = Live(console=self.console, screen=True, auto_refresh=False, redirect_stderr=False)

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Takes the terminal for the block, and leaves it as it was, after an error or a signal too."""
        loop, before = asyncio.get_running_loop(), termios.tcgetattr(sys.stdin)
        for number in ENDING:
            loop.add_signal_handler(number, self._end, number)
        loop.add_signal_handler(signal.SIGWINCH, self._on_change)
        loop.add_signal_handler(signal.SIGTSTP, self._pause, before)
        try:
            self._enter()
            loop.add_reader(sys.stdin.fileno(), self._read)
            yield
        finally:
            loop.remove_reader(sys.stdin.fileno())
            for number in (*ENDING, signal.SIGWINCH, signal.SIGTSTP):
                loop.remove_signal_handler(number)
            self._leave(before)

    def _enter(self) -> None:
        tty.setcbreak(sys.stdin)  # keys at once and unseen; Ctrl-C and Ctrl-Z are signals still
        self.live.start()

    def _leave(self, before: list[object]) -> None:
        try:
            self.live.stop()
        except OSError:  # the terminal is gone
            self.ended_by = self.ended_by or signal.SIGHUP
        finally:
            try:
                termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)  # type: ignore[arg-type]
            except termios.error:
                self.ended_by = self.ended_by or signal.SIGHUP

    def _pause(self, before: list[object]) -> None:
        """Ctrl-Z: gives the terminal back to the shell until the program goes on."""
        self._leave(before)
        os.kill(os.getpid(), signal.SIGSTOP)
        self._enter()
        self._on_change()

    def _read(self) -> None:
        try:
            data = os.read(sys.stdin.fileno(), 1024)
        except OSError:
            data = b""
        if not data:
            self._end(signal.SIGHUP)
        for key in keys_in(self._decoder.decode(data)):
            self._on_key(key)

    def _end(self, number: int) -> None:
        self.ended_by = self.ended_by or number
        self._on_change()
