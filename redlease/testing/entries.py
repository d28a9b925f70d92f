"""What the model of the protocol keeps of a ticket: who relies on it, and until when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass
class Entry:
    """A ticket that is held or queued.

    Attributes:
        claims: The place and the request id of each request that uses the ticket, the newest first.
        fence: 0 while it is queued.
        deadline: When the lease ends, in ms; 0 while it is queued.
        since: When it was granted or queued, in ms.
        arrival: Its sequence, or that which it had before; what orders the queue.
        key: Whose turn it takes; empty for none.
        share: How large a share of the turns its key gets.
        number: The order in which its key came, while it waits with a key.
        tag: The virtual time at which its turn is over, if it is the first of its key.
        is_replaced: Whether a newer request has replaced this permit: it can only be released.
    """

    ticket: str
    weight: int
    lease: int
    claims: list[tuple[str, str]]
    since: int
    arrival: int = 0
    fence: int = 0
    deadline: int = 0
    key: str = ""
    share: float = 1
    number: int = 0
    tag: int | None = None
    is_replaced: bool = False

    @property
    def is_shared(self) -> bool:
        """Whether several requests rely on the ticket, so that none of them makes its lease end earlier."""
        return len(self.claims) > 1

    @property
    def arrived(self) -> tuple[int, str]:
        """What orders the requests of one key."""
        return self.arrival, self.ticket

    @property
    def position(self) -> tuple[int, int, int, str]:
        """What orders the queue: those without a key, the first of each key by its turn, the rest key by key."""
        if not self.key:
            return 0, 0, *self.arrived
        return (2, self.number, *self.arrived) if self.tag is None else (1, self.tag, *self.arrived)

    def names(self, request_id: str) -> bool:
        """Tell whether that request is one of those that use the ticket."""
        return any(other == request_id for _, other in self.claims)

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
    key: str = ""

    @property
    def name(self) -> bytes:
        """What stands for it among the holders."""
        return b"\xff%d %b" % (self.ended, self.ticket.encode())


@dataclass
class Limit:
    """How many units may be held until then; all times in ms.

    Attributes:
        name: What stands for it among the holders.
        units: How many.
        until: When it ends.
        since: When it was set.
        kind: "limit", "pause", "back", "each" or "rate"; "tat" for what keeps a number only.
        key: Of which; empty for each, and for the whole resource.
        tat: By which µs all tokens of its key are there again.
    """

    name: bytes
    units: int
    until: int
    since: int
    kind: str
    key: str = ""
    tat: int = 0

    @property
    def of_keys(self) -> bool:
        """Whether it is of one key, or of each."""
        return bool(self.key) or self.kind == "each"

    @property
    def score(self) -> int:
        """What orders it among the holders: those of keys come last."""
        return self.until + 2**52 * self.of_keys

    def kept(self, capacity: int) -> int:
        """Return how many units of a capacity it keeps from everybody, as a permit for them would."""
        return 0 if self.of_keys else max(0, capacity - self.units)

    @classmethod
    def named(cls, kind: str, key: str) -> bytes:
        """Return the name of a limit."""
        return b"\xff" + (f"{kind} {key}" if key else kind).encode()


class Asked(NamedTuple):
    """What the argument `weight` of an acquire says; None leaves a setting of the resource as it is."""

    weight: int
    priority: int
    lock_delay: int | None
    per_key: int | None
    share: float
    rate: tuple[int, ...] | None
    key_rate: tuple[int, ...] | None


def read_asked(asked: int | str, *, declares: bool) -> Asked:
    """Parse the argument `weight`."""
    weight, priority, delay, _, per_key, share, *rates = (str(asked).split(" ") + 8 * [""])[:8]
    lock_delay, limit = (int(text) if text else None for text in (delay, per_key))
    rate, key_rate = (tuple(map(int, text.split(":"))) if ":" in text else () if text else None for text in rates)
    settings = (lock_delay, limit, rate, key_rate) if declares else (None, None, None, None)
    return Asked(int(weight), int(priority or 0), *settings[:2], float(share or 1), *settings[2:])


def is_late(entry: Entry, request_id: str, place: str) -> bool:
    """Tell whether the client of a request has sent it from a newer place since."""
    channel, epoch = split(place)
    newer = ((split(other), its) for other, its in entry.claims)
    return any(its == request_id and other[0] == channel and other[1] > epoch for other, its in newer)


def split(place: str) -> tuple[str, int]:
    """Return the channel and the epoch of a place."""
    channel, _, epoch = place.partition("|")
    return channel, int(epoch or 0)


def claimed_by_waiter(claims: list[tuple[str, str]], request_id: str, place: str) -> list[tuple[str, str]]:
    """Return who uses a queued ticket after a request: a client waits once with it."""
    channel = split(place)[0]
    return [(place, request_id), *((o, its) for o, its in claims if its != request_id and split(o)[0] != channel)]


def claimed(claims: list[tuple[str, str]], request_id: str, place: str) -> list[tuple[str, str]]:
    """Return who uses a permit after a request: of its own client this one, and the oldest of those before it."""
    others = [claim for claim in claims if claim[1] != request_id]
    own = [claim for claim in others if split(claim[0])[0] == split(place)[0]]
    return [(place, request_id), *(claim for claim in others if claim not in own), *own[-1:]]
