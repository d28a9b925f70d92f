"""Runs a command under a permit: what `redlease run` does in its own process."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from redlease import AcquireTimeout, Hold, LeaseLost, NeverFits, QueueFull, Redlease, RedleaseError, Withdrawn
from redlease._core import clock
from redlease._core.primitives.semaphore import as_declared

from .connecting import print_error
from .statuses import Exit

SUPERVISOR = Path(__file__).with_name("supervisor.py")
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LATE_S = 1.0  # how long the supervisor may take longer than the grace before its work is done here


@dataclass(frozen=True, slots=True)
class Job:
    """A command and the permit that it needs; times in seconds.

    `capacity`: None for that which others have declared, at first 1; `timeout`: how long to wait for the permit, None
    forever; `grace`: from SIGTERM to SIGKILL when the lease is lost.
    """

    command: list[str]
    resource: str
    capacity: int | None = None
    weight: int = 1
    timeout: float | None = None
    priority: int = 0
    lease: float = 30.0
    grace: float = 5.0


async def run_job(job: Job, url: str, prefix: str) -> int:
    """Waits for the permit, runs the command, and returns the exit status of `redlease run`.

    Raises:
        ValueError: A parameter is wrong; nothing was acquired or run.
    """
    with _signals() as signals:
        try:
            async with Redlease.from_url(url, prefix=prefix, lease=job.lease) as client:
                pool = client.semaphore(job.resource, capacity=job.capacity or 1)
                if job.capacity is None:
                    pool = as_declared(pool)
                terms = {"weight": job.weight, "timeout": job.timeout, "priority": job.priority}
                async with pool.hold(**terms, on_lost="signal") as hold:  # type: ignore[arg-type]
                    return await _run_under(hold, job, signals)
        except asyncio.CancelledError:
            if not signals.received:
                raise
            return 128 + signals.received
        except (AcquireTimeout, QueueFull, Withdrawn) as error:
            print_error(error)
            return Exit.NOT_GRANTED
        except LeaseLost as error:
            print_error(error)
            return Exit.LOST
        except NeverFits:  # a wrong parameter, like the other errors of that kind
            raise
        except RedleaseError as error:
            print_error(error)
            return Exit.UNAVAILABLE
        except OSError as error:
            print_error(error)
            return Exit.BROKEN


async def _run_under(hold: Hold, job: Job, signals: Signals) -> int:
    with Supervised(hold, job) as supervised:
        signals.pass_on = supervised.pass_on
        status = await supervised.status()
    try:
        hold.check()
    except LeaseLost as error:
        print_error(error)
        return Exit.LOST
    return status


class Signals:
    """What becomes of SIGINT, SIGTERM and SIGHUP: they end the wait for the permit, and then go to the command.

    Attributes:
        received: The number of the last one, 0 if there was none.
        pass_on: What gets them while the command runs.
    """

    def __init__(self) -> None:
        self.received = 0
        self.pass_on: Callable[[int], None] | None = None
        self._task = asyncio.current_task()

    def on_signal(self, number: int) -> None:
        self.received = number
        if self.pass_on is not None:
            self.pass_on(number)
        elif self._task is not None:
            self._task.cancel()


@contextlib.contextmanager
def _signals() -> Iterator[Signals]:
    loop, signals = asyncio.get_running_loop(), Signals()
    # What the caller has had ignored, as nohup does, stays so, for the command as well.
    handled = [number for number in PASSED_ON if signal.getsignal(number) != signal.SIG_IGN]
    for number in handled:
        loop.add_signal_handler(number, signals.on_signal, number)
    try:
        yield signals
    finally:
        for number in handled:
            loop.remove_signal_handler(number)


class Supervised:
    """The command under its supervisor, which ends it unless it is told again and again how long the lease lasts."""

    def __init__(self, hold: Hold, job: Job) -> None:
        self._hold = hold
        self._job = job
        self._pid = 0  # of the command, which leads a process group
        self._over = False

    def __enter__(self) -> Self:
        self._control, theirs = socket.socketpair()
        self._control.setblocking(False)
        # Isolated, so that neither the directory nor the environment of the command changes what the supervisor runs.
        program = [sys.executable, "-I", "-S", str(SUPERVISOR)]
        settings = [theirs.fileno(), clock.CLOCK, self._deadline_ms(), self._job.grace * 1000]
        with theirs:
            self._process = subprocess.Popen(
                [*program, *map(str, settings), *self._job.command],
                pass_fds=[theirs.fileno()],
                env=os.environ | _text(self._hold),
                process_group=0,  # what ends the group of `redlease run` does not end the supervisor
            )
        return self

    def __exit__(self, *_: object) -> None:
        if not self._over:
            self._kill()
        self._control.close()
        self._process.wait()

    async def status(self) -> int:
        """Returns the status of the command when it has ended, or why there is none."""
        tasks = [asyncio.create_task(self._keep_alive()), asyncio.create_task(self._end_when_lost())]
        try:
            outcome = await self._outcome()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if outcome.startswith("exit "):
            self._over = True
            return int(outcome.removeprefix("exit "))
        if outcome.startswith("failed "):
            self._over = True
            return self._not_started(int(outcome.removeprefix("failed ")))
        if not self._hold.lost:
            print_error("the supervisor of the command has ended, and the command with it. Run it again")
        return Exit.BROKEN

    def pass_on(self, number: int) -> None:
        """Sends a signal to the command's process group."""
        self._send(f"signal {number}")

    async def _outcome(self) -> str:
        """Returns the last line of the supervisor; "" if it has ended, or was too late to begin, without one."""
        loop = asyncio.get_running_loop()
        unread, line = b"", ""
        with contextlib.suppress(ConnectionError):
            while data := await loop.sock_recv(self._control, 4096):
                *lines, unread = (unread + data).split(b"\n")
                for each in lines:
                    line = each.decode()
                    if line.startswith("started "):
                        self._pid, line = int(line.removeprefix("started ")), ""
        return line

    async def _keep_alive(self) -> None:
        """Tells the supervisor again and again when the lease ends: after each renewal, and early in a short lease."""
        while True:
            self._send(f"until {self._deadline_ms()}")
            await asyncio.sleep(min(self._job.lease / 6, self._hold.remaining() / 3) or self._job.lease)

    async def _end_when_lost(self) -> None:
        if await self._hold.wait_lost():
            self._send("end")
            await asyncio.sleep(self._job.grace + LATE_S)
            self._kill()

    def _deadline_ms(self) -> float:
        return clock.now_ms() + self._hold.remaining() * 1000

    def _send(self, line: str) -> None:
        with contextlib.suppress(OSError):  # a supervisor that has ended or is stopped; what follows sees to that
            self._control.send(line.encode() + b"\n")

    def _kill(self) -> None:
        """Does what the supervisor should have done."""
        if self._pid:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._pid, signal.SIGKILL)
        self._process.kill()

    def _not_started(self, number: int) -> int:
        found = number != errno.ENOENT
        print_error(f"{self._job.command[0]} {'cannot be run' if found else 'was not found'}: {os.strerror(number)}")
        return Exit.NOT_EXECUTABLE if found else Exit.NOT_FOUND


def _text(hold: Hold) -> dict[str, str]:
    return {"REDLEASE_RESOURCE": hold.resource, "REDLEASE_TICKET": hold.ticket, "REDLEASE_FENCE": str(hold.fence)}
