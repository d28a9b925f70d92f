"""The watches of all relays of a group, kept in Redis: who waits or holds on behalf of which workflow run.

A group is what one relay can serve for another: one Temporal cluster and namespace, and data converters that
understand each other. Each watch belongs to one relay; a relay that stops saying that it lives loses its watches to
the others. What is written of a watch is all that another relay needs to go on with it.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar, NamedTuple

from redlease import wire
from redlease.route import Route

from .calls import OnClose, Terms

CLAIM_MS = 3000  # how long a relay is taken to live that the registry does not know
KEEP_MS = 14 * 24 * 3600 * 1000  # how long the registry outlives the last beat of the last relay


@dataclass(slots=True)
class Watch:
    """What a relay knows of one ticket, and of the workflow run that it is for.

    Attributes:
        request: Tells the copies of one request from others with its ticket: later ones, and those of a reset run.
        run_id: The run that is to have the permit.
        chain: The first run of its chain.
        event_id: The history up to here does not record the grant.
        local_id: The local activity whose marker does, or
        wait_id: the remote one whose completion does.
        token: The task token by which the waiting activity is completed; empty when there is none (yet).
        arrival: Its sequence in the queue, which it has again after its place lapsed; 0 when it never queued.
        fence: Of the permit; 0 while it waits.
        recorded: Whether the run's history has the grant.
        admission: Whether it is the place of a workflow whose number is limited.
    """

    terms: Terms
    ticket: str
    request: str
    workflow_id: str
    run_id: str
    chain: str
    event_id: int
    local_id: str
    wait_id: str
    label: str
    owner: str
    weight: int = 1
    metadata: dict[str, str] = field(default_factory=dict)
    keep: bool = True
    on_close: OnClose = "release"
    max_hold_ms: int | None = None
    token: str = ""
    arrival: int = 0
    fence: int = 0
    granted_at_ms: int = 0
    capacity: int = 0
    recorded: bool = False
    admission: bool = False

    @property
    def id(self) -> str:
        """Names the watch; a run that was reset has the same one, another workflow with the ticket its own."""
        return digest(self.terms.resource, self.ticket, self.workflow_id)

    def text(self) -> str:
        """The watch as it is written."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def read(cls, text: bytes) -> Watch:
        """The watch that was written; fields that a later release has added are left out."""
        values = json.loads(text)
        values["terms"] = Terms(**_known(Terms, values["terms"]))
        return cls(**_known(cls, values))


def _known(kind: type, values: dict[str, Any]) -> dict[str, Any]:
    names = {each.name for each in fields(kind)}
    return {name: value for name, value in values.items() if name in names}


def digest(*parts: str) -> str:
    """A short name for what these say together."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _script(name: str, args: str) -> wire.Script:
    return wire.Script(name, args, wire.read_lua("redlease_temporal", name), keys=len(_Keys.PARTS))


class _Keys(wire.Resource):
    """The keys of a group: what is written of each watch, whose it is, and until when each relay is taken to live."""

    PARTS: ClassVar[tuple[bytes, ...]] = (b"watches", b"owners", b"relays")


BEAT = _script("beat", "relay lease_ms keep_ms channel generation")
CLAIM = _script("claim", "relay watch text lease_ms channel")
PUT = _script("put", "relay watch text generation")
DROP = _script("drop", "relay watch channel chain")
INHERIT = _script("inherit", "relay from")
OWN = _script("own", "relay after")
SAY = _script("say", "channel message")
LAY = _script("lay", "relay watch text channel")
SCRIPTS = (BEAT, CLAIM, PUT, DROP, INHERIT, OWN, SAY, LAY)


class Beat(NamedTuple):
    """What a beat heard: whether its watches may have gone to others, and whether the registry has lost its data."""

    fresh: bool
    emptied: bool
    soonest_ms: int
    lapsed: list[str]


class Registry:
    """The registry as one relay sees it. Calls wait for Redis as long as it takes, unless `limit_ms` is given."""

    def __init__(self, connection: Route, prefix: str, group: str, relay: str) -> None:
        self.relay = relay
        self.channel = f"{prefix}:relays:{group}"
        self._connection = connection
        self._generation = ""
        self._keys = _Keys(prefix, f"relays {group}")

    async def beat(self, lease_ms: int, *, limit_ms: float | None = None) -> Beat:
        """Says that this relay lives, for so long; 0: that it leaves."""
        candidate = secrets.token_hex(4)
        generation, fresh, soonest, *lapsed = await self._call(
            BEAT, self.relay, lease_ms, KEEP_MS, self.channel, candidate, limit_ms=limit_ms
        )
        emptied = self._generation not in {"", generation.decode()}
        self._generation = generation.decode()
        return Beat(bool(fresh), emptied, soonest, [name.decode() for name in lapsed])

    async def claim(self, watch: Watch, *, limit_ms: float | None = None) -> Watch:
        """Makes a watch this relay's; as it was written before, if it was."""
        values = await self._call(CLAIM, self.relay, watch.id, watch.text(), CLAIM_MS, self.channel, limit_ms=limit_ms)
        return Watch.read(values[0])

    async def lay(self, watch: Watch) -> bool:
        """Leaves a watch to the relays, should none have it; for somebody who is none himself."""
        return bool((await self._call(LAY, self.relay, watch.id, watch.text(), self.channel))[0])

    async def put(self, watch: Watch) -> bool:
        """Writes down how a watch stands; False when it is no longer this relay's.

        Where Redis has lost its data nobody has it: it is written anew.
        """
        written = (await self._call(PUT, self.relay, watch.id, watch.text(), self._generation))[0]
        if written < 0:
            await self.claim(watch)
        return bool(written)

    async def drop(self, watch_id: str, *, anyones: bool = False, chain: str = "*") -> Watch | None:
        """Ends a watch, if given only that for this chain of runs; what was written of it."""
        relay = "" if anyones else self.relay
        _, text = await self._call(DROP, relay, watch_id, self.channel, chain)
        return Watch.read(text) if text else None

    async def own(self) -> dict[str, bytes]:
        """What is written of each watch that is this relay's, by its id."""
        own: dict[str, bytes] = {}
        more, after = 1, ""
        while more:
            more, *values = await self._call(OWN, self.relay, after)
            page = {watch_id.decode(): text for watch_id, text in zip(values[::2], values[1::2], strict=True)}
            after = next(reversed(page), after)  # what a page leaves out for being another's is gone from the next
            own |= page
        return own

    async def inherit(self, lapsed: str) -> tuple[bool, Iterator[Watch]]:
        """Takes over some watches of a relay that has lapsed, and whether there are more."""
        more, *values = await self._call(INHERIT, self.relay, lapsed)
        return bool(more), map(Watch.read, values[1::2])

    async def say(self, message: str) -> None:
        """Tells all relays something."""
        await self._call(SAY, self.channel, message)

    async def _call(self, script: wire.Script, *args: str | int, limit_ms: float | None = None) -> list[Any]:
        answer = await self._connection.call(self._keys, script, *args, limit_ms=limit_ms)
        return answer.values
