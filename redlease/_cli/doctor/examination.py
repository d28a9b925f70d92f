"""Examines the servers behind a URL, and what redlease keeps there."""

from __future__ import annotations

import logging

from redlease import Redlease, RedleaseError, Unavailable
from redlease._core.transport.masters import Refused

from .facts import read_facts
from .findings import Finding, Level
from .key_checks import check_keys, check_resources
from .server_checks import check_manner, check_server


async def examine(url: str, prefix: str) -> list[Finding]:
    """Returns the findings of all checks; a server that cannot be used is a finding too.

    Raises:
        ValueError: The URL or the prefix is wrong.
    """
    # What the client would warn of is among the findings.
    logging.getLogger("redlease").addHandler(logging.NullHandler())
    findings: list[Finding] = []
    try:
        async with Redlease.from_url(url, prefix=prefix) as client, client._operations.masters() as masters:
            for master in masters:
                try:
                    findings += check_server(await read_facts(master), as_cluster="+cluster" in url.partition(":")[0])
                except (Refused, Unavailable) as error:
                    check = "rights" if isinstance(error, Refused) else "connection"
                    findings.append(Finding(check, Level.ERROR, str(error), server=master.name))
            try:
                await client.lock("any").locked()  # of a cluster, each node that is used finds out
                findings.append(check_manner(await client._connection.found_manner()))
                findings += [await check_keys(masters, prefix), *await check_resources(client)]
            except (Refused, Unavailable) as error:
                findings.append(Finding("keys", Level.WARNING, f"not all looked at: {error}"))
    except RedleaseError as error:
        findings.append(Finding("connection", Level.ERROR, str(error)))
    return findings
