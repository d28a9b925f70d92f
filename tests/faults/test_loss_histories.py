"""Real servers lose parts of resources, by hand and by eviction: every request is served again soon afterwards."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import redis.asyncio

from evicting import play_under_eviction
from loss_histories import play

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import MakeClient, OwnServer

pytestmark = pytest.mark.slow

FEW, MANY = 40, 700  # histories on each engine
CLIENTS = 3
PATIENCE_S = 60  # for a machine that does other work


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("engine", ["redis7", "valkey9", "cluster7"])
async def test_every_request_is_served_after_partial_losses(
    engine: str,
    make_client: MakeClient,
    raw_client: Callable[..., redis.asyncio.Redis],
    *,
    is_long: bool,
    seed: int,
) -> None:
    """In random histories with deleted keys, fields and members nothing stays held, refused or unserved."""
    clients = [await make_client(call_timeout=PATIENCE_S) for _ in range(CLIENTS)]
    first = seed * MANY
    # redis-py's client of a cluster closes all its connections when one command takes longer than its timeout.
    raw = raw_client(socket_timeout=PATIENCE_S)
    problems = await play(range(first, first + (MANY if is_long else FEW)), clients, raw)
    assert not problems, "\n".join(problems)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("policy", ["allkeys-lru", "allkeys-random", "volatile-lru"])
@pytest.mark.parametrize("engine", ["redis7", "valkey9"])
async def test_every_request_is_served_after_eviction(
    own_server: OwnServer, make_client: MakeClient, engine: str, policy: str, seed: int
) -> None:
    """A server of 12 MB evicts keys of resources under load; once the pressure has ended no request fails."""
    server = own_server(engine, "--maxmemory", "12mb", "--maxmemory-policy", policy)
    clients = [await make_client(url=server.url, prefix="redlease", call_timeout=PATIENCE_S) for _ in range(CLIENTS)]
    async with redis.asyncio.Redis.from_url(server.url) as raw:
        problems, lost = await play_under_eviction(range(seed, seed + 20), clients, raw)
    assert not problems, "\n".join(problems)
    assert lost > 20
