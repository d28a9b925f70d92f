"""A release that the server refused is repeated in the background, and takes nothing from who has the ticket since."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from helpers import eventually

if TYPE_CHECKING:
    from conftest import MakeClient, OwnServer


@pytest.mark.parametrize("by_another", [False, True])
async def test_a_permit_that_was_acquired_again_stays(
    own_server: OwnServer, make_client: MakeClient, by_another: bool
) -> None:
    """The new hold got the same permit, which its own client or another one asked for before the repeated release."""
    server = own_server("valkey9")
    first = await make_client(url=server.url)
    second = await make_client(url=server.url) if by_another else first
    released = await first.lock("r").hold(ticket="t")
    server.cli("CONFIG", "SET", "min-replicas-to-write", "1")
    await released.release()
    server.cli("CONFIG", "SET", "min-replicas-to-write", "0")
    async with second.lock("r").hold(ticket="t") as hold:
        assert hold.fence == released.fence
        await eventually(lambda: not first.session.keeper.leaving, within=20)
        assert await second.lock("r").check(hold.permit)
        assert not hold.lost
    assert (await second.lock("r").inspect()).holders == ()


async def test_a_repeated_release_frees_the_permit(own_server: OwnServer, make_client: MakeClient) -> None:
    """If nobody has asked with the ticket since."""
    server = own_server("valkey9")
    client = await make_client(url=server.url)
    hold = await client.lock("r").hold(ticket="t")
    server.cli("CONFIG", "SET", "min-replicas-to-write", "1")
    await hold.release()
    server.cli("CONFIG", "SET", "min-replicas-to-write", "0")
    await eventually(lambda: not client.session.keeper.leaving, within=20)
    assert (await client.lock("r").inspect()).holders == ()
