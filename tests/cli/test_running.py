"""`redlease run`: a command under a permit, which never outlives the lease by more than the grace."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pty
import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from redlease import Redlease
from redlease._cli.running import SUPERVISOR
from redlease._cli.statuses import Exit
from redlease._core import clock

from command_line import COMMAND, run_async
from helpers import eventually, until_waiting

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from conftest import OwnServer, Servers

# Each starts the command, its supervisor and what that runs.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

LEASE, GRACE = 3.0, 2.0
LATE = 5.0  # how much longer a busy machine may take
SHORT = ("--lease", str(LEASE))  # for what is about the end of the lease
IDLE = "while :; do sleep 0.05; done"
READY = f"echo ready $$; {IDLE}"
# Says that it got SIGTERM, and goes on.
STUBBORN = f"trap 'echo term' TERM; {READY}"


@pytest.fixture
def url(servers: Servers) -> str:
    """A server for commands that are given one."""
    return servers["valkey9"].url


class Running:
    """A `redlease run` whose shell script has said that it is ready."""

    def __init__(self, script: str, url: str, prefix: str, *options: str, **how: Any) -> None:
        """Start it."""
        words = ["run", "r", "--url", url, "--prefix", prefix, "--lease", "30", "--grace", str(GRACE), *options]
        self.process: subprocess.Popen[str] = subprocess.Popen(
            [*COMMAND, *words, "--", "sh", "-c", script],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            process_group=0,
            **how,
        )
        self.pid = 0  # of the shell

    async def ready(self) -> None:
        """Wait until the script has written its first line: `ready` and its process."""
        word, pid = (await self.line()).split()
        assert word == "ready"
        self.pid = int(pid)

    async def line(self) -> str:
        """Return the next line that it writes; "" when the last process that could write one has ended."""
        assert self.process.stdout is not None
        return (await asyncio.to_thread(self.process.stdout.readline)).strip()

    async def status(self) -> int:
        """Wait for its end and return the exit status."""
        return await asyncio.to_thread(self.process.wait, 60)

    def errors(self) -> str:
        """Return what it wrote to the standard error stream; to be asked when all have ended."""
        assert self.process.stderr is not None
        return self.process.stderr.read()

    def supervisor(self) -> int:
        """Return the process that the shell is a child of."""
        return parent_of(self.pid)

    def kill(self) -> None:
        """Leave nothing behind, whatever has failed."""
        for group in filter(None, (self.process.pid, self.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        self.process.communicate()


def parent_of(pid: int) -> int:
    """Return the parent of a process."""
    return int(subprocess.run(["ps", "-o", "ppid=", str(pid)], capture_output=True, check=True, text=True).stdout)


def is_alive(pid: int) -> bool:
    """Tell whether a process has not ended."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture
def started(url: str, prefix: str) -> Iterator[Any]:
    """A factory of commands that run, which are killed when the test ends."""
    running: list[Running] = []

    async def start(script: str, *options: str, at: str = url, **how: Any) -> Running:
        running.append(Running(script, at, prefix, *options, **how))
        await running[-1].ready()
        return running[-1]

    yield start
    for each in running:
        each.kill()


async def is_free(url: str, prefix: str) -> bool:
    """Tell whether nobody holds the resource."""
    async with Redlease.from_url(url, prefix=prefix) as client:
        return not await client.lock("r").locked()


async def test_the_command_knows_its_permit_and_its_status_is_passed_on(url: str, prefix: str) -> None:
    """Resource, ticket and fence are in its environment; the permit is held meanwhile and free afterwards."""
    place = ("--url", url, "--prefix", prefix)
    words = " ".join([*COMMAND[:2], f"'{COMMAND[2]}'", "inspect r --json", *place])
    script = f"echo $REDLEASE_RESOURCE $REDLEASE_TICKET $REDLEASE_FENCE; {words}; exit 7"
    done = await run_async("run", "r", *place, "--", "sh", "-c", script)
    assert done.returncode == 7, done.stderr
    told, inspected = done.stdout.splitlines()
    resource, ticket, fence = told.split()
    assert resource == "r"
    assert f'"ticket": "{ticket}", "fence": {fence}' in inspected
    assert await is_free(url, prefix)


@pytest.mark.parametrize(
    ("command", "status"),
    [
        (("sh", "-c", "kill -9 $$"), 137),
        (("sh", "-c", "kill -15 $$"), 143),
        (("sh", "-c", "kill -PIPE $$"), 141),
        (("no such command",), Exit.NOT_FOUND),
        (("/etc/passwd",), Exit.NOT_EXECUTABLE),
        (("true",), 0),
    ],
)
async def test_the_status_is_that_of_a_shell(command: tuple[str, ...], status: int, url: str, prefix: str) -> None:
    """128 and the signal for a command that was killed, 127 and 126 for one that cannot be started; nothing is held."""
    done = await run_async("run", "r", "--url", url, "--prefix", prefix, "--", *command)
    assert done.returncode == status, done.stderr
    assert done.stderr.count("\n") == (status in {Exit.NOT_FOUND, Exit.NOT_EXECUTABLE})
    assert await is_free(url, prefix)


async def test_it_begins_nothing_without_a_permit(url: str, prefix: str) -> None:
    """75 if it is not granted in time, 2 for a weight that never fits, 69 without a server: the command never runs."""
    place = ("--url", url, "--prefix", prefix)
    end = ("--", "echo", "started")
    async with Redlease.from_url(url, prefix=prefix) as client:
        await client.lock("r").acquire()
        for words, status in (
            (("run", "r", "--timeout", "0", *place, *end), Exit.NOT_GRANTED),
            (("run", "r", "--timeout", "0.1", *place, *end), Exit.NOT_GRANTED),
            (("run", "r", "--weight", "2", *place, *end), 2),
            (("run", "r", "--url", "redis://127.0.0.1:1/0", *end), Exit.UNAVAILABLE),
        ):
            done = await run_async(*words)
            assert (done.returncode, done.stdout, done.stderr.count("\n")) == (status, "", 1), done.stderr
        assert (await client.lock("r").inspect()).waiting == 0


async def test_a_pool_runs_as_many_commands_as_it_has_capacity(started: Any, url: str, prefix: str) -> None:
    """Two of capacity 2 run side by side; a third is not granted."""
    for _ in range(2):
        await started(READY, "--capacity", "2")
    place = ("--url", url, "--prefix", prefix)
    done = await run_async("run", "r", "--capacity", "2", "--timeout", "0", *place, "--", "true")
    assert done.returncode == Exit.NOT_GRANTED


async def test_without_a_capacity_it_changes_none(url: str, prefix: str) -> None:
    """A pool of 2 that was resized to 3 stays so, and the command has one of its units; an unknown name is a lock."""
    place = ("--url", url, "--prefix", prefix)
    async with Redlease.from_url(url, prefix=prefix) as client:
        pool = client.semaphore("pool", capacity=2)
        async with pool:
            await pool.resize(3)
            done = await run_async("run", "pool", "--timeout", "5", *place, "--", "true")
            assert done.returncode == 0, done.stderr
            assert (await pool.acquire()).capacity == 3  # 2 is still what was declared last
        done = await run_async("run", "new", *place, "--", "true")
        assert done.returncode == 0, done.stderr
        assert (await client.lock("new").inspect()).capacity == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_signals_are_passed_on(started: Any, number: signal.Signals) -> None:
    """The command gets the signal, may go on as long as it likes, and its own status is passed on."""
    name = number.name.removeprefix("SIG")
    running = await started(f"trap 'echo got {name}; sleep 0.2; exit 5' {name}; {READY}")
    running.process.send_signal(number)
    assert await running.line() == f"got {name}"
    assert await running.status() == 5


async def test_a_signal_that_the_command_does_not_handle_ends_it(started: Any, url: str, prefix: str) -> None:
    """As a shell has it: 128 and the number of the signal; the permit is free at once."""
    running = await started(READY)
    running.process.terminate()
    assert await running.status() == 128 + signal.SIGTERM
    assert await is_free(url, prefix)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_a_signal_ends_the_wait_for_the_permit(number: signal.Signals, url: str, prefix: str) -> None:
    """The request leaves the queue, and the command never runs."""
    async with Redlease.from_url(url, prefix=prefix) as client:
        lock = client.lock("r")
        await lock.acquire()
        running = Running(READY, url, prefix)
        await until_waiting(lock, 1, within=30)
        running.process.send_signal(number)
        assert await running.status() == 128 + number
        assert (await lock.inspect()).waiting == 0
        assert await running.line() == ""
        running.kill()


async def test_a_command_under_nohup_does_not_get_sighup(started: Any) -> None:
    """What the caller has had ignored, the command ignores too."""
    running = await started(READY, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    running.process.send_signal(signal.SIGHUP)
    os.kill(running.pid, signal.SIGHUP)
    running.process.terminate()
    assert await running.status() == 128 + signal.SIGTERM


async def test_the_command_is_alone_in_its_group_and_gets_no_signal_twice(started: Any) -> None:
    """What goes to the whole group of `redlease run` reaches the command once."""
    running = await started(f"trap 'echo got' INT; trap 'exit 3' TERM; {READY}")
    assert os.getpgid(running.pid) == running.pid
    os.killpg(running.process.pid, signal.SIGINT)
    assert await running.line() == "got"
    os.killpg(running.process.pid, signal.SIGTERM)
    assert await running.line() == ""
    assert await running.status() == 3


def supervised(begun: Path, deadline_ms: float, told: bytes) -> bytes:
    """Start a supervisor that was told this before it begins, b"" for the end of the socket; return what it says."""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            if told:
                ours.sendall(told)
            else:
                ours.shutdown(socket.SHUT_WR)
            words = [theirs.fileno(), clock.CLOCK, deadline_ms, 1000, "touch", begun]
            subprocess.run([sys.executable, SUPERVISOR, *map(str, words)], pass_fds=[theirs.fileno()], check=True)
        with contextlib.suppress(ConnectionResetError):
            return ours.recv(100)
        return b""


@pytest.mark.parametrize(("told", "said"), [(b"signal 15\n", b"exit 143\n"), (b"end\n", b"exit 143\n"), (b"", b"")])
def test_a_supervisor_that_is_told_to_end_before_it_begins_runs_nothing(
    told: bytes, said: bytes, tmp_path: Path
) -> None:
    """A signal, the loss of the permit or the end of `redlease run` while the supervisor starts: no command runs."""
    assert supervised(tmp_path / "begun", clock.now_ms() + 60_000, told) == said
    assert not (tmp_path / "begun").exists()


def test_a_supervisor_that_begins_too_late_runs_nothing(tmp_path: Path) -> None:
    """The lease has ended while it started; a renewal that it was told of meanwhile counts."""
    now_ms = clock.now_ms()
    assert supervised(tmp_path / "late", now_ms, f"until {now_ms}\n".encode()) == b""
    assert supervised(tmp_path / "renewed", now_ms, f"until {now_ms + 60_000}\n".encode()).endswith(b"exit 0\n")
    assert [each.name for each in tmp_path.iterdir()] == ["renewed"]


# Nothing outlives the lease


async def test_kill_9_of_run_ends_the_command(started: Any) -> None:
    """SIGTERM at once, and SIGKILL after the grace for one that goes on: nothing is left when both have ended."""
    running = await started(STUBBORN)
    began = time.monotonic()
    running.process.kill()
    assert await running.line() == "term"
    assert await running.line() == ""  # nobody has its output open: neither command nor supervisor
    assert GRACE <= time.monotonic() - began < GRACE + LATE
    assert not is_alive(running.pid)


async def test_kill_9_of_the_whole_group_of_run_ends_the_command(started: Any) -> None:
    """The supervisor is not of that group."""
    running = await started(READY)
    os.killpg(running.process.pid, signal.SIGKILL)
    assert await running.line() == ""
    assert not is_alive(running.pid)


async def test_a_stopped_run_does_not_hold_up_the_end_of_the_command(started: Any) -> None:
    """SIGSTOP of `redlease run`: the command ends with the lease, or after the grace; once it goes on, it says so."""
    running = await started(STUBBORN, *SHORT)
    running.process.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    await eventually(lambda: not is_alive(running.pid), within=LEASE + GRACE + LATE)
    assert time.monotonic() - began > LEASE / 3  # not before the lease could have ended
    running.process.send_signal(signal.SIGCONT)
    assert await running.status() == Exit.LOST
    assert await running.line() == "term"
    assert "is no longer held" in running.errors()


async def test_a_dead_server_ends_the_command_when_the_lease_ends(started: Any, own_server: OwnServer) -> None:
    """SIGTERM no earlier than that, for a server may come back; SIGKILL after the grace, and the status tells of it."""
    server = own_server("valkey9")
    running = await started(STUBBORN, *SHORT, at=server.url)
    server.kill()
    began = time.monotonic()
    assert await running.line() == "term"
    assert time.monotonic() - began > LEASE / 3
    await eventually(lambda: not is_alive(running.pid), within=GRACE + LATE)
    assert LEASE / 3 + GRACE < time.monotonic() - began < LEASE + GRACE + LATE
    assert await running.status() == Exit.LOST


async def test_a_permit_that_is_taken_away_ends_the_command(started: Any, url: str, prefix: str) -> None:
    """At once, and not only at the end of the lease."""
    running = await started(READY)
    async with Redlease.from_url(url, prefix=prefix) as client:
        await client.lock("r").release_all()
    assert await running.status() == Exit.LOST
    assert "is no longer held" in running.errors()


async def test_a_hold_lasts_longer_than_its_lease(started: Any, url: str, prefix: str) -> None:
    """Renewals reach the supervisor: the command goes on past several leases."""
    running = await started(f"echo ready $$; sleep {2.5 * LEASE}; exit 4", *SHORT)
    assert await running.status() == 4
    assert await is_free(url, prefix)


async def test_kill_9_of_the_supervisor_ends_the_command(started: Any, url: str, prefix: str) -> None:
    """Without one, nobody would end the command in time: `redlease run` ends it and says so."""
    running = await started(STUBBORN)
    os.kill(running.supervisor(), signal.SIGKILL)
    assert await running.status() == Exit.BROKEN
    await eventually(lambda: not is_alive(running.pid))
    assert "supervisor" in running.errors()
    assert await is_free(url, prefix)


async def test_a_stopped_supervisor_does_not_hold_up_the_end_of_the_command(
    started: Any, url: str, prefix: str
) -> None:
    """When the permit is lost, `redlease run` itself ends the command a second after the grace."""
    running = await started(READY)
    os.kill(running.supervisor(), signal.SIGSTOP)
    async with Redlease.from_url(url, prefix=prefix) as client:
        await client.lock("r").release_all()
    assert await running.status() == Exit.LOST
    await eventually(lambda: not is_alive(running.pid))


async def test_a_stopped_command_is_ended_too(started: Any, url: str, prefix: str) -> None:
    """It is made to go on, so that it gets SIGTERM."""
    running = await started(f"trap 'echo term; exit 3' TERM; {READY}")
    os.killpg(running.pid, signal.SIGSTOP)
    async with Redlease.from_url(url, prefix=prefix) as client:
        await client.lock("r").release_all()
    assert await running.line() == "term"
    assert await running.status() == Exit.LOST


async def test_what_the_command_leaves_behind_ends_with_it(started: Any) -> None:
    """A process in the background of the command's group would go on without the permit."""
    running = await started(f"sh -c '{IDLE}' & echo ready $!; exit 6")
    assert await running.status() == 6
    await eventually(lambda: not is_alive(running.pid))


# At a terminal


def at_terminal(url: str, prefix: str, script: str) -> tuple[int, int]:
    """Start the command as the foreground of a terminal of its own; returns its process and the terminal."""
    pid, terminal = pty.fork()
    if pid == 0:
        place = ("--url", url, "--prefix", prefix, "--lease", "30")
        os.execv(sys.executable, [*COMMAND, "run", "r", *place, "--", "sh", "-c", script])
    return pid, terminal


def read_until(terminal: int, text: bytes) -> bytes:
    """Read from a terminal until it has shown the text."""
    shown = b""
    while text not in shown:
        shown += os.read(terminal, 4096)
    return shown


@pytest.mark.filterwarnings("ignore:.*forkpty:DeprecationWarning")  # the child does nothing but exec
@pytest.mark.parametrize(("typed", "status"), [(b"yes\n", 9), (b"\x03", 130), (b"\x1ayes\n", 9)])
async def test_the_command_has_the_terminal(typed: bytes, status: int, url: str, prefix: str, tmp_path: Path) -> None:
    """It can read what is typed, Ctrl-C ends it once, and Ctrl-Z, after which nobody could type `fg`, does nothing."""
    answer = tmp_path / "answer"
    script = f"echo ask; read line; test $? = 0 || read line; echo $line > {answer}; exit 9"
    pid, terminal = at_terminal(url, prefix, script)
    try:
        await asyncio.to_thread(read_until, terminal, b"ask")
        os.write(terminal, typed)
        _, ended = await asyncio.to_thread(os.waitpid, pid, 0)
    finally:
        os.close(terminal)
    assert os.waitstatus_to_exitcode(ended) == status
    assert answer.exists() == (status == 9)
    if answer.exists():
        assert answer.read_text() == "yes\n"
    assert await is_free(url, prefix)
