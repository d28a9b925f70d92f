"""What a guard's call does when its reply is lost: a check is repeated, a script is not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from redlease import Redlease, StaleFence, Unavailable

from proxy import Fault

if TYPE_CHECKING:
    from conftest import MakeClient, MakeProxy, Servers
    from proxy import Proxy

ADD = "return redis.call('INCRBY', KEYS[1], 1)"


@pytest.fixture
async def proxy(servers: Servers, make_proxy: MakeProxy) -> Proxy:
    """A proxy in front of a server, without faults as yet."""
    return await make_proxy(servers["valkey9"])


@pytest.fixture
async def client(proxy: Proxy, make_client: MakeClient) -> Redlease:
    """A client behind it."""
    return await make_client(url=proxy.url)


async def test_a_check_is_repeated(client: Redlease, proxy: Proxy) -> None:
    """The server has recorded the fence, and takes it again."""
    guard = client.guard("ledger")
    await guard.check(5)
    proxy.cut_after_requests(1, "EVALSHA")
    await guard.check(6)
    assert proxy.faults[Fault.CUT] == 1
    with pytest.raises(StaleFence):
        await guard.check(5)


@pytest.mark.parametrize(("fault", "ran"), [(Fault.CUT, 1), (Fault.LOSE, 0)])
async def test_a_script_is_sent_once(client: Redlease, proxy: Proxy, prefix: str, fault: Fault, ran: int) -> None:
    """Whether it has run is not known, so the caller is told, and the client is of use again."""
    guard = client.guard("ledger")
    key = f"{prefix}:{guard.hash_tag}:balance"
    await guard.run(5, ADD, [key])
    proxy.plan(fault, name="EVAL")
    with pytest.raises(Unavailable, match=r"resource 'ledger': .* not known whether the script has run") as unknown:
        await guard.run(5, ADD, [key])
    assert unknown.value.resource == "ledger"
    assert await guard.run(5, ADD, [key]) == 2 + ran
    assert proxy.commands["EVAL"] == 3
