"""All resources under a prefix in numbers, found and read at little cost to the server: for lists and live views."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase

from . import clock
from .client import Redlease
from .limits import CAPACITY_MAX
from .models import Snapshot
from .protocol.encoding import Resource
from .tickets import Totals

# What who only looks declares as the capacity, and so finds as that of a resource that is unknown to the server.
UNDECLARED = CAPACITY_MAX
# How many holders of a resource are looked at for the longest hold, so that each costs the server little.
LOOKED_AT = 100
BATCH = 256  # resources that are asked for together, so that memory is bounded however many there are
SCAN_EVERY_MS = 10_000  # how often new names are looked for, at most
SCAN_SHARE = 100  # and how much longer than the last search the pause before the next one is: others may have many keys


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
    """

    resource: str
    capacity: int | None
    in_use: int
    waiting: int
    longest_hold_ms: int | None
    longest_wait_ms: int | None
    fence: int
    history: int


def is_known(snapshot: Snapshot) -> bool:
    """Returns True if the server has state of the resource; the snapshot was taken with `UNDECLARED`."""
    return snapshot.capacity != UNDECLARED or bool(snapshot.fence or snapshot.holders or snapshot.waiters)


def matches(name: str, pattern: str) -> bool:
    """Returns True if the name matches a glob as Redis has them: `*`, `?`, `[ab]`, `[^ab]`, and a backslash."""
    # fnmatch negates with "!", and has no backslash but for a set of one character.
    translated = re.sub(r"\\(.)", lambda found: f"[{found[1]}]", pattern).replace("[^", "[!")
    return fnmatchcase(name, translated)


class Overview:
    """The resources whose names match a pattern, to be looked at once or again and again.

    A look costs the server one short script a resource. New names are found by SCAN, which visits all keys of the
    database, and so only now and then: every ten seconds, less often if it takes more than a tenth of a second.

    Args:
        client: An entered client.
        pattern: A glob as Redis has them.

    Example:
        >>> overview = Overview(client, "gpu-*")  # doctest: +SKIP
        >>> [summary.resource for summary in await overview.look()]  # doctest: +SKIP
        ['gpu-1', 'gpu-2']
    """

    def __init__(self, client: Redlease, pattern: str = "*") -> None:
        self._client = client
        self._pattern = pattern
        self._known: dict[str, Resource] = {}
        self._scan_at_ms = 0.0

    async def look(self) -> list[Summary]:
        """Returns the resources as they are now, sorted by what needs attention: the longest wait, then the name.

        Raises:
            Unavailable: The server was not reached.
            RedleaseError: The server refused, SCAN for example.
        """
        if clock.now_ms() >= self._scan_at_ms:
            await self._find()
        resources, found = list(self._known.values()), []
        for at in range(0, len(resources), BATCH):
            batch = resources[at : at + BATCH]
            for resource, totals in zip(batch, await self._client.tickets.totals(batch, LOOKED_AT), strict=True):
                if totals.capacity or totals.fence:
                    found.append(_summary(resource.name, totals))
                else:
                    del self._known[resource.name]  # its state has expired
        return sorted(found, key=lambda each: (-(each.longest_wait_ms or 0), each.resource))

    async def _find(self) -> None:
        began_ms, tickets = clock.now_ms(), self._client.tickets
        async for name in tickets.names():
            if name not in self._known and matches(name, self._pattern):
                self._known[name] = tickets.resource(name)
        now_ms = clock.now_ms()
        self._scan_at_ms = now_ms + max(SCAN_EVERY_MS, SCAN_SHARE * (now_ms - began_ms))


def _summary(name: str, totals: Totals) -> Summary:
    now_ms, fence, capacity, in_use, waiting, held_since_ms, queued_since_ms, history = totals
    return Summary(
        name,
        capacity or None,
        in_use,
        waiting,
        now_ms - held_since_ms if held_since_ms else None,
        now_ms - queued_since_ms if queued_since_ms else None,
        fence,
        history,
    )
