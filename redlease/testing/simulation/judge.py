"""Judges a simulation while it runs: what the server tells, and what each client believes."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from redlease._core.client import Redlease
from redlease._core.session.leases import Lease

from .engines import NAMES, Executed
from .ledger import Ledger
from .process import Process

LATE_MS = 2.0  # by how much a loss may be noticed late, in time that takes no time to run code
ROUNDING_MS = 2.0


class Judge:
    """Compares what is with what was promised.

    Args:
        now_ms: The time without anybody's clock.
        server_us: The server's clock.

    Attributes:
        violations: Which promises were broken, each with what happened.
        clients: The clients that live, and the process of each.
        books: What is known of each resource, by the name of its first key.
        violations_allowed_until_ms: Overlap is bounded by a lease after the server lost data or its clock was stepped.
        longest_ms: The longest lease that was asked for.
        is_off: Whether it judges no more.
    """

    def __init__(self, now_ms: Callable[[], float], server_us: Callable[[], int]) -> None:
        self._now_ms, self._server_us = now_ms, server_us
        self.violations: list[str] = []
        self.clients: dict[Redlease, Process] = {}
        self.ledgers: dict[str, Ledger] = defaultdict(Ledger)
        self.violations_allowed_until_ms = 0.0
        self.longest_ms = 0
        self.is_off = False

    def on_call(self, sha: str, words: list[bytes], executed: Executed) -> None:
        """Read a call that the server has executed."""
        name = NAMES.get(sha)
        if name is None or self.is_off:
            return
        key, args = words[0].decode(), [word.decode() for word in words[5:]]
        if name == "acquire":
            self.longest_ms = max(self.longest_ms, int(args[5]))
        found = self.ledgers[key].read(self._server_us(), name, args, executed.reply[1:], executed.messages)
        self._add(f"{key}: {violation}" for violation in found)
        self.look()

    def _add(self, found: Iterable[str]) -> None:
        self.violations += [f"at {self._now_ms() / 1000:.3f} s, {violation}" for violation in found]

    def look(self) -> None:
        """Compare what each client believes with what the server has: P1 among clients, P7, P8."""
        if self.is_off:
            return
        now_ms = self._now_ms()
        believed: dict[str, dict[tuple[str, int], int]] = defaultdict(dict)
        for client, process in self.clients.items():
            for lease in client._manager.leases.values():
                if lease.lost or lease.ended:
                    continue
                if now_ms >= lease.deadline_ms:
                    self._look_at_notice(lease, process, now_ms)
                    continue
                key = lease.request.resource.state_key.decode()
                believed[key][lease.request.ticket, lease.fence] = lease.request.weight
                if now_ms >= self.violations_allowed_until_ms:
                    self._look_at_belief(self.ledgers[key], lease, now_ms)
        if now_ms >= self.violations_allowed_until_ms:
            for key, weights in believed.items():
                if sum(weights.values()) > self.ledgers[key].capacity:
                    self._add([f"{key}: exclusion (P1): {list(weights)} believe to hold at once"])

    def _look_at_notice(self, lease: Lease, process: Process, now_ms: float) -> None:
        due_ms = max(lease.deadline_ms, process.woke_at * 1000)
        if now_ms > due_ms + LATE_MS:
            self._add(
                [f"notice (P7): {lease.request.ticket} was lost {now_ms - due_ms:.0f} ms ago, and is not reported"]
            )

    def _look_at_belief(self, ledger: Ledger, lease: Lease, now_ms: float) -> None:
        ticket, server_ms = lease.request.ticket, self._server_us() / 1000
        if ticket in ledger.taken:
            return
        ledger.now_us = self._server_us()
        held = ledger.holds(ticket, lease.fence)
        if held is None:
            self._add([f"notice (P7): {ticket} believes to hold under {lease.fence}, and the server does not"])
        elif lease.deadline_ms - now_ms > held.until_ms - server_ms + ROUNDING_MS:
            self._add([f"notice (P7): {ticket} believes to hold for longer than the server does"])

    def allow_violation(self) -> None:
        """The server has lost data, or its clock was stepped: overlap is bounded by a lease from now on."""
        self.violations_allowed_until_ms = self._now_ms() + self.longest_ms

    def save(self) -> Any:
        """Return what is known of the server now."""
        return copy.deepcopy(dict(self.ledgers))

    def restore(self, saved: Any) -> None:
        """The server has gone back to what it had then."""
        for key, ledger in self.ledgers.items():
            fence, taken = ledger.fence, ledger.taken
            ledger.forget()
            if saved and key in saved:
                vars(ledger).update(vars(copy.deepcopy(saved[key])))
            ledger.fence, ledger.taken, ledger.has_lost = fence, taken, True

    def left_behind(self) -> dict[str, list[str]]:
        """Return the tickets that hold or wait now, by the name of their resource's first key."""
        left = {}
        for key, ledger in self.ledgers.items():
            ledger.now_us = self._server_us()
            if tickets := ledger.live():
                left[key] = tickets
        return left
