"""Some seconds of load with kills and orders that the oracle judges, and violations that it finds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import redis
from monitored import Oracle, watching
from oracle import judge

from redlease import Redlease
from redlease._core.protocol.encoding import Resource

if TYPE_CHECKING:
    from conftest import OwnServer

FORGED = """
redis.call('ZADD', KEYS[2], '99999999999999', ARGV[1])
redis.call('HSET', KEYS[1], 't' .. ARGV[1], '1 ' .. ARGV[2] .. ' 1000 ' .. ARGV[3] .. ' p|0 r ["o",{}]')
"""


@pytest.mark.slow
def test_some_seconds_of_load_violate_nothing(real_engine: str, seed: int) -> None:
    """Whatever is killed, stopped and ordered, each grant fits what counts at its moment."""
    oracle = judge(real_engine, 5.0, seed)
    assert oracle.violations == []
    assert oracle.counts["granted"] > 0


async def test_each_grant_is_seen_and_each_violation_found(own_server: OwnServer, real_engine: str) -> None:
    """As many grants as there were; a second holder, one over its key's limit, one in a pause, and an old fence."""
    server = own_server(real_engine)
    oracle = Oracle({"lock": 1, "pool": 9}, {"pool": 2})

    def forge(name: str, ticket: str, fence: int) -> None:
        with redis.Redis.from_url(server.unix_url) as raw:
            seconds, micros = raw.time()
            since = seconds * 1000 + micros // 1000
            raw.eval(FORGED, 4, *Resource("redlease", name).keys, ticket, str(fence), str(since))

    async with Redlease.from_url(server.url) as client:
        with watching(server, oracle):
            for _ in range(20):
                async with client.lock("lock"):
                    pass
            pool = client.semaphore("pool", 9, per_key=2)
            for _ in range(2):
                await pool.acquire(key="a")
            permit = await pool.acquire()
            assert permit.capacity == 9
        assert (oracle.counts["granted"], oracle.violations) == (23, [])
        with watching(server, oracle):
            await client.lock("lock").acquire()
            forge("lock", "second", permit.fence * 2)
            forge("pool", "old", 1)
            await pool.pause()
            forge("pool", "paused", permit.fence * 2)
    assert [violation.split()[1] for violation in oracle.violations] == ["second", "old", "paused"]
