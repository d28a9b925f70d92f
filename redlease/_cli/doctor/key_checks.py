"""Checks of what redlease keeps on the servers: the keys under the prefix, and the permits."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from redlease import Permit, Redlease, RedleaseError, Snapshot, Unavailable
from redlease._cli.plain import span
from redlease._core.operations import Operations
from redlease._core.primitives.overview import UNDECLARED
from redlease._core.protocol.encoding import keys_pattern
from redlease._core.transport.masters import Master

from .findings import Finding, Level

# However much there is, so much is looked at.
KEYS_MOST = 10_000  # on each master
RESOURCES_MOST = 1000
HOLDERS_MOST = 100  # of each resource, those whose leases end first
NAMED = 5


async def check_keys(masters: list[Master], prefix: str) -> Finding:
    """Looks for keys that would stay forever: redlease gives every key a time to live."""
    looked_at, lasting, is_all = 0, list[str](), True
    for master in masters:
        looked_at_here = 0
        async with aclosing(master.scan(keys_pattern(prefix))) as batches:
            async for keys in batches:
                lives_ms = await master.ask_all([("PTTL", key) for key in keys]) if keys else []
                lasting += [key.decode(errors="replace") for key, ms in zip(keys, lives_ms, strict=True) if ms == -1]
                looked_at_here += len(keys)
                if looked_at_here >= KEYS_MOST:
                    is_all = False
                    break
        looked_at += looked_at_here
    looked = f"{looked_at} under the prefix {prefix!r}" if is_all else f"the first {looked_at} looked at"
    if not lasting:
        return Finding("keys", Level.OK, f"{looked}, none without a time to live")
    return Finding(
        "keys",
        Level.WARNING,
        f"{looked}, {len(lasting)} without a time to live: {_named(lasting)}",
        "redlease always sets a time to live: find what wrote these keys, and give it another prefix",
    )


async def check_resources(client: Redlease) -> list[Finding]:
    """Looks at each resource: for entries that cannot be read, and for permits that nobody renews."""
    names: list[str] = []
    async with aclosing(client._operations.names()) as found:
        async for some in found:
            names += some
            if len(names) >= RESOURCES_MOST:
                break
    del names[RESOURCES_MOST:]
    looks = await asyncio.gather(*(_look_at(client._operations, name) for name in names))
    return [_judge_leases([look for look in looks if isinstance(look, Snapshot)]), _judge_damage(looks)]


async def _look_at(operations: Operations, name: str) -> Snapshot | str:
    """Returns a snapshot, or why there is none: one resource does not end the examination of the others."""
    try:
        return await operations.inspect(operations.resource(name), declared=UNDECLARED, limit=HOLDERS_MOST, counted=0)
    except Unavailable:
        raise
    except RedleaseError as error:
        return str(error)


def _judge_damage(looks: list[Snapshot | str]) -> Finding:
    damaged = [look for look in looks if isinstance(look, str)]
    for look in looks:
        if isinstance(look, Snapshot):
            damaged += [f"{each.kind} {each.name} of {look.resource} ({each.reason})" for each in look.damaged]
    if not damaged:
        return Finding("damage", Level.OK, f"{_count(len(looks), 'resource')}, of which all entries can be read")
    return Finding(
        "damage",
        Level.ERROR,
        f"{len(damaged)} cannot be read: {_named(damaged)}",
        "Eviction or another program has deleted or overwritten a part of their state: see what did. "
        "The next request on such a resource mends the rest. A damaged holder keeps a unit until its lease ends, "
        "or until `redlease release NAME --all`. A key of a wrong type has to be deleted",
    )


def _judge_leases(snapshots: list[Snapshot]) -> Finding:
    """Looks for permits that have missed two renewals: a hold renews three times in a lease."""
    holders = sum(len(snapshot.holders) for snapshot in snapshots)
    detail = f"{_count(holders, 'permit')} on {_count(len(snapshots), 'resource')}"
    overdue = [
        _overdue(permit, permit.expires_at_ms - snapshot.server_time_ms)
        for snapshot in snapshots
        for permit in snapshot.holders
        if permit.expires_at_ms - snapshot.server_time_ms < permit.lease_ms / 3
    ]
    if not overdue:
        return Finding("leases", Level.OK, f"{detail}, none overdue for renewal")
    return Finding(
        "leases",
        Level.WARNING,
        f"{detail}, {len(overdue)} not renewed for two thirds of the lease: {_named(overdue)}",
        "Their holders look dead or stalled, unless they took plain permits, which nobody renews. They pass on when "
        "the lease ends; `redlease release NAME TICKET` is sooner",
    )


def _overdue(permit: Permit, left_ms: int) -> str:
    return f"{permit.ticket} of {permit.resource} ({permit.owner}, {span(max(0, left_ms))} left)"


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


def _named(texts: list[str]) -> str:
    more = [f"{len(texts) - NAMED} more"] if len(texts) > NAMED else []
    return ", ".join([*texts[:NAMED], *more])
