"""Events of faults: a server that goes away for good, and one that comes back."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from redlease import LeaseLost
from redlease.events import Abandoned, Disconnected, Granted, Lost, Reconnected, RenewalFailed

from helpers import EventsOfRequests, eventually

if TYPE_CHECKING:
    from conftest import MakeClient, OwnServer


async def test_a_server_that_goes_away(own_server: OwnServer, make_client: MakeClient) -> None:
    """The connection, the renewals, the hold and a later request are told of, each once it has failed."""
    told: list[Any] = EventsOfRequests()
    server = own_server("valkey9")
    client = await make_client(url=server.url, on_event=told.append)
    lock = client.lock("r", lease=1.2)
    with pytest.raises(LeaseLost):
        async with lock.hold(key="acme") as hold:
            server.pause()  # a renewal is sent, and has no answer
            await asyncio.sleep(30)
    with pytest.raises(TimeoutError):
        await lock.acquire(ticket="late", timeout=0.2)
    await eventually(lambda: {RenewalFailed, Disconnected} <= {type(event) for event in told})
    kinds = {type(event): event for event in told}
    lost, late, failed = kinds[Lost], kinds[Abandoned], kinds[RenewalFailed]
    assert (lost.reason, lost.fence) == ("expired", hold.fence)
    assert 1.1 < lost.held < 60
    assert (late.ticket, late.error, late.queued) == ("late", "Unavailable", False)
    assert (failed.fence, failed.error, failed.key) == (hold.fence, "no answer", "acme")
    assert "no answer for" in kinds[Disconnected].reason
    server.resume()
    await eventually(lambda: any(isinstance(event, Reconnected) for event in told))


async def test_a_server_that_comes_back(own_server: OwnServer, make_client: MakeClient) -> None:
    """Of a restart two events tell, the second with how long it took; what a slow callback delays is not lost."""
    told: list[Any] = EventsOfRequests()
    server = own_server("valkey9")
    client = await make_client(url=server.url, on_event=told.append)
    server.restart()
    await eventually(lambda: len(told) == 2)
    lost, found = told
    assert isinstance(lost, Disconnected)
    assert isinstance(found, Reconnected)
    assert 0 < found.after < 60
    assert server.url not in str(told)
    async with client.lock("r").hold():
        assert isinstance(told[-1], Granted)
