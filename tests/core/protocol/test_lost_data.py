"""Redis loses keys, fields or members of a resource: it serves again within a lease, and nobody holds what is left."""

from __future__ import annotations

import contextlib
import itertools
from random import Random
from typing import TYPE_CHECKING

import pytest
from loss_cases import KINDS, check_after_loss, lose_a_limit, lose_each, play, users
from losses import Lossy

from servers import find_binary
from set_clock import KEYS, FakeEngine, RealEngine

if TYPE_CHECKING:
    from collections.abc import Iterator

    from conftest import Servers
    from servers import Server

NEWER = [engine for engine in ("redis7", "valkey9") if find_binary(engine)]  # which have PEXPIRETIME
CLUSTERS = ("cluster7",) if find_binary("redis7") else ()
LOST = [keys for count in range(1, 5) for keys in itertools.combinations(range(4), count)]


@pytest.mark.parametrize("lost", LOST, ids=lambda lost: "+".join(KEYS[part].rsplit(":")[-1] for part in lost))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("real_engine", NEWER)
def test_a_resource_without_some_of_its_keys(server: Server, kind: str, lost: tuple[int, ...]) -> None:
    """Whatever a resource is used for and whichever keys it loses, no call fails, and it serves within its leases."""
    with RealEngine(server) as engine:
        engine.clear()
        lossy = Lossy(engine, Random(0))
        asking = users(lossy, kind)
        lossy.lose(*(KEYS[part] for part in lost))
        check_after_loss(lossy, asking)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("real_engine", NEWER)
def test_a_resource_without_one_field_or_member(server: Server, kind: str) -> None:
    """So it is if it loses any one of what is stored."""
    with RealEngine(server) as engine:
        lose_each(engine, kind)


@pytest.mark.parametrize("real_engine", NEWER)
def test_a_limit_that_is_lost_lets_nobody_in(server: Server) -> None:
    """A limit above the capacity keeps no unit: without its entry, the fast path of acquire must not count one less."""
    with RealEngine(server) as engine:
        lose_a_limit(engine)


@contextlib.contextmanager
def opened(servers: Servers, engine: str) -> Iterator[FakeEngine | RealEngine]:
    """Run scripts on an engine; of a cluster on the master that has the resource."""
    if engine == "fakeredis":
        yield FakeEngine()
    else:
        server = servers.cluster.master_of(KEYS[0]) if engine in CLUSTERS else servers[engine]
        with RealEngine(server) as real:
            yield real


@pytest.mark.parametrize("engine", ["fakeredis", *NEWER])
def test_histories_in_which_something_is_lost(servers: Servers, engine: str, seed: int) -> None:
    """Whichever keys, fields and members are lost at whatever moment, a resource serves within its leases."""
    with opened(servers, engine) as running:
        for number in range(5 if engine == "fakeredis" else 50):
            play(running, seed, number)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("engine", ["fakeredis", *NEWER, *CLUSTERS])
def test_many_histories_in_which_something_is_lost(servers: Servers, engine: str, seed: int, *, is_long: bool) -> None:
    """So it is in other histories."""
    count = {(True, True): 20_000, (True, False): 60, (False, True): 2_000, (False, False): 500}
    with opened(servers, engine) as running:
        for number in range(count[engine == "fakeredis", is_long]):
            play(running, f"many {seed}", number)
