"""Runs the demo: starts the consumers, watches the resource, kills two of them, and collects the evidence."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from redlease import Redlease, Semaphore, Snapshot
from redlease.embedded import EmbeddedServer

from .consumer import Job
from .evidence import Evidence, Kill, KillKind, Sighting

CAPACITY = 3
CONSUMERS = 8
LEASE = 2.0  # of permits and of places in the queue, in seconds
HOLDS, RESTS = (0.15, 0.40), (0.03, 0.12)
IDLE_TTL = 60.0  # the keys of the run expire a minute after it
SEEN = 0.1  # how long, in seconds, a consumer must have held or waited before it is killed
# What is killed, and after which fraction of all acquires.
PLAN: tuple[tuple[KillKind, float], ...] = (("holder", 0.2), ("waiter", 0.5))
END_WITHIN = 3.0


@dataclass(frozen=True, slots=True)
class Notice:
    """An event to show as a line: `kind` is "start", "kill" or "gone"."""

    at: float
    kind: str
    text: str


class Demo:
    """One run of the demo; `evidence` and `snapshot` show its state.

    Args:
        url: The URL of the server; None starts an embedded one.
        rounds: How many times each consumer acquires the semaphore.
        prefix: The prefix of the keys.
        on_notice: Called with each event to show.
    """

    def __init__(
        self, url: str | None, *, rounds: int, prefix: str = "redlease", on_notice: Callable[[Notice], None]
    ) -> None:
        self.evidence = Evidence(f"demo-{secrets.token_hex(4)}", CAPACITY, rounds)
        self.snapshot: Snapshot | None = None
        self.processes: dict[str, Process] = {}
        self._url = url
        self._prefix = prefix
        self._on_notice = on_notice
        self._began = time.monotonic()

    def now(self) -> float:
        """Returns the seconds since the start."""
        return time.monotonic() - self._began

    async def run(self) -> Evidence:
        """Runs the demo. However it ends, no process is left."""
        async with self._server() as url, Redlease.from_url(url, prefix=self._prefix, idle_ttl=IDLE_TTL) as client:
            pool = client.semaphore(self.evidence.resource, capacity=CAPACITY)
            try:
                listening = await self._start_consumers(url)
                watching = asyncio.create_task(self._watch(pool))
                try:
                    await listening
                finally:
                    await _cancel(watching)
            finally:
                self.evidence.ended_at = self.now()
                await asyncio.shield(self._end_consumers())
        return self.evidence

    @contextlib.asynccontextmanager
    async def _server(self) -> AsyncIterator[str]:
        if self._url is not None:
            yield self._url
            return
        server = EmbeddedServer()
        try:
            yield await server.start_async()
        finally:
            await server.stop_async()

    # Consumers

    async def _start_consumers(self, url: str) -> asyncio.Future[list[None]]:
        """Starts all consumers, and their jobs when all are ready; the returned future is done when they have ended."""
        names = [f"consumer {number}" for number in range(1, CONSUMERS + 1)]
        for name in names:
            # In a group of their own the consumers do not get the terminal's Ctrl-C; they exit when their input ends.
            command = (sys.executable, "-m", "redlease._cli.demo.consumer")
            self.processes[name] = await asyncio.create_subprocess_exec(
                *command, stdin=PIPE, stdout=PIPE, stderr=PIPE, process_group=0
            )
        await asyncio.gather(*(_stream(process.stdout).readline() for process in self.processes.values()))
        self._began = time.monotonic()
        server = "an embedded server" if self._url is None else without_secrets(self._url)
        self._notify("start", f"{CONSUMERS} processes, capacity {CAPACITY}, lease {LEASE:g} s, {server}")
        for name, process in self.processes.items():
            assert process.stdin is not None
            process.stdin.write(self._job(name, url).as_line())
        return asyncio.gather(*(self._listen(name, process) for name, process in self.processes.items()))

    def _job(self, name: str, url: str) -> Job:
        evidence = self.evidence
        return Job(
            *(name, url, self._prefix, evidence.resource, CAPACITY, evidence.rounds, LEASE, IDLE_TTL, HOLDS, RESTS)
        )

    async def _listen(self, name: str, process: Process) -> None:
        """Records what a consumer reports, until it exits."""
        complaint = asyncio.create_task(_stream(process.stderr).read())
        async for line in _stream(process.stdout):
            text = json.loads(line)
            self.evidence.record(name, text, text["at"] - self._began)
        status = await process.wait()
        detail = (await complaint).decode().strip().splitlines()
        if status != 0 and self.evidence.killed(name) is None:
            self.evidence.failures.append(
                f"{name} ended with status {status}: {detail[-1] if detail else 'no message'}"
            )

    async def _end_consumers(self) -> None:
        """Closes the consumers' input, which ends them, and kills those that take too long."""
        if not self.processes:
            return  # not even the first one could be started
        for process in self.processes.values():
            assert process.stdin is not None
            process.stdin.close()
        waiting = [asyncio.create_task(process.wait()) for process in self.processes.values()]
        _, late = await asyncio.wait(waiting, timeout=END_WITHIN)
        if late:
            for process in self.processes.values():
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
            await asyncio.wait(late)

    # The server's side

    async def _watch(self, pool: Semaphore) -> None:
        async for snapshot in pool.watch():
            self._sight(snapshot)
            await self._kill_if_due(pool, snapshot)

    def _sight(self, snapshot: Snapshot) -> None:
        self.snapshot, at = snapshot, self.now()
        holders = [permit.ticket for permit in snapshot.holders]
        waiters = [waiter.ticket for waiter in snapshot.waiters]
        queued_at_ms = [waiter.queued_at_ms for waiter in snapshot.waiters]
        self.evidence.sightings.append(Sighting(at, holders, waiters, queued_at_ms))
        for kill in self.evidence.kills:
            if kill.holds_until is None and kill.ticket in holders:
                kill.holds_from, kill.holds_until = at, at + _lease_left(snapshot, kill.ticket)
            if kill.gone_at is None and kill.ticket not in (*holders, *waiters):
                kill.gone_at = at
                self._notify("gone", f"the lease of {kill.consumer} ended {at - kill.at:.2f} s after the kill")

    # Kills

    async def _kill_if_due(self, pool: Semaphore, snapshot: Snapshot) -> None:
        """Performs the next kill of the plan, if it is due and the snapshot has a suitable consumer."""
        kills, turns = self.evidence.kills, len(self.evidence.turns)
        if len(kills) < len(PLAN):
            kind, part = PLAN[len(kills)]
            ticket = self._victim(snapshot, kind)
            if ticket is not None and turns >= part * CONSUMERS * self.evidence.rounds:
                await self._kill(pool, kind, ticket)

    async def _kill(self, pool: Semaphore, kind: KillKind, ticket: str) -> None:
        """Kills a consumer that certainly holds or waits: stops it first, then checks that its ticket is listed."""
        consumer = self.evidence.turns[ticket].consumer
        process = self.processes[consumer]
        os.kill(process.pid, signal.SIGSTOP)
        snapshot = await pool.inspect()
        listed = snapshot.holders if kind == "holder" else snapshot.waiters
        if ticket not in [entry.ticket for entry in listed]:
            os.kill(process.pid, signal.SIGCONT)
            return
        kill = Kill(kind, consumer, ticket, self.now(), LEASE)
        self.evidence.kills.append(kill)
        process.kill()
        await process.wait()
        self._notify("kill", f"kill -9 {process.pid}: {consumer}, while it {'held' if kind == 'holder' else 'waited'}")
        if kind == "holder":
            # The server reads its clock after this moment, so the lease ends no earlier than computed here.
            asked_at = self.now()
            kill.holds_from, kill.holds_until = kill.at, asked_at + _lease_left(await pool.inspect(), ticket)

    def _victim(self, snapshot: Snapshot, kind: KillKind) -> str | None:
        """Returns the ticket of a consumer to kill, if enough others wait to use its unit.

        Never the first waiter, which could be granted before the check has seen it wait.
        """
        if len(snapshot.waiters) < 3 or len(snapshot.holders) < CAPACITY:
            return None
        if kind == "holder":
            fit = [permit.ticket for permit in snapshot.holders if self._is_inside(permit.ticket)]
        else:
            latest_ms = snapshot.server_time_ms - SEEN * 1000
            fit = [waiter.ticket for waiter in snapshot.waiters[1:] if waiter.queued_at_ms <= latest_ms]
        return fit[0] if fit else None

    def _is_inside(self, ticket: str) -> bool:
        turn = self.evidence.turns.get(ticket)
        if turn is None or turn.entered_at is None or turn.left_at is not None:
            return False
        return self.now() - turn.entered_at >= SEEN

    def _notify(self, kind: str, text: str) -> None:
        self._on_notice(Notice(self.now(), kind, text))


def _lease_left(snapshot: Snapshot, ticket: str) -> float:
    """Returns how long, in seconds, a holder's lease lasts at least: the server rounds to whole ms."""
    left_ms = [permit.expires_at_ms - snapshot.server_time_ms for permit in snapshot.holders if permit.ticket == ticket]
    return (left_ms[0] - 1) / 1000 if left_ms else 0.0


def without_secrets(url: str) -> str:
    """Returns the URL without user name, password and options, which may contain passwords too."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.partition('?')[0].rpartition('@')[2]}"


def _stream(stream: asyncio.StreamReader | None) -> asyncio.StreamReader:
    assert stream is not None
    return stream


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
