"""What the model of the protocol keeps of a ticket: who relies on it, and until when."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Entry:
    """A ticket that is held or queued.

    Attributes:
        claims: The place and the request id of each request that uses the ticket, the newest first.
        fence: 0 while it is queued.
        deadline: When the lease ends, in ms; 0 while it is queued.
        since: When it was granted or queued, in ms.
        arrival: Its sequence, or that which it had before; what orders the queue.
    """

    ticket: str
    weight: int
    lease: int
    claims: list[tuple[str, str]]
    since: int
    arrival: int = 0
    fence: int = 0
    deadline: int = 0

    @property
    def is_shared(self) -> bool:
        """Whether several requests rely on the ticket, so that none of them makes its lease end earlier."""
        return len(self.claims) > 1

    @property
    def position(self) -> tuple[float, str]:
        """What orders the queue."""
        return self.arrival, self.ticket

    def names(self, request: str) -> bool:
        """Tell whether that request is one of those that use the ticket."""
        return any(other == request for _, other in self.claims)

    def deadline_from(self, now: int, lease: int) -> int:
        """Return when a renewed lease ends."""
        return max(self.deadline, now + lease) if self.is_shared else now + lease


@dataclass
class Delay:
    """Units of an expired permit that stay in use until the lock delay is over; all times in ms."""

    ticket: str
    weight: int
    ended: int
    until: int
    since: int

    @property
    def name(self) -> bytes:
        """What stands for it among the holders."""
        return b"\xff%d %b" % (self.ended, self.ticket.encode())


def read_asked(asked: int | str) -> tuple[int, int, int | None]:
    """Return weight, priority and lock delay."""
    weight, priority, delay = f"{asked} 0 ".split(" ")[:3]
    return int(weight), int(priority), int(delay) if delay else None


def is_late(entry: Entry, request: str, place: str) -> bool:
    """Tell whether the client of a request has sent it from a newer place since."""
    channel, epoch = split(place)
    newer = ((split(other), its) for other, its in entry.claims)
    return any(its == request and other[0] == channel and other[1] > epoch for other, its in newer)


def split(place: str) -> tuple[str, int]:
    """Return the channel and the epoch of a place."""
    channel, _, epoch = place.partition("|")
    return channel, int(epoch or 0)


def claimed_by_waiter(claims: list[tuple[str, str]], request: str, place: str) -> list[tuple[str, str]]:
    """Return who uses a queued ticket after a request: a client waits once with it."""
    channel = split(place)[0]
    return [(place, request), *((o, its) for o, its in claims if its != request and split(o)[0] != channel)]


def claimed(claims: list[tuple[str, str]], request: str, place: str) -> list[tuple[str, str]]:
    """Return who uses a permit after a request: of its own client this one, and the oldest of those before it."""
    others = [claim for claim in claims if claim[1] != request]
    own = [claim for claim in others if split(claim[0])[0] == split(place)[0]]
    return [(place, request), *(claim for claim in others if claim not in own), *own[-1:]]
