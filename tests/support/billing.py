"""What the pages call `billing`: a charge tells the test that it has begun, and goes on when the test lets it."""

from __future__ import annotations

import json
import os
from typing import Any, NamedTuple

import redis
import redis.asyncio

BEGUN = "billing:begun"
WITHIN_S = 40
# No socket timeout: with one, redis-py sends in `asyncio.wait_for`, which up to Python 3.11 drops a cancellation that
# comes as it ends. A body that a loss cancels would go on.
OPTIONS: Any = {"decode_responses": True, "socket_timeout": None}


class Begun(NamedTuple):
    """A charge that has begun, and the process in which it did."""

    account: str
    fence: int
    pid: int


def go_key(account: str) -> str:
    """Return the list from which a charge takes the word that ends it."""
    return f"billing:go:{account}"


def charge_blocking(account: str, fence: int) -> None:
    """Charge an account; raises what the test says."""
    with redis.Redis.from_url(os.environ["REDIS_URL"], **OPTIONS) as raw:
        raw.rpush(BEGUN, json.dumps([account, fence, os.getpid()]))
        _end(raw.blpop([go_key(account)], WITHIN_S))


async def charge(account: str, fence: int) -> None:
    """Charge an account; raises what the test says."""
    async with redis.asyncio.Redis.from_url(os.environ["REDIS_URL"], **OPTIONS) as raw:
        await raw.rpush(BEGUN, json.dumps([account, fence, os.getpid()]))
        _end(await raw.blpop([go_key(account)], WITHIN_S))


def _end(word: Any) -> None:
    assert word is not None, "the test has not let it go on"
    if word[1] == "fail":
        raise RuntimeError("the card was refused")


class Billing:
    """The test's side, which drives the charges."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def begun(self) -> Begun:
        """Wait until the next charge has begun."""
        async with redis.asyncio.Redis.from_url(self._url, **OPTIONS) as raw:
            found = await raw.blpop([BEGUN], WITHIN_S)
            assert found is not None, "no charge has begun"
            return Begun(*json.loads(found[1]))

    async def count(self) -> int:
        """Return how many have begun that nobody has asked for."""
        async with redis.asyncio.Redis.from_url(self._url) as raw:
            return int(await raw.llen(BEGUN))

    async def end(self, account: str, word: str = "done") -> None:
        """Let the charge that runs, or the next one, end; with "fail" it raises."""
        async with redis.asyncio.Redis.from_url(self._url) as raw:
            await raw.rpush(go_key(account), word)
