"""What goes over the wire, and nothing that does I/O: key names, commands, replies, messages, error texts, limits.

Every operation is one Lua script, called by EVALSHA with the four keys of one resource. Its first argument is a tag
that the reply repeats, so that a reply which answers another call is noticed instead of believed.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from enum import IntEnum
from functools import lru_cache
from importlib import resources
from typing import Any, ClassVar, NamedTuple

from .errors import NotReplicated, RedleaseError
from .limits import (
    LEASE_MS_MIN,
    NAME_BYTES_MAX,
    OWNER_BYTES_MAX,
    Duration,
    checked_count,
    checked_text,
    milliseconds,
)
from .models import Permit, Snapshot, Waiter

SNAPSHOT_LIMIT = 1000
SERVER_VERSION_MIN = (6, 2)

RETRY_MS = 100.0  # after an error reply
RELOAD_MS = 5.0  # after one that says that the scripts are gone

TAGS = 1 << 16  # calls that may be outstanding on one connection before a tag comes round again


class Status(IntEnum):
    """How an acquire or a beat ended; the numbers are those of prelude.lua."""

    GRANTED = 1
    QUEUED = 2
    BUSY = 3
    FULL = 4
    MISFIT = 5
    OTHER_WEIGHT = 6
    WITHDRAWN = 7
    LAPSED = 8


class Script:
    """One operation: its text, its digest, and how many keys and arguments it takes.

    `hands_on`: what it gives back may go to somebody else, who is told by a message.
    """

    def __init__(self, name: str, args: str, text: str, keys: int = 4, *, hands_on: bool = False) -> None:
        self.name = name
        self.hands_on = hands_on
        self.args = ("tag", *args.split())
        self.text = text
        self.sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
        count = 3 + keys + len(self.args)
        self.head = b"*%d\r\n$7\r\nEVALSHA\r\n$40\r\n%b\r\n$1\r\n%d\r\n" % (count, self.sha.encode(), keys)


def read_lua(package: str, name: str) -> str:
    """The text of a file in the `lua` directory of a package."""
    return resources.files(package).joinpath("lua", f"{name}.lua").read_text(encoding="utf-8")


def _operation(name: str, args: str, *, hands_on: bool = False) -> Script:
    text = read_lua("redlease", "prelude") + read_lua("redlease", name)
    for part in ("state", "queue"):
        text = text.replace(f"--#include {part}\n", read_lua("redlease", part))
    return Script(name, args, text, hands_on=hands_on)


ACQUIRE = _operation(
    "acquire",
    "ticket request place arrival weight lease_ms capacity waiter_lease_ms max_waiters idle_ttl_ms label",
)
RELEASE = _operation("release", "ticket fence request tombstone_ms notify idle_ttl_ms", hands_on=True)
RENEW = _operation("renew", "ticket fence lease_ms shorten idle_ttl_ms")
ADOPT = _operation("adopt", "ticket fence request place lease_ms refence idle_ttl_ms label")
BEAT = _operation("beat", "place waiter_lease_ms ticket idle_ttl_ms")
RESIZE = _operation("resize", "capacity idle_ttl_ms")
INSPECT = _operation("inspect", "limit")
CHECK = _operation("check", "ticket fence")
WATCH = _operation("watch", "watch_ms")
PROBE = Script("probe", "channel", read_lua("redlease", "probe"))
SCRIPTS = (ACQUIRE, RELEASE, RENEW, ADOPT, BEAT, RESIZE, INSPECT, CHECK, WATCH)


def bulk(text: str) -> bytes:
    """An argument as a bulk string of the Redis protocol."""
    data = text.encode()
    return b"$%d\r\n%b\r\n" % (len(data), data)


def pack(*args: str | int) -> bytes:
    """Arguments as bulk strings, one after the other."""
    return b"".join([bulk(str(arg)) for arg in args])


def plain(*args: str) -> bytes:
    """A command that is no script and carries no tag."""
    return b"*%d\r\n%b" % (len(args), pack(*args))


def escape(name: str) -> str:
    """The name without braces, so that the hash tag around it is the only one in the key."""
    if "%" in name or "{" in name or "}" in name:
        return name.replace("%", "%25").replace("{", "%7B").replace("}", "%7D")
    return name


class Resource:
    """A contended name, as its keys.

    Attributes:
        name: As the user gave it.
        state_key: The first of the keys.
        packed_keys: All of them, in the order in which every call declares them.
    """

    __slots__ = ("name", "packed_keys", "state_key")

    PARTS: ClassVar[tuple[bytes, ...]] = (b"state", b"holders", b"queue", b"waiters")

    def __init__(self, prefix: str, name: str) -> None:
        checked_text("resource name", name, NAME_BYTES_MAX)
        base = f"{prefix}:{{{escape(name)}}}:".encode()
        size = len(base)
        self.name = name
        self.state_key = base + self.PARTS[0]
        self.packed_keys = b"".join([b"$%d\r\n%b%b\r\n" % (size + len(part), base, part) for part in self.PARTS])

    @property
    def keys(self) -> list[str]:
        """Its keys, in the order in which every call declares them."""
        base = self.state_key.removesuffix(self.PARTS[0])
        return [(base + part).decode() for part in self.PARTS]

    @property
    def watch_channel(self) -> str:
        """The channel that changes are published to while somebody watches."""
        return self.state_key.decode() + ":watch"


class Terms(NamedTuple):
    """What a primitive says with each acquire."""

    owner: str
    lease_ms: int = 30_000
    capacity: int = 1
    waiter_lease_ms: int = 10_000
    max_waiters: int | None = None
    idle_ttl_ms: int = 86_400_000


class Ask(NamedTuple):
    """One acquire request, from its first call until its permit is given back.

    `request` tells the copies of one request from a later request with the same ticket. `arrival` is the sequence that
    the request once had in the queue and takes again, should it have to queue anew; 0: it comes last. `packed_terms` is
    what `pack_terms` made of its other parameters; empty where it is never sent.
    """

    resource: Resource
    terms: Terms
    ticket: str
    request: str
    weight: int = 1
    packed_terms: bytes = b""
    arrival: int = 0


def label(owner: str, metadata: dict[str, str]) -> str:
    """Owner and metadata as they stand in a record."""
    return json.dumps([owner, metadata], separators=(",", ":"), ensure_ascii=False) if metadata else _plain_label(owner)


@lru_cache(maxsize=64)
def _plain_label(owner: str) -> str:
    return json.dumps([owner, {}], separators=(",", ":"), ensure_ascii=False)


def acquire_tail(ask: Ask, place: str) -> bytes:
    """The arguments of an acquire from that place."""
    request = bulk(ask.request)
    ticket = request if ask.ticket is ask.request else bulk(ask.ticket)
    return b"%b%b%b%b" % (ticket, request, _place_and_arrival(place, ask.arrival), ask.packed_terms)


@lru_cache(maxsize=256)
def _place_and_arrival(place: str, arrival: int) -> bytes:
    return pack(place, arrival)


@lru_cache(maxsize=256)
def pack_terms(terms: Terms, weight: int, written: str, *, queue: bool = True) -> bytes:
    """The arguments that many acquires have in common; `queue`: it may wait for its grant."""
    waiter_lease_ms = terms.waiter_lease_ms if queue else 0
    most = -1 if terms.max_waiters is None else terms.max_waiters
    return pack(weight, terms.lease_ms, terms.capacity, waiter_lease_ms, most, terms.idle_ttl_ms, written)


def release_tail(ask: Ask, fence: int | None, tombstone_ms: int) -> bytes:
    """The arguments of a release by the client that has the ticket; no fence: whatever its request has."""
    request = bulk(ask.request)
    ticket = request if ask.ticket is ask.request else bulk(ask.ticket)
    digits = b"" if fence is None else b"%d" % fence
    return b"%b$%d\r\n%b\r\n%b%b" % (
        ticket,
        len(digits),
        digits,
        request,
        _release_tail(tombstone_ms, ask.terms.idle_ttl_ms),
    )


@lru_cache(maxsize=256)
def _release_tail(tombstone_ms: int, idle_ttl_ms: int) -> bytes:
    return pack(tombstone_ms, 0, idle_ttl_ms)


class Granted(NamedTuple):
    """A permit as the server tells it; times in ms of its clock."""

    fence: int
    granted_at_ms: int
    expires_at_ms: int
    capacity: int
    was_declared: int = 0


class Queued(NamedTuple):
    """A place: the order of arrival, how many are ahead, and in how many ms something can lapse (-1: nothing can)."""

    sequence: int
    ahead: int
    soonest_ms: int
    capacity: int
    was_declared: int
    more: int


class Beaten(NamedTuple):
    """What a beat found: how the first waiter stands."""

    ahead: int
    soonest_ms: int
    capacity: int
    more: int


class Message(NamedTuple):
    """What a client's channel carries.

    About a request: "g" granted, "x" taken out, "m" too heavy now, "r" its lease was made to end earlier. About a
    resource, named by its state key: "c" a smaller capacity, "l" a lease that will end sooner than was told.
    """

    kind: str
    about: str
    numbers: tuple[int, ...]


def read_message(payload: bytes) -> Message:
    """The message in a payload; raises ValueError for what no script of this library writes."""
    kind, about, *numbers = payload.decode().split(" ")
    if kind in "cl":  # the key comes last, as a name may have spaces
        return Message(kind, " ".join(numbers), (int(about),))
    return Message(kind, about, tuple(map(int, numbers)))


def read_record(text: bytes) -> tuple[list[str], str, dict[str, str]]:
    """A record as its six numbers and names, the owner and the metadata."""
    *fields, written = text.decode().split(" ", 6)
    owner, metadata = json.loads(written)
    return fields, owner, metadata


def read_snapshot(resource: str, declared: int, reply: list[Any]) -> Snapshot:
    """The reply of inspect without its tag. `declared` stands in for the capacity of a resource that has no state."""
    now, fence, capacity, _, _, held, queued = reply
    holders = tuple(sorted(_read_holders(resource, capacity, held), key=lambda permit: permit.fence))
    return Snapshot(resource, capacity or declared, holders, tuple(_read_waiters(queued)), fence, now)


def _read_holders(resource: str, capacity: int, held: list[Any]) -> Iterator[Permit]:
    for ticket, deadline, text in zip(held[::3], held[1::3], held[2::3], strict=True):
        (weight, fence, lease, since, _, _), owner, metadata = read_record(text)
        yield Permit(
            *(resource, ticket.decode(), int(fence), int(weight), capacity, int(lease), int(since)),
            *(deadline, owner, metadata),
        )


def _read_waiters(queued: list[Any]) -> Iterator[Waiter]:
    for ticket, text in zip(queued[::2], queued[1::2], strict=True):
        (weight, _, _, since, _, _), owner, metadata = read_record(text)
        yield Waiter(ticket.decode(), int(weight), owner, metadata, int(since))


# What the user may pass


def changed_terms(
    terms: Terms,
    *,
    owner: str | None = None,
    lease: Duration | None = None,
    capacity: int | None = None,
    waiter_lease: Duration | None = None,
    max_waiters: int | None = None,
    idle_ttl: Duration | None = None,
) -> Terms:
    """The terms with those of the parameters that are given, checked."""
    changes: dict[str, Any] = {}
    if owner is not None:
        changes["owner"] = checked_text("owner", owner, OWNER_BYTES_MAX)
    if lease is not None:
        changes["lease_ms"] = milliseconds("lease", lease, LEASE_MS_MIN)
    if capacity is not None:
        changes["capacity"] = checked_count("capacity", capacity)
    if waiter_lease is not None:
        changes["waiter_lease_ms"] = milliseconds("waiter_lease", waiter_lease, LEASE_MS_MIN)
    if max_waiters is not None:
        changes["max_waiters"] = checked_count("max_waiters", max_waiters, 0)
    if idle_ttl is not None:
        changes["idle_ttl_ms"] = milliseconds("idle_ttl", idle_ttl, 1)
    return terms._replace(**changes) if changes else terms


# What the server answers instead of a reply

_CODES = re.compile(
    r"\b(OOM|WRONGTYPE|READONLY|NOPERM|NOREPLICAS|MISCONF|LOADING|BUSY|TRYAGAIN|CLUSTERDOWN|MASTERDOWN|NOSCRIPT|NOAUTH"
    r"|WRONGPASS|MOVED|ASK|CROSSSLOT|ACL failure|can't run this command|can't access at least one of the)\b"
)
_AGAIN = frozenset({"LOADING", "BUSY", "TRYAGAIN", "CLUSTERDOWN", "MASTERDOWN", "NOSCRIPT"})
_ELSEWHERE = frozenset({"READONLY", "NOAUTH"})
_NOT_ALLOWED = frozenset({"NOPERM", "ACL failure", "can't run this command", "can't access at least one of the"})


class Fault:
    """An error reply, read: what it is called and what follows from it."""

    def __init__(self, text: str) -> None:
        found = _CODES.search(text)
        self.text = text
        self.code = found[1] if found else text.split(" ", 1)[0]

    @property
    def passes(self) -> bool:
        """Whether the same call may succeed a little later on the same connection; it was not carried out."""
        return self.code in _AGAIN

    @property
    def forgot_scripts(self) -> bool:
        """Whether the scripts have to be loaded again."""
        return self.code == "NOSCRIPT"

    @property
    def is_half_done(self) -> bool:
        """Whether the script ended in the middle: it would have made a key while its slot moves to another node."""
        return "non local key" in self.text

    @property
    def is_seen_to(self) -> bool:
        """Whether what it tells of is being set right already, so that there is nothing to say about it."""
        return self.forgot_scripts

    @property
    def retry_ms(self) -> float:
        """How long to wait before the same call; scripts are being loaded already when one hears that they are gone."""
        return RELOAD_MS if self.is_seen_to else RETRY_MS

    @property
    def needs_new_connection(self) -> bool:
        """Whether a fresh connection sets it right: the server's role is looked at on connect."""
        return self.code in _ELSEWHERE

    @property
    def not_allowed(self) -> bool:
        """Whether the user lacks a right."""
        return self.code in _NOT_ALLOWED

    def error(self, resource: str | None = None, ticket: str | None = None) -> RedleaseError:
        """The error to raise, with what to do next."""
        where = f"resource {resource!r}: " if resource is not None else ""
        kind = NotReplicated if self.code == "NOREPLICAS" else RedleaseError
        return kind(f"{where}{self._advice()} (server: {self.text})", resource=resource, ticket=ticket)

    def _advice(self) -> str:
        if self.not_allowed:
            return "the Redis user lacks a right; nothing was changed. Grant it redlease's commands, keys and channels"
        return _ADVICE.get(self.code, "the server refused the call; nothing was changed")


_ADVICE = {
    "OOM": "the server is out of memory and takes no new request; nothing was changed, and renewals and releases "
    "go on. Free memory or raise `maxmemory`",
    "WRONGTYPE": "one of its keys holds something that redlease did not write; nothing was changed. "
    "Delete that key or choose another `prefix`",
    "NOREPLICAS": "the server has fewer replicas than `min-replicas-to-write` asks for; nothing was changed. "
    "Try again when the replicas are back",
    "MISCONF": "the server cannot save to disk and refuses writes; nothing was changed. Mend its persistence",
    "WRONGPASS": "the server refused the user name or password. Put the right ones into the URL",
    "NOAUTH": "the server wants a user name and password. Put them into the URL",
    "MOVED": "the server is part of a cluster. Connect to it as a cluster",
    "CROSSSLOT": "the server is part of a cluster. Connect to it as a cluster",
}


def info_value(info: str, name: str) -> str:
    """One value out of the text of INFO, empty when it is not there."""
    found = re.search(rf"^{name}:(.*)$", info, re.MULTILINE)
    return found[1].strip() if found else ""


def hash_tag(key: bytes) -> bytes:
    """What stands between the braces of a key: all keys that have it in common are in one slot."""
    return key[key.index(b"{") + 1 : key.index(b"}")]


class ServerInfo(NamedTuple):
    """What a server says of itself in HELLO."""

    version: str
    role: str

    @property
    def has_sharded_channels(self) -> bool:
        """Whether it knows SSUBSCRIBE: Redis from 7.0 on, and every Valkey. Taken for granted where it does not say."""
        return not self.version or int(self.version.split(".", 1)[0]) >= 7

    @property
    def too_old(self) -> bool:
        """Whether it is older than 6.2."""
        numbers = re.findall(r"\d+", self.version)[:2]
        return tuple(map(int, numbers)) < SERVER_VERSION_MIN
