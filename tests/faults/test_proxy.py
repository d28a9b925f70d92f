"""The proxy: transparent until told otherwise, and each fault is the one that it says."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import hiredis
import pytest
import redis.asyncio
from hypothesis import given
from hypothesis import strategies as st
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from helpers import eventually
from proxy import Chances, Fault, Framer, Proxy, first_word, is_message

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from conftest import MakeProxy
    from servers import Server

COUNT = "return redis.call('INCR', KEYS[1])"
LOST = (redis.ConnectionError, redis.TimeoutError)


@pytest.fixture(params=[2, 3], ids=["RESP2", "RESP3"])
async def through(proxy: Proxy, request: pytest.FixtureRequest) -> AsyncIterator[redis.asyncio.Redis]:
    """A client that goes through the proxy and never tries again by itself."""
    async with redis.asyncio.Redis.from_url(
        proxy.url,
        protocol=request.param,
        decode_responses=True,
        retry=Retry(NoBackoff(), 0),
        socket_timeout=0.5,
    ) as client:
        await client.ping()
        yield client


def value(server: Server, key: str) -> int:
    """Return a counter, past the proxy."""
    return int(server.cli("GET", key) or 0)


async def test_it_is_transparent(proxy: Proxy, through: redis.asyncio.Redis, prefix: str) -> None:
    """Replies of every shape, small and large, arrive as they were sent."""
    large = "x" * 300_000
    await through.set(prefix, large)
    assert await through.get(prefix) == large
    assert await through.get(f"{prefix}:none") is None
    script = "return {1, {'a', {}, false}, redis.status_reply('fine')}"
    assert await through.eval(script, 0) == [1, ["a", [], None], "fine"]
    with pytest.raises(redis.ResponseError, match="broken"):
        await through.eval("return redis.error_reply('broken')", 0)
    async with through.pipeline(transaction=True) as pipeline:
        for number in range(1000):
            pipeline.set(f"{prefix}:{number}", number, ex=60)
        assert await pipeline.execute() == [True] * 1000
    assert isinstance(await through.config_get("*"), dict)
    assert (proxy.connections, proxy.connections_most) == (1, 1)
    assert proxy.commands["SET"] == 1001
    assert proxy.commands["EXEC"] == 1


async def test_messages_are_no_replies(proxy: Proxy, through: redis.asyncio.Redis, prefix: str) -> None:
    """Messages and confirmations pass between the replies without being taken for one."""
    async with through.pubsub() as subscription:
        await subscription.subscribe(f"{prefix}:a", f"{prefix}:b")
        await through.publish(f"{prefix}:a", "hello")
        await subscription.unsubscribe()
        kinds = [(await subscription.get_message(timeout=1) or {})["type"] for _ in range(5)]
    assert kinds == ["subscribe", "subscribe", "message", "unsubscribe", "unsubscribe"]
    assert proxy.commands["SUBSCRIBE"] == 1


async def test_cut_after_requests(proxy: Proxy, server: Server, through: redis.asyncio.Redis, prefix: str) -> None:
    """The n-th request is run, its reply is lost with the connection, and what was sent behind it is not run."""
    proxy.cut_after_requests(2, "INCRBY")
    assert await through.incr(prefix) == 1
    with pytest.raises(LOST):
        await through.incr(prefix)
    assert value(server, prefix) == 2
    assert await through.incr(prefix) == 3, "the next connection is fine"
    proxy.cut_after_requests(3, "INCRBY")
    async with through.pipeline(transaction=False) as pipeline:
        for _ in range(10):
            pipeline.incr(prefix)
        with pytest.raises(LOST):
            await pipeline.execute()
    await eventually(lambda: proxy.connections == 0)
    assert value(server, prefix) == 6
    assert proxy.faults == {Fault.CUT: 2}


async def test_lose(proxy: Proxy, server: Server, through: redis.asyncio.Redis, prefix: str) -> None:
    """A lost request never reaches the server, and its connection ends."""
    proxy.plan(Fault.LOSE)
    with pytest.raises(LOST):
        await through.incr(prefix)
    assert value(server, prefix) == 0


async def test_stall(proxy: Proxy, server: Server, through: redis.asyncio.Redis, prefix: str) -> None:
    """A stalled connection runs the request and says nothing more, but stays open."""
    proxy.plan(Fault.STALL)
    with pytest.raises(redis.TimeoutError):
        await through.incr(prefix)
    assert value(server, prefix) == 1
    assert proxy.connections_total == 1
    assert await through.incr(prefix) == 2


async def test_delay(proxy: Proxy, through: redis.asyncio.Redis, prefix: str) -> None:
    """A delayed reply comes late, and nothing overtakes it."""
    proxy.chances = Chances(delay=1, delay_max=0.05)
    began = asyncio.get_running_loop().time()
    async with through.pipeline(transaction=False) as pipeline:
        for _ in range(10):
            pipeline.incr(prefix)
        assert await pipeline.execute() == list(range(1, 11))
    assert asyncio.get_running_loop().time() - began > 0.05


async def test_double(proxy: Proxy, server: Server, through: redis.asyncio.Redis, prefix: str) -> None:
    """A doubled request is run twice; the client sees the first reply and stays in step."""
    proxy.plan(Fault.DOUBLE)
    assert await through.eval(COUNT, 1, prefix) == 1
    assert value(server, prefix) == 2
    assert await through.eval(COUNT, 1, prefix) == 3


async def test_a_late_copy(proxy: Proxy, server: Server, through: redis.asyncio.Redis, prefix: str) -> None:
    """A copy arrives after its connection has died."""
    proxy.chances = Chances(late_max=0.2)
    proxy.plan(Fault.LATE)
    assert await through.eval(COUNT, 1, prefix) == 1
    proxy.drop_all()
    await eventually(lambda: proxy.connections == 0)
    await proxy.settled()
    assert value(server, prefix) == 2


async def test_a_connection_is_not_set_up_twice(proxy: Proxy, through: redis.asyncio.Redis) -> None:
    """Only what a client would send again is doubled: a greeting, say, is not."""
    proxy.chances = Chances(double=1)
    assert await through.ping()
    assert proxy.faults == {}


async def test_freeze_and_thaw(proxy: Proxy, server: Server, through: redis.asyncio.Redis, prefix: str) -> None:
    """A frozen proxy takes bytes and connections and passes nothing on; thawed, it passes on what it kept."""
    proxy.freeze()
    incrementing = asyncio.ensure_future(through.incr(prefix))
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    writer.write(b"*1\r\n$4\r\nPING\r\n")
    await asyncio.sleep(0.1)
    assert value(server, prefix) == 0
    assert not incrementing.done()
    proxy.thaw()
    assert await incrementing == 1
    assert await reader.readline() == b"+PONG\r\n"
    writer.close()


async def test_refuse_and_accept(proxy: Proxy, through: redis.asyncio.Redis) -> None:
    """While connections are refused the open one lives on; accepted again, they find the same port."""
    proxy.refuse()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", proxy.port)
    assert await through.ping()
    proxy.drop_all()
    with pytest.raises(LOST):
        await through.ping()
    await proxy.accept()
    assert await through.ping()
    assert proxy.connections_most == 1
    assert proxy.connections_total == 2


async def test_a_dead_server_ends_the_connection(make_proxy: MakeProxy, server: Server) -> None:
    """With nobody behind the proxy a connection ends as soon as it began."""
    proxy = await make_proxy(server)
    proxy.upstream_port = 1
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    assert await reader.read() == b""
    writer.close()


@pytest.mark.parametrize("seed", range(3))
async def test_chance_is_seeded(make_proxy: MakeProxy, server: Server, seed: int) -> None:
    """The same seed brings the same faults, in about the proportions asked for."""
    runs = []
    for _ in range(2):
        proxy = await make_proxy(server, seed=seed)
        proxy.chances = Chances(cut=0.1, double=0.2, late=0.1)
        runs.append([proxy.fault_for("EVALSHA") for _ in range(1000)])
    assert runs[0] == runs[1]
    assert 50 < runs[0].count(Fault.CUT) < 150
    assert 150 < runs[0].count(Fault.DOUBLE) < 250
    assert 500 < runs[0].count(None) < 700


FRAMES = st.recursive(
    st.sampled_from(
        [b":1\r\n", b"+OK\r\n", b"-ERR no\r\n", b"$-1\r\n", b"*-1\r\n", b"_\r\n", b"#t\r\n", b",1.5\r\n", b"(123\r\n"]
    )
    | st.binary(max_size=30).map(lambda data: b"$%d\r\n%s\r\n" % (len(data), data))
    | st.text(alphabet="abc\r\n", max_size=9).map(lambda text: b"=%d\r\ntxt:%s\r\n" % (len(text) + 4, text.encode())),
    lambda inner: (
        st.lists(inner, max_size=4).map(lambda items: b"*%d\r\n%s" % (len(items), b"".join(items)))
        | st.lists(st.tuples(st.just(b"+k\r\n"), inner), max_size=1).map(
            lambda pairs: b"%%%d\r\n%s" % (len(pairs), b"".join(key + item for key, item in pairs))
        )
    ),
    max_leaves=12,
)


@given(frames=st.lists(FRAMES, max_size=5), seed=st.integers(0, 1000))
def test_frames_are_found_however_they_are_cut(frames: list[bytes], seed: int) -> None:
    """A stream that arrives in pieces of any size is cut into the frames that it was made of, as hiredis sees them."""
    stream = b"".join(frames)
    chance = random.Random(seed)
    framer = Framer()
    found = []
    position = 0
    while position < len(stream):
        size = chance.randint(1, 20)
        found += framer.feed(stream[position : position + size])
        position += size
    assert found == frames
    for frame in found:
        reader = hiredis.Reader()
        reader.feed(frame)
        assert reader.gets() is not False
        assert reader.gets() is False


def test_names_are_read_from_frames() -> None:
    """The first word of a request is its command; pushes and messages are told from replies."""
    assert first_word(b"*2\r\n$3\r\nget\r\n$1\r\nk\r\n") == "GET"
    assert first_word(b":1\r\n") == ""
    assert is_message(b">3\r\n$7\r\nmessage\r\n$1\r\nc\r\n$1\r\nm\r\n")
    assert is_message(b"*3\r\n$7\r\nmessage\r\n$1\r\nc\r\n$1\r\nm\r\n")
    assert not is_message(b"*1\r\n:5\r\n")
    attribute = b"|1\r\n+k\r\n+v\r\n"
    assert Framer().feed(attribute + b":1\r\n") == [attribute + b":1\r\n"]
