"""Checks of what redlease keeps on the servers: the keys under the prefix, and the permits."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from redlease import Permit, Redlease
from redlease.cli.plain import span
from redlease.primitives.overview import UNDECLARED
from redlease.protocol.encoding import keys_pattern
from redlease.transport.masters import Master

from .findings import Finding, Level

# However much there is, so much is looked at.
KEYS_MOST = 10_000  # on each master
RESOURCES_MOST = 1000
HOLDERS_MOST = 100  # of each resource, those whose leases end first
NAMED = 5


async def check_keys(masters: list[Master], prefix: str) -> Finding:
    """Looks for keys that would stay for ever: redlease gives every key a time to live."""
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
        "redlease wrote none of them so, and they stay for ever: see what did, and give it another prefix",
    )


async def check_leases(client: Redlease) -> Finding:
    """Looks for permits that have missed two renewals: a hold renews three times in a lease."""
    names: list[str] = []
    async with aclosing(client.tickets.names()) as found:
        async for some in found:
            names += some
            if len(names) >= RESOURCES_MOST:
                break
    del names[RESOURCES_MOST:]
    tickets = client.tickets
    looks = (
        tickets.inspect(tickets.resource(name), declared=UNDECLARED, limit=HOLDERS_MOST, counted=0) for name in names
    )
    snapshots = await asyncio.gather(*looks)
    holders = sum(len(snapshot.holders) for snapshot in snapshots)
    said = f"{_count(holders, 'permit')} on {_count(len(names), 'resource')}"
    overdue = [
        _overdue(permit, permit.expires_at_ms - snapshot.server_time_ms)
        for snapshot in snapshots
        for permit in snapshot.holders
        if permit.expires_at_ms - snapshot.server_time_ms < permit.lease_ms / 3
    ]
    if not overdue:
        return Finding("leases", Level.OK, f"{said}, none overdue for renewal")
    return Finding(
        "leases",
        Level.WARNING,
        f"{said}, {len(overdue)} not renewed for two thirds of the lease: {_named(overdue)}",
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
