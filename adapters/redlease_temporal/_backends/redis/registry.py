"""The registry in Redis: the records of all relays of a group, each for one ticket of a workflow run.

Relays form a group if each can serve the runs of the others: they have the same Temporal cluster and namespace, and
data converters that understand each other. Each record has one relay as its owner. When a relay's lease expires, other
relays take its records over; a record contains all that they need to continue.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar, NamedTuple, TypeVar

from temporalio.client import Client

from redlease._core.limits import Full, WhenFull
from redlease._core.operations import Operations, Resource, Script, read_lua
from redlease_temporal._common.run_monitor import cluster_of
from redlease_temporal._common.settings import Settings
from redlease_temporal._payloads.locks import Caller, OnClose, RateLimit, ResourceTerms

T = TypeVar("T")

FULL_LEASE_MS = 3000  # the lease of a relay that claims a record and is not in the registry
REGISTRY_TTL_MS = 14 * 24 * 3600 * 1000  # how long the registry is kept after the last beat of the last relay


@dataclass(frozen=True, slots=True)
class ReleaseNote:
    """A release that takes effect when the history of its run records it.

    Attributes:
        id: The local activity whose marker records it.
        event: The marker comes after this event.
        fence: The permit that is released; 0 for whatever the request has.
    """

    id: str
    event: int
    fence: int


@dataclass(slots=True)
class TicketRecord:
    """What a relay stores of one ticket and of the workflow run that it serves.

    Attributes:
        request: Distinguishes this request from other requests with its ticket: later ones, and those of a reset run.
        run_id: The run that is to have the permit.
        chain: The first run of its chain.
        event_id: The history up to this event does not record the grant.
        local_id: The local activity whose marker records the grant.
        wait_id: The remote activity whose completion records the grant.
        token: The task token that completes the waiting activity; empty while there is none.
        arrival: Its sequence number in the queue, used again if its entry expires; 0 if it was never queued.
        fence: The permit's fence; 0 while the request waits.
        recorded: Whether the run's history has the grant.
        admission: Whether it is the place of a workflow with `@concurrency`.
        canary: What a relay must be able to decode before it takes the record over; empty if any relay may.
        key: Whose turn its request takes, with `share` of the turns.
        full: What it does if it cannot be granted at once; a holder that it replaces has `grace_ms` to end.
        release: Its release; None while its run has not released it.
        caller: The run that has the permit, if it came through Nexus: `workflow_id` and `run_id` are then of the
            workflow that waits for it, and `run_id` is empty if none waits.
    """

    terms: ResourceTerms
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
    renewed: bool = True
    on_close: OnClose = "release"
    max_hold_ms: int | None = None
    token: str = ""
    arrival: int = 0
    fence: int = 0
    granted_at_ms: int = 0
    capacity: int = 0
    recorded: bool = False
    admission: bool = False
    canary: str = ""
    caller: Caller | None = None
    key: str = ""
    share: float = 1
    full: Full = "wait"
    grace_ms: int = 0
    release: ReleaseNote | None = None

    @property
    def id(self) -> str:
        """Identifies the record by resource, ticket and workflow: a reset run keeps it."""
        return digest(self.terms.resource, self.ticket, self.workflow_id)

    @property
    def when_full(self) -> WhenFull:
        """What its request does if it cannot be granted at once."""
        return WhenFull(self.full, self.grace_ms)

    def keep_note(self, of: TicketRecord) -> bool:
        """Takes over the note of a release from a record of the same request, or permit; returns whether it has."""
        note = of.release
        if note is None or (of.request != self.request and not 0 < note.fence == self.fence):
            return False
        self.release = note
        return True

    def text(self) -> str:
        """The record as JSON. The scripts find the field `release` in it."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def read(cls, text: bytes) -> TicketRecord:
        """Parses a stored record; ignores fields that a later release has added."""
        values = json.loads(text)
        terms = values["terms"]
        for name in ("rate", "per_key_rate"):
            terms[name] = _read(RateLimit, terms.get(name))
        values["terms"] = _read(ResourceTerms, terms)
        values["caller"] = _read(Caller, values.get("caller"))
        values["release"] = _read(ReleaseNote, values.get("release"))
        record = _read(cls, values)
        assert record is not None
        return record


def _read(kind: type[T], values: dict[str, Any] | None) -> T | None:
    if values is None:
        return None
    names = {each.name for each in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in values.items() if name in names})


def digest(*parts: str) -> str:
    """A short hash of the parts."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


async def relay_group(temporal: Client, settings: Settings) -> str:
    """The name of the group of relays that share their records: those of one Temporal cluster, namespace and setup.

    Raises:
        RPCError: The Temporal server did not say which cluster it is of.
    """
    return digest(await cluster_of(temporal), temporal.namespace, settings.group_of(temporal))


def _script(name: str, args: str, *parts: str) -> Script:
    return Script(name, args, "".join(read_lua(__package__, part) for part in (*parts, name)), keys=len(_Keys.PARTS))


class _Keys(Resource):
    """The keys of a group: the text of each record, the records of each relay, and the expiry of each relay's lease."""

    # The records' key keeps the name that earlier releases gave it: their relays share it.
    PARTS: ClassVar[tuple[bytes, ...]] = (b"watches", b"owners", b"relays")


HEARTBEAT = _script("beat", "relay lease_ms keep_ms channel generation skipped")
CLAIM = _script("claim", "relay record text lease_ms channel", "noted")
SAVE = _script("save", "relay record text generation", "noted")
DROP = _script("drop", "relay record channel chain")
INHERIT = _script("inherit", "relay from records")
LIST = _script("list", "relay after")
BROADCAST = _script("broadcast", "channel message")
ADD = _script("add", "relay record text channel")
SCRIPTS = (HEARTBEAT, CLAIM, SAVE, DROP, INHERIT, LIST, BROADCAST, ADD)


class HeartbeatReply(NamedTuple):
    """The reply to a beat.

    Attributes:
        fresh: Whether other relays may have taken over the records of this one.
        generation: Of the registry's data; it changes when Redis loses that data, and with it the records.
        next_expiry_ms: Until the next lease of another relay expires; -1 if there is none.
        expired: Relays whose lease has expired.
    """

    fresh: bool
    generation: str
    next_expiry_ms: int
    expired: list[str]


class Registry:
    """One relay's access to the registry. Calls wait for Redis without limit unless `limit_ms` is given."""

    def __init__(self, operations: Operations, prefix: str, group: str, relay: str) -> None:
        self.relay = relay
        self.channel = f"{prefix}:relays:{group}"
        self._operations = operations
        self.generation = ""  # of the data that contains this relay's records
        self._keys = _Keys(prefix, f"relays {group}")

    async def beat(
        self, lease_ms: int, skipped: Iterable[str] = (), *, limit_ms: float | None = None
    ) -> HeartbeatReply:
        """Renews this relay's lease; 0 ends it. The reply leaves out the expired relays in `skipped`."""
        candidate = secrets.token_hex(4)
        generation, fresh, next_expiry, *expired = await self._call(
            HEARTBEAT,
            self.relay,
            lease_ms,
            REGISTRY_TTL_MS,
            self.channel,
            candidate,
            " ".join(skipped),
            limit_ms=limit_ms,
        )
        self.generation = self.generation or generation.decode()
        return HeartbeatReply(bool(fresh), generation.decode(), next_expiry, [name.decode() for name in expired])

    async def claim(self, record: TicketRecord, *, limit_ms: float | None = None) -> TicketRecord:
        """Makes this relay the owner of a record; returns the stored record, an earlier one if there was one.

        If the record has the note of a release, and the stored one is about the same, that gets the note too.
        """
        values = await self._call(
            CLAIM, self.relay, record.id, record.text(), FULL_LEASE_MS, self.channel, limit_ms=limit_ms
        )
        return TicketRecord.read(values[0])

    async def add_unowned(self, record: TicketRecord) -> bool:
        """Stores a record for the relays to take over, unless it exists; for callers that are no relay."""
        return bool((await self._call(ADD, self.relay, record.id, record.text(), self.channel))[0])

    async def save(self, record: TicketRecord) -> bool:
        """Stores the record; returns False if this relay no longer owns it.

        The record gets the note of a release that the stored one has, if it is about the same. If Redis lost its data,
        nobody owns the record: this relay claims it again.
        """
        written, text = await self._call(SAVE, self.relay, record.id, record.text(), self.generation)
        if written < 0:
            record.keep_note(await self.claim(record))
        elif text:
            record.keep_note(TicketRecord.read(text))
        return bool(written)

    async def drop(self, record_id: str, *, any_owner: bool = False, chain: str = "*") -> TicketRecord | None:
        """Deletes a record of this relay, or anyone's, or only one of this chain of runs; returns the stored record."""
        relay = "" if any_owner else self.relay
        _, text = await self._call(DROP, relay, record_id, self.channel, chain)
        return TicketRecord.read(text) if text else None

    async def list_owned(self, relay: str = "") -> dict[str, bytes]:
        """The text of each record that this relay, or the given one, owns, by record id."""
        owned: dict[str, bytes] = {}
        more, after = 1, ""
        while more:
            more, *values = await self._call(LIST, relay or self.relay, after)
            page = {record_id.decode(): text for record_id, text in zip(values[::2], values[1::2], strict=True)}
            after = next(reversed(page), after)  # the script removes the entries that it leaves out of a page
            owned |= page
        return owned

    async def inherit(self, expired: str, record_ids: Iterable[str]) -> list[TicketRecord]:
        """Takes over those of the records that the expired relay still owns; at most a hundred."""
        return [
            TicketRecord.read(text) for text in await self._call(INHERIT, self.relay, expired, " ".join(record_ids))
        ]

    async def broadcast(self, message: str) -> None:
        """Publishes a message to all relays."""
        await self._call(BROADCAST, self.channel, message)

    async def _call(self, script: Script, *args: str | int, limit_ms: float | None = None) -> list[Any]:
        return await self._operations.run(self._keys, script, *args, limit_ms=limit_ms)
