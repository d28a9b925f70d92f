"""What the server sends: replies of the scripts, messages on the client's channel, and server information."""

from __future__ import annotations

import re
from enum import IntEnum
from typing import Any, NamedTuple

from redlease._core.limits import FENCE_MAX, NAME_BYTES_MAX, PREFIX_BYTES_MAX
from redlease.errors import RedleaseError

# The longest names a state key, with the longest prefix and name, in which each brace takes three bytes.
MESSAGE_BYTES_MAX = 100 + PREFIX_BYTES_MAX + 3 * NAME_BYTES_MAX
SERVER_VERSION_MIN = (6, 2)


class Status(IntEnum):
    """The outcome of an acquire or a beat; the numbers are those of prelude.lua."""

    GRANTED = 1
    QUEUED = 2
    BUSY = 3
    FULL = 4
    MISFIT = 5
    OTHER_WEIGHT = 6
    WITHDRAWN = 7
    LAPSED = 8


class Granted(NamedTuple):
    """A granted permit; times are ms of the server's clock. `more`: the call stopped at its batch limit."""

    fence: int
    granted_at_ms: int
    expires_at_ms: int
    capacity: int
    was_declared: int = 0
    more: int = 0


class Queued(NamedTuple):
    """A queued request.

    `sequence`: its order of arrival; `ahead`: requests before it; `next_expiry_ms`: ms until a lease that blocks the
    queue can expire (-1: none can); `more`: the call stopped at its batch limit; `now_ms`: the server's clock.
    """

    sequence: int
    ahead: int
    next_expiry_ms: int
    capacity: int
    was_declared: int
    more: int
    now_ms: int


class HeartbeatReply(NamedTuple):
    """The reply to a heartbeat, about the first waiter of the client; fields as in `Queued`."""

    ahead: int
    next_expiry_ms: int
    capacity: int
    more: int


class Totals(NamedTuple):
    """A resource in numbers. Times are ms of the server's clock, 0 if nobody holds or waits; `capacity`: 0 if unknown.

    `history`: how many entries of history the server keeps of it, 0 for none; `limit`: how many units a limit allows
    to be held, -1 if none is set.
    """

    now_ms: int
    fence: int
    capacity: int
    in_use: int
    waiting: int
    held_since_ms: int
    queued_since_ms: int
    history: int
    limit: int

    @property
    def is_known(self) -> bool:
        """Whether the server keeps anything of the resource, be it without its state."""
        return any((self.capacity, self.fence, self.in_use, self.waiting))


class Freed(NamedTuple):
    """Whether the ticket was held or queued until now, and whether the call stopped at its batch limit."""

    released: bool
    more: bool


class Occupancy(NamedTuple):
    """A resource in numbers.

    `capacity`: 0 where nobody has used it yet; `in_use`: the weights of all holders; `waiting`: 0 where nobody waits,
    else an upper bound; `limit`: how many units the limits allow to be held, None if none is set.
    """

    capacity: int
    in_use: int
    waiting: int
    limit: int | None


class LimitSet(NamedTuple):
    """When the limit ends, or would have ended; 0 if there is none. And whether there is more to do."""

    until_ms: int
    more: int


class Resized(NamedTuple):
    """Whether there is more to do. `refused_for`: the capacity that a lock or a read-write lock declares, else 0."""

    more: int
    refused_for: int = 0


def read_totals(resource: str, values: list[Any]) -> Totals | RedleaseError:
    """Returns the numbers, or the error of a resource whose state has none: redlease did not write it."""
    if len(values) == len(Totals._fields) and all(type(value) is int for value in values):
        return Totals(*values)
    why = "its state holds something that redlease did not write. Delete its keys or choose another `prefix`"
    return RedleaseError(f"resource {resource!r}: {why}", resource=resource)


class Message(NamedTuple):
    """A message on a client's channel.

    About a request: "g" granted, "x" removed, "m" its weight exceeds the capacity, "r" its lease was shortened, "l"
    what it waits for ends earlier than its client knows, "s" the request with the ticket `by` has replaced it. About a
    resource, named by its state key: "c" a smaller capacity.
    """

    kind: str
    about: str
    numbers: tuple[int, ...]
    by: str = ""


NUMBERS = {"g": 4, "m": 1, "x": 0, "r": 0, "c": 1, "l": 1, "s": 0}  # how many numbers each kind of message has


def read_message(payload: bytes) -> Message:
    """Parses a payload; raises ValueError if no script of this library can have written it."""
    if len(payload) > MESSAGE_BYTES_MAX:
        raise ValueError(f"a message of {len(payload)} bytes is not a redlease message")
    kind, about, *rest = payload.decode().split(" ")
    by = ""
    if kind == "c":  # the key comes last, because it may contain spaces
        about, rest = " ".join(rest), [about]
    elif kind == "s":  # and so does the ticket
        by, rest = " ".join(rest), []
    numbers = tuple(map(int, rest))
    in_bounds = not numbers or 0 <= min(numbers) <= max(numbers) <= FENCE_MAX
    if not about or (kind == "s" and not by) or NUMBERS.get(kind) != len(numbers) or not in_bounds:
        raise ValueError(f"{payload[:80]!r} is no message of redlease")
    return Message(kind, about, numbers, by)


def info_value(info: str, name: str) -> str:
    """Returns one value from the text of INFO; empty if it is not there."""
    found = re.search(rf"^{name}:(.*)$", info, re.MULTILINE)
    return found[1].strip() if found else ""


class ServerInfo(NamedTuple):
    """Version and role of a server, as HELLO reports them."""

    version: str
    role: str

    @property
    def has_sharded_channels(self) -> bool:
        """Whether the server has SSUBSCRIBE: Redis 7.0 or newer, or Valkey. Assumed if the version is unknown."""
        first = re.match(r"[0-9]+", self.version)
        return first is None or int(first[0]) >= 7

    @property
    def too_old(self) -> bool:
        """Whether the server is older than 6.2."""
        numbers = re.findall(r"\d+", self.version)[:2]
        return tuple(map(int, numbers)) < SERVER_VERSION_MIN
