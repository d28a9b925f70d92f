"""All resources under a prefix in numbers, found and read at little cost to the server: for lists and live views."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from redlease._core import clock
from redlease._core.limits import CAPACITY_MAX
from redlease._core.operations import Operations, Totals
from redlease._core.protocol.encoding import Resource
from redlease._core.protocol.globs import matches
from redlease.errors import RedleaseError
from redlease.models import Snapshot

# What who only looks declares as the capacity, and so finds as that of a resource that is unknown to the server.
UNDECLARED = CAPACITY_MAX
# How many holders of a resource are looked at for the longest hold, so that each costs the server little.
CHECKED_EACH = 100
BATCH = 32  # resources that are asked for together: a server answers them without a break for others
EACH_MS = 10  # how long no other resource is read, for each that is: 500 times what that costs an idle server
SCAN_EVERY_MS = 10_000  # how often new names are looked for, at most
SCAN_PAUSE_MS = 100  # and how long the pause after a search is for each SCAN: 100 times what one keeps the server busy


@dataclass(frozen=True, slots=True)
class Summary:
    """A resource in a line; the longest hold and wait in ms by the server's clock, None if nobody holds or waits.

    Attributes:
        resource: Its name.
        capacity: Units that may be held at once; None if no process has declared any.
        in_use: Units in use.
        waiting: How many requests wait. Those of a client that died more than a minute ago may be counted until the
            queue reaches them.
        longest_hold_ms: How long the permit is held that was granted first, of the first hundred whose leases end.
        longest_wait_ms: How long the first request in the queue has waited.
        fence: The last fence granted, 0 if none is known.
        history: How many entries of history are kept, 0 for none.
        limit: How many units a limit allows to be held, 0 while the resource is paused; None if none is set.
        error: Why the resource cannot be read, and all numbers are 0 or None; else None.
    """

    resource: str
    capacity: int | None
    in_use: int
    waiting: int
    longest_hold_ms: int | None
    longest_wait_ms: int | None
    fence: int
    history: int
    error: str | None = None
    limit: int | None = None


def is_known(snapshot: Snapshot) -> bool:
    """Returns True if the server has state of the resource; the snapshot was taken with `UNDECLARED`."""
    seen = snapshot.fence or snapshot.holders or snapshot.waiters or snapshot.limits or snapshot.damaged
    return snapshot.capacity != UNDECLARED or bool(seen)


class Overview:
    """The resources whose names match a pattern, to be looked at once or again and again.

    A look costs the server one short script a resource, about 20 µs. New names are found by SCAN, which visits all keys
    of the database, and so only now and then: every ten seconds, less often if there are more than 100,000.

    Args:
        tickets: Those of an entered client.
        pattern: A glob as Redis has them.

    Example:
        >>> overview = Overview(client._operations, "gpu-*")  # doctest: +SKIP
        >>> [summary.resource for summary in await overview.look()]  # doctest: +SKIP
        ['gpu-1', 'gpu-2']
    """

    def __init__(self, operations: Operations, pattern: str = "*") -> None:
        self._operations = operations
        self._pattern = pattern
        self._known: dict[str, Resource] = {}
        self._seen: dict[str, tuple[float, Totals | RedleaseError]] = {}  # and when, by the local clock
        self._scan_at_ms = self._all_at_ms = 0.0

    async def look(self, shown: Collection[str] | None = None) -> list[Summary]:
        """Returns the resources, sorted by what needs attention: what cannot be read, the longest wait, then the name.

        Args:
            shown: The names that a live view shows. They are read at each look, and all others only so often that the
                server spends less than a hundredth of its time on them: of a thousand resources, every ten seconds.
                In between, their waits and holds are assumed to go on. By default all are read.

        Raises:
            Unavailable: The server was not reached.
            RedleaseError: The server refused, SCAN for example.
        """
        now_ms = clock.now_ms()
        if shown is not None and now_ms < self._all_at_ms:
            await self._read([resource for name in shown if (resource := self._known.get(name))])
        else:
            if now_ms >= self._scan_at_ms:
                await self._find()
            await self._read(list(self._known.values()))
            self._all_at_ms = now_ms + EACH_MS * len(self._known)
        now_ms = clock.now_ms()
        found = [_summary(name, totals, int(now_ms - read_ms)) for name, (read_ms, totals) in self._seen.items()]
        return sorted(found, key=lambda each: (each.error is None, -(each.longest_wait_ms or 0), each.resource))

    async def _read(self, resources: list[Resource]) -> None:
        for at in range(0, len(resources), BATCH):
            batch = resources[at : at + BATCH]
            for resource, totals in zip(batch, await self._operations.totals(batch, CHECKED_EACH), strict=True):
                if isinstance(totals, RedleaseError) or totals.is_known:
                    self._seen[resource.name] = clock.now_ms(), totals
                else:  # its state has expired
                    self._known.pop(resource.name, None)
                    self._seen.pop(resource.name, None)

    async def _find(self) -> None:
        scans = 0  # counted, not timed: an outage in between would look like a server full of keys
        async for names in self._operations.names():
            scans += 1
            for name in names - self._known.keys():
                if matches(name, self._pattern):
                    self._known[name] = self._operations.resource(name)
        self._scan_at_ms = clock.now_ms() + max(SCAN_EVERY_MS, SCAN_PAUSE_MS * scans)


def _summary(name: str, totals: Totals | RedleaseError, since_ms: int) -> Summary:
    """Returns the line for what was read so long ago."""
    if isinstance(totals, RedleaseError):
        return Summary(name, None, 0, 0, None, None, 0, 0, str(totals))
    now_ms = totals.now_ms + since_ms
    return Summary(
        name,
        totals.capacity or None,
        totals.in_use,
        totals.waiting,
        now_ms - totals.held_since_ms if totals.held_since_ms else None,
        now_ms - totals.queued_since_ms if totals.queued_since_ms else None,
        totals.fence,
        totals.history,
        limit=None if totals.limit < 0 else totals.limit,
    )
