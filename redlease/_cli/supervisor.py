"""Runs a command that must not outlive its lease. A program of its own, which needs the standard library only.

`redlease run` starts it with a socket, which is all that both share: the supervisor goes on while `redlease run` is
stopped, and the socket closes when it is killed. It starts the command in a process group of its own, and ends that
group when the deadline has passed that `redlease run` told last, when the socket closes, or when it is told to: SIGTERM
to all of the group, and SIGKILL after the grace.

Arguments: the socket, the clock of all deadlines, the first deadline in ms, the grace in ms, and the command.
It reads lines: `until <ms>`, the new deadline; `signal <number>`, to pass on; `end`.
It writes lines: `started <pid>`, then `exit <status>` or `failed <errno>`.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator

# The time in which a machine is suspended counts for a deadline, but not for the timeout of select: hence this limit.
LOOK_S = 1.0

# A terminal and service managers send these to whole groups of processes. The command gets those of `redlease run`.
SHIELDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP, signal.SIGTTIN)


class Supervisor:
    """The command's process group, and when it ends."""

    def __init__(self, control: socket.socket, clock: int, deadline_ms: float, grace_ms: float) -> None:
        self._control = control
        self._clock = clock
        self._deadline_ms = deadline_ms
        self._grace_ms = grace_ms
        self._kill_at_ms = math.inf  # set with the SIGTERM that ends the command
        self._pid = 0
        self._early: list[int] = []  # signals that came before the command was begun, which then is not
        self._unread = b""

    def run(self, command: list[str]) -> None:
        """Runs the command to its end, and tells its exit status."""
        if select.select([self._control], [], [], 0)[0]:
            self._read()
        if self._early:
            self._tell(f"exit {128 + self._early[0]}")
            return
        if self._now_ms() >= self._deadline_ms:
            return  # stopped since the grant: too late to begin
        with _on_child() as child_ended, _terminal() as terminal:
            self._pid, begin = _fork(command, terminal)
            # Told before the command begins, so that it can be ended even if this process is killed in the meantime.
            self._tell(f"started {self._pid}")
            if failure := begin():
                os.waitpid(self._pid, 0)
                self._tell(f"failed {failure}")
                return
            while (status := self._ended(terminal)) is None:
                self._wait(child_ended)
                self._keep_deadlines()
            # What the command has left in its group would go on without the permit.
            self._signal(signal.SIGKILL)
        self._tell(f"exit {status}")

    def _wait(self, child_ended: int) -> None:
        """Waits for a line, the end of the command, or the next deadline."""
        left_s = (min(self._deadline_ms, self._kill_at_ms) - self._now_ms()) / 1000
        control = self._control.fileno()  # -1 if it is closed
        readable, _, _ = select.select(
            [child_ended, *([control] * (control >= 0))], [], [], min(LOOK_S, max(0.0, left_s))
        )
        if child_ended in readable:
            os.read(child_ended, 4096)
        if control in readable:
            self._read()

    def _read(self) -> None:
        try:
            data = self._control.recv(4096)
        except OSError:
            data = b""
        if not data:
            self._control.close()
            self._end()
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            word, _, number = line.partition(b" ")
            if word == b"until":
                self._deadline_ms = max(self._deadline_ms, float(number))
            elif word == b"signal":
                self._signal(int(number))
            elif word == b"end":
                self._end()

    def _keep_deadlines(self) -> None:
        now_ms = self._now_ms()
        if now_ms >= self._deadline_ms:
            self._end()
        if now_ms >= self._kill_at_ms:
            self._kill_at_ms = math.inf
            self._signal(signal.SIGKILL)

    def _end(self) -> None:
        """Sends SIGTERM, once; later renewals change nothing."""
        if self._deadline_ms < math.inf:
            # A suspended machine or a stopped supervisor may be late: the grace counts from when it should have been.
            self._kill_at_ms = min(self._now_ms(), self._deadline_ms) + self._grace_ms
            self._deadline_ms = math.inf
            self._signal(signal.SIGTERM)
            self._signal(signal.SIGCONT)  # a stopped process would not get it

    def _signal(self, number: int) -> None:
        if not self._pid:
            self._early.append(number)
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._pid, number)

    def _ended(self, terminal: Terminal) -> int | None:
        """Returns the exit status of the command as a shell would, None while it runs."""
        pid, status = os.waitpid(self._pid, os.WNOHANG | os.WUNTRACED)
        if not pid:
            return None
        if os.WIFSTOPPED(status):
            if terminal.stopped(os.WSTOPSIG(status)):
                self._signal(signal.SIGCONT)
            return None
        code = os.waitstatus_to_exitcode(status)
        return code if code >= 0 else 128 - code

    def _tell(self, line: str) -> None:
        with contextlib.suppress(OSError):  # nobody is left to notify
            self._control.sendall(line.encode() + b"\n")

    def _now_ms(self) -> float:
        return time.clock_gettime(self._clock) * 1000


class Terminal:
    """The terminal, if `redlease run` is in its foreground: the command may read from it, and gets its Ctrl-C."""

    def __init__(self) -> None:
        self._former = 0
        with contextlib.suppress(OSError):
            if os.tcgetpgrp(0) == os.getpgid(os.getppid()):
                self._former = os.tcgetpgrp(0)

    def give(self, group: int) -> None:
        """Puts the group into the foreground."""
        if self._former:
            with contextlib.suppress(OSError):
                os.tcsetpgrp(0, group)

    def take_back(self) -> None:
        """Puts the former group into the foreground again."""
        self.give(self._former)

    def stopped(self, number: int) -> bool:
        """Returns True if a command that this signal has stopped is to go on: after Ctrl-Z nobody could type `fg`."""
        return bool(self._former) and number == signal.SIGTSTP


@contextlib.contextmanager
def _terminal() -> Iterator[Terminal]:
    terminal = Terminal()
    try:
        yield terminal
    finally:
        terminal.take_back()


@contextlib.contextmanager
def _on_child() -> Iterator[int]:
    """Returns what can be read when the command has ended or stopped."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, _ignore)
    yield reader


def _ignore(*_: object) -> None:
    """A handler rather than SIG_IGN: a started program gets the default action back."""


def _fork(command: list[str], terminal: Terminal) -> tuple[int, Callable[[], int]]:
    """Forks a process that leads a group; returns it, and what makes it the command: 0, or why not, as an errno."""
    # From the background, handing the terminal on would stop a process.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
    (may_begin, begin), (failure, failed) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid:
        os.close(may_begin)
        os.close(failed)
        with contextlib.suppress(OSError):  # the child does so too: whoever comes first
            os.setpgid(pid, pid)
        return pid, lambda: int((os.write(begin, b"!") and os.read(failure, 16)) or 0)
    try:
        os.close(begin)
        os.setpgid(0, 0)
        terminal.give(os.getpid())
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if os.read(may_begin, 1):  # nothing if the supervisor was killed
            for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores
                signal.signal(number, signal.SIG_DFL)
            os.execvp(command[0], command)  # noqa: S606
    except OSError as error:
        os.write(failed, str(error.errno).encode())
    finally:
        os._exit(127)


def main() -> None:
    """Runs the command that the arguments name."""
    descriptor, clock, deadline_ms, grace_ms, *command = sys.argv[1:]
    for number in SHIELDED:
        if signal.getsignal(number) != signal.SIG_IGN:  # as with nohup: the command is to ignore it too
            signal.signal(number, _ignore)
    os.set_inheritable(int(descriptor), False)
    control = socket.socket(fileno=int(descriptor))
    Supervisor(control, int(clock), float(deadline_ms), float(grace_ms)).run(command)


if __name__ == "__main__":
    main()
