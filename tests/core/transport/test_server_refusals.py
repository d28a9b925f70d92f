"""A server that says no: each refusal is one clear error that says what to do, and nothing half-done is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
import redis
import redis.asyncio

import redlease
from redlease import LeaseLost, NotReplicated, Redlease, RedleaseError
from redlease._core.hold import lease_of

from helpers import cancel, eventually, keys_of, left_over, queue_up, until_waiting
from ports import free_port
from proxy import Framer, first_word

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from redlease import Permit, Semaphore

    from conftest import MakeClient, OwnServer, Servers
    from servers import Server

LUA = {file.name: file.read_text() for file in Path(redlease.__file__).parent.glob("_core/lua/**/*.lua")}
# Without PUBLISH requests poll, see test_dialects.py; without SPUBLISH they do in a cluster, see test_cluster.py.
HISTORY = {"xadd", "xrevrange"}  # which only a history needs
COMMANDS = sorted(
    {name.lower() for text in LUA.values() for name in re.findall(r"\bp?call\('([A-Z]+)'", text)}
    - {"publish", "spublish", *HISTORY}
)


@pytest.fixture
def server(own_server: OwnServer, real_engine: str) -> Server:
    """A server of each real engine in turn, for one test alone."""
    return own_server(real_engine)


async def refusal(url: str, why: str = "", **options: Any) -> str:
    """Return the error with which a client cannot be entered."""
    with pytest.raises(RedleaseError) as caught:
        async with Redlease.from_url(url, **options):
            pytest.fail(f"the server should have refused: {why}")
    return str(caught.value)


# Passwords and rights


async def test_a_wrong_password(own_server: OwnServer, real_engine: str) -> None:
    """A wrong or missing password is refused at once, on entering and on a first call without entering."""
    server = own_server(real_engine, "--requirepass", "secret")
    for login in (":wrong@", "", "nobody:secret@"):
        url = server.url.replace("//", f"//{login}")
        assert "password" in await refusal(url)
    client = Redlease.from_url(server.url.replace("//", "//:wrong@"))
    with pytest.raises(RedleaseError, match="password"):
        await client.lock("r").acquire()
    await client.close()
    async with Redlease.from_url(server.url.replace("//", "//:secret@")) as client, client.lock("r"):
        pass


class Limited:
    """A user of the server that may do everything but what a test takes away."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.url = server.url.replace("//", "//limited:pw@")

    def may(self, *rules: str) -> None:
        """Set the user's rights anew."""
        self.server.cli("ACL", "SETUSER", "limited", "reset", "on", ">pw", *rules)


@pytest.fixture
def limited(server: Server) -> Limited:
    """Such a user of each real engine."""
    return Limited(server)


async def test_a_missing_command_is_named(limited: Limited, prefix: str) -> None:
    """A user who lacks any one command that the scripts use is told which, before anything is half-done."""
    assert len(COMMANDS) > 12
    for command in COMMANDS:
        limited.may("~*", "&*", "+@all", f"-{command}")
        assert command in (await refusal(limited.url, f"no {command}", prefix=prefix)).lower()
    assert limited.server.cli("KEYS", "*") == []


async def test_no_call_fails_for_the_lack_of_a_history(limited: Limited, prefix: str) -> None:
    """Without the rights, or with another program's key in its place, it stays empty; reading it says what is wrong."""
    limited.may("~*", "&*", "+@all", *(f"-{command}" for command in HISTORY))
    async with Redlease.from_url(limited.url, prefix=prefix, history=10) as client:
        lock = client.semaphore("r", capacity=3)
        for _ in range(2):
            async with lock.hold():
                pass
        with pytest.raises(RedleaseError, match="lacks a right"):
            await lock.history()
        limited.may("~*", "&*", "+@all")
        assert await lock.history() == []
        limited.server.cli("SET", lock._resource.keys[0].removesuffix("state") + "history", "another program's")
        async with lock.hold():
            await lock.resize(2)
        with pytest.raises(RedleaseError, match="Delete that key"):
            await lock.history()


async def test_a_missing_right_to_scripts_is_told(limited: Limited, prefix: str) -> None:
    """The commands that redlease sends itself are needed as well."""
    for command in ("evalsha", "script", "subscribe"):
        limited.may("~*", "&*", "+@all", f"-{command}")
        assert "right" in await refusal(limited.url, f"no {command}", prefix=prefix)


async def test_missing_keys_and_channels_are_told(limited: Limited, prefix: str) -> None:
    """A user who may not touch the prefix's keys or channels is told so."""
    limited.may("~other:*", "&*", "+@all")
    assert "key" in await refusal(limited.url, prefix=prefix)
    limited.may("~*", "resetchannels", "&other:*", "+@all")
    assert "channel" in await refusal(limited.url, prefix=prefix)


@pytest.mark.parametrize("command", ["EVALSHA", "ZADD"])
async def test_a_server_without_a_command_is_refused_at_once(
    own_server: OwnServer, real_engine: str, command: str
) -> None:
    """Its error repeats what it was sent, such as a script that contains BUSY: nobody waits for that to pass."""
    server = own_server(real_engine, "--rename-command", command, "")
    async with asyncio.timeout(10):
        assert "disabled or renamed a command" in await refusal(server.url, f"no {command}", prefix="BUSY:LOADING")
    client = Redlease.from_url(server.url)
    with pytest.raises(RedleaseError, match=r"(?i)unknown (redis )?command"):
        async with asyncio.timeout(10), client.lock("BUSY").hold():
            pytest.fail("it was granted by a server that cannot")
    await client.close()


async def test_the_rights_that_the_error_names_are_enough(
    limited: Limited, prefix: str, make_client: MakeClient
) -> None:
    """A user with exactly the rights that the error advises can do everything."""
    limited.may("~*", "&*", "+@all", "-zadd")
    (advice,) = re.findall(r"ACL SETUSER <user> (.*)", await refusal(limited.url, prefix=prefix))
    limited.may("resetchannels", *advice.split())
    client = await make_client(url=limited.url)
    lock = client.semaphore("r", capacity=2)
    async with lock.hold(weight=2):
        (task,) = await queue_up(lock, 1)
    permit = await lock.renew(await task)
    hold = await lock.adopt(permit)
    assert await lock.is_held(hold.permit)
    await lock.resize(3)
    watching = lock.watch()
    assert (await anext(watching)).capacity == 3
    await watching.aclose()
    assert await lock.release_all(queue=True) == 1


async def test_rights_that_are_taken_away_later(limited: Limited, make_client: MakeClient) -> None:
    """A right that is taken away while the client lives gives an error that names the resource."""
    limited.may("~*", "&*", "+@all")
    client = await make_client(url=limited.url)
    await client.lock("warm").release(await client.lock("warm").acquire())
    limited.may("~*", "&*", "+@all", "-zadd")
    with pytest.raises(RedleaseError, match=r"'r'.*right"):
        await client.lock("r").acquire(timeout=5)
    limited.may("~*", "&*", "+@all")
    assert await client.lock("r").acquire(timeout=5)


# Servers that cannot write


async def test_a_replica_is_refused(own_server: OwnServer, real_engine: str, server: Server) -> None:
    """A read-only replica is refused with the advice to use its primary."""
    replica = own_server(real_engine)
    replica.cli("REPLICAOF", "127.0.0.1", server.port)
    assert "replica" in await refusal(replica.url)


async def test_a_server_that_becomes_a_replica(
    own_server: OwnServer, real_engine: str, server: Server, make_client: MakeClient
) -> None:
    """Demoted under the client, the server is waited for, and the error says so; promoted again, all goes on."""
    primary = own_server(real_engine)
    client = await make_client(url=server.url)
    lock = client.lock("r", lease=1)
    hold = await lock.hold()
    server.cli("REPLICAOF", "127.0.0.1", primary.port)
    with pytest.raises(RedleaseError, match="replica"):
        await client.lock("other").acquire(timeout=0.5)
    assert await asyncio.wait_for(hold.wait_lost(), 5)
    server.cli("REPLICAOF", "NO", "ONE")

    async def works_again() -> bool:
        with contextlib.suppress(RedleaseError):
            async with lock.hold(timeout=0.5) as later:
                return later.fence > hold.fence
        return False

    await eventually(works_again)


async def test_a_full_server(server: Server, make_client: MakeClient, prefix: str) -> None:
    """A full server refuses new requests whole; renewals, beats and releases go on, and hand on."""
    client = await make_client(url=server.url, waiter_lease=0.6)
    lock = client.lock("r", lease=0.6)
    async with lock.hold() as hold:
        (task,) = await queue_up(lock, 1)
        server.cli("CONFIG", "SET", "maxmemory", "1")
        for attempt in (
            lock.acquire(),
            client.lock("new").acquire(),
            client.lock("new").try_acquire(),
            client.lock("new").hold(),
        ):
            with pytest.raises(RedleaseError, match="memory"):
                await attempt
        assert server.cli("EXISTS", f"{prefix}:{{new}}:state", f"{prefix}:{{new}}:holders") == 0
        renewed = hold.permit.expires_at_ms
        await eventually(lambda: hold.permit.expires_at_ms > renewed + 700)
        assert len(await until_waiting(lock, 1)) == 1
        assert not task.done()
    permit = await asyncio.wait_for(task, 5)
    permit = await lock.renew(permit)
    adopted = await lock.adopt(permit)
    assert await adopted.release()
    server.cli("CONFIG", "SET", "maxmemory", "0")
    assert await lock.try_acquire() is not None


async def test_a_cancelled_waiter_leaves_a_full_server(server: Server, make_client: MakeClient) -> None:
    """Leaving the queue is possible with the memory full, by timeout and by cancelling."""
    client = await make_client(url=server.url)
    lock = client.lock("r")
    permit = await lock.acquire()
    tasks = await queue_up(lock, 2)
    server.cli("CONFIG", "SET", "maxmemory", "1")
    tasks[0].cancel()
    await until_waiting(lock, 1)
    assert await lock.release(permit)
    assert await lock.release(await tasks[1])
    server.cli("CONFIG", "SET", "maxmemory", "0")


async def test_too_few_replicas(server: Server, make_client: MakeClient, prefix: str) -> None:
    """With fewer replicas than the server wants NotReplicated is raised and nothing changed; later it works."""
    client = await make_client(url=server.url)
    lock = client.lock("r")
    server.cli("CONFIG", "SET", "min-replicas-to-write", "1")
    for attempt in (lock.acquire(ticket="t"), lock.try_acquire(ticket="t"), lock.hold(ticket="t")):
        with pytest.raises(NotReplicated, match="min-replicas-to-write") as caught:
            await attempt
        assert (caught.value.resource, caught.value.ticket) == ("r", "t")
    server.cli("CONFIG", "SET", "min-replicas-to-write", "0")
    assert server.cli("KEYS", f"{prefix}:{{r}}*") == []
    assert await lock.try_acquire() is not None


@pytest.mark.slow
async def test_a_hold_rides_out_missing_replicas(
    server: Server, make_client: MakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    """A renewal that is refused is tried again, and the lease is full once it is not."""
    client = await make_client(url=server.url)
    async with client.lock("r", lease=6).hold() as hold:
        server.cli("CONFIG", "SET", "min-replicas-to-write", "1")
        await eventually(lambda: "is tried again" in caplog.text)
        refused_until_ms = lease_of(hold).deadline_ms
        server.cli("CONFIG", "SET", "min-replicas-to-write", "0")
        await eventually(lambda: lease_of(hold).deadline_ms > refused_until_ms)


async def test_a_busy_server(own_server: OwnServer, real_engine: str, make_client: MakeClient) -> None:
    """While somebody's script runs for long the server says BUSY; a request waits for that to pass."""
    server = own_server(real_engine, "--lua-time-limit", "20")
    client = await make_client(url=server.url)
    lock = client.lock("r", lease=5)

    def block() -> None:
        with redis.Redis.from_url(server.url) as other, contextlib.suppress(redis.ResponseError):
            other.eval("while true do end", 0)

    blocking = asyncio.create_task(asyncio.to_thread(block))

    def busy() -> bool:
        try:
            server.cli("PING")
        except redis.ResponseError:
            return True
        return False

    await eventually(busy)
    waiting = asyncio.create_task(lock.acquire())
    await asyncio.sleep(0.3)
    assert not waiting.done()
    server.cli("SCRIPT", "KILL")
    assert await asyncio.wait_for(waiting, 5)
    await blocking


async def test_an_eviction_policy_is_warned_of(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    """A server that may drop keys is used, with one warning that names the policy."""
    server.cli("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    with caplog.at_level(logging.WARNING, logger="redlease"):
        async with Redlease.from_url(server.url) as client, client.lock("r"):
            pass
    (record,) = caplog.records
    assert "allkeys-lru" in record.getMessage()
    assert "noeviction" in record.getMessage()


# Keys of a wrong type


async def _watch(pool: Semaphore) -> Any:
    watching = pool.watch()
    try:
        return await anext(watching)
    finally:
        await watching.aclose()


OPERATIONS: dict[str, Callable[[Semaphore, Permit], Awaitable[Any]]] = {
    "acquire": lambda pool, _: pool.acquire(timeout=2),
    "acquire_too_much_for_now": lambda pool, _: pool.acquire(weight=3, timeout=2),
    "acquire_again": lambda pool, permit: pool.acquire(ticket=permit.ticket),
    "try_acquire": lambda pool, _: pool.try_acquire(),
    "hold": lambda pool, _: pool.hold(timeout=2),
    "renew": lambda pool, permit: pool.renew(permit),
    "adopt": lambda pool, permit: pool.adopt(permit),
    "check": lambda pool, permit: pool.is_held(permit),
    "inspect": lambda pool, _: pool.inspect(),
    "locked": lambda pool, _: pool.locked(),
    "resize": lambda pool, _: pool.resize(4),
    "watch": lambda pool, _: _watch(pool),
    "release_by_ticket": lambda pool, permit: pool.release(permit.ticket),
    "release_a_waiter": lambda pool, _: pool.release("w"),
    "release_all": lambda pool, _: pool.release_all(queue=True),
    "release": lambda pool, permit: pool.release(permit),
}


# What some wrong keys do not concern, since it does not look at them.
CAN_DO_WITHOUT = {
    ("adopt", "waiters"),
    ("check", "queue"),
    ("check", "waiters"),
    ("renew", "waiters"),
}


async def refused(call: Awaitable[Any]) -> RedleaseError | None:
    """Return the error with which a call is refused, or None."""
    try:
        await call
    except RedleaseError as error:
        return error
    return None


async def contents(raw: redis.asyncio.Redis, base: str) -> dict[str, Any]:
    """Return what the four keys hold."""
    found: dict[str, Any] = {}
    for part in ("state", "holders", "queue", "waiters"):
        kind = await raw.type(base + part)
        if kind == "hash":
            found[part] = await raw.hgetall(base + part)
        elif kind == "zset":
            found[part] = await raw.zrange(base + part, 0, -1, withscores=True)
        else:
            found[part] = kind
    return found


@pytest.mark.parametrize("part", ["state", "holders", "queue", "waiters"])
async def test_a_key_of_a_wrong_type(
    client: Redlease, make_client: MakeClient, raw: redis.asyncio.Redis, prefix: str, part: str
) -> None:
    """Whichever of the keys somebody has overwritten, an operation that needs it says so and changes nothing."""
    other = await make_client(waiter_lease=30)
    for operation, operate in OPERATIONS.items():
        name = f"r-{operation}"
        base = f"{prefix}:{{{name}}}:"
        pool = client.semaphore(name, capacity=3, waiter_lease=30)
        permit = await pool.acquire(ticket="p", weight=2)
        (task,) = await queue_up(other.semaphore(name, capacity=3), 1, ticket="w", weight=2)
        await raw.rename(base + part, f"{base}kept")
        await raw.set(base + part, "not redlease's")
        before = await contents(raw, base)
        try:
            error = await refused(asyncio.wait_for(operate(pool, permit), 6))
            assert (error is None) == ((operation, part) in CAN_DO_WITHOUT), operation
            if error is not None:
                assert f"'{name}'" in str(error)
                assert "prefix" in str(error)
                assert error.resource == name
                assert await contents(raw, base) == before, operation
        finally:
            await raw.delete(base + part)
            await raw.rename(f"{base}kept", base + part)
            await cancel(task)
            await pool.release_all(queue=True)


@pytest.mark.parametrize("part", ["state", "holders", "queue", "waiters"])
async def test_a_key_of_a_wrong_type_on_an_unused_resource(
    client: Redlease, raw: redis.asyncio.Redis, prefix: str, part: str
) -> None:
    """A first acquire on a name whose key is taken by something else leaves nothing beside it."""
    base = f"{prefix}:{{r}}:"
    await raw.set(base + part, "not redlease's")
    error = await refused(client.lock("r").acquire(timeout=2, ticket="t"))
    if error is None:
        assert part in {"queue", "waiters"}
        await raw.delete(base + part)
        assert await client.lock("r").release("t")
    else:
        assert "'r'" in str(error)
        assert await keys_of(raw, f"{base}*") == [base + part]
    await raw.delete(base + part)


# Servers that are too old, and other ways to one


@contextlib.asynccontextmanager
async def pretender(hello: bytes, info: bytes = b"+OK\r\n") -> AsyncIterator[str]:
    """Listen like a server that answers HELLO and INFO in this way and all else with OK; yield its URL."""
    replies = {"HELLO": hello, "INFO": info}
    connections: list[asyncio.Transport] = []

    class Answer(asyncio.Protocol):
        """One connection. It closes itself when the client does, as a task that is cancelled early would not."""

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            self.framer = Framer()
            self.transport = cast("asyncio.Transport", transport)
            connections.append(self.transport)

        def data_received(self, data: bytes) -> None:
            for frame in self.framer.feed(data):
                self.transport.write(replies.get(first_word(frame), b"+OK\r\n"))

    listener = await asyncio.get_running_loop().create_server(Answer, "127.0.0.1", 0)
    try:
        yield f"redis://127.0.0.1:{listener.sockets[0].getsockname()[1]}/0"
    finally:
        listener.close()
        for transport in connections:
            transport.abort()


def hello(**said: str) -> bytes:
    """Return a reply to HELLO."""
    words = [word for item in said.items() for word in item]
    return b"%%%d\r\n" % len(said) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word.encode()) for word in words)


async def test_a_server_that_is_too_old() -> None:
    """Redis 6.0, and servers that do not know HELLO, are refused with the version that is needed."""
    async with pretender(hello(server="redis", version="6.0.16", proto="3", role="master")) as url:
        said = await refusal(url)
        assert "6.0.16" in said
        assert "6.2" in said
    unknown, info = b"-ERR unknown command `HELLO`, with args beginning with: `3`, \r\n", b"redis_version:5.0.14\r\n"
    async with pretender(unknown, b"$%d\r\n%b\r\n" % (len(info), info)) as url:
        said = await refusal(url)
        assert "5.0.14" in said
        assert "6.2" in said


@pytest.mark.slow
async def test_a_server_that_is_none() -> None:
    """Whatever else listens there is an error within the time for a connection, and no hang."""
    async with pretender(b"HTTP/1.1 400 Bad Request\r\n\r\n") as url:
        with pytest.raises(RedleaseError):
            async with Redlease.from_url(url):
                pytest.fail("that was no server")


async def test_a_unix_socket(servers: Servers, real_engine: str, make_client: MakeClient) -> None:
    """A unix:// URL serves as well."""
    client = await make_client(url=servers[real_engine].unix_url)
    async with client.lock("r") as hold:
        assert hold.fence


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """A certificate of its own authority for 127.0.0.1, and its key."""
    openssl = shutil.which("openssl")
    assert openssl is not None, "the openssl command is missing"
    files = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        [
            *(
                openssl,
                "req",
                "-x509",
                "-newkey",
                "ec",
                "-pkeyopt",
                "ec_paramgen_curve:prime256v1",
                "-nodes",
                "-days",
                "2",
            ),
            *("-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"),
            *("-out", str(files[0]), "-keyout", str(files[1])),
        ],
        check=True,
        capture_output=True,
    )
    return files


@pytest.mark.slow
async def test_tls(own_server: OwnServer, certificate: tuple[Path, Path], make_client: MakeClient) -> None:
    """A rediss:// URL is verified against the authority given, and refused without it."""
    cert, key = certificate
    port = free_port()
    own_server(
        *("redis7", "--tls-port", str(port), "--tls-cert-file", str(cert), "--tls-key-file", str(key)),
        *("--tls-ca-cert-file", str(cert), "--tls-auth-clients", "no"),
    )
    url = f"rediss://127.0.0.1:{port}/0"
    client = await make_client(url=url, ssl_ca_certs=str(cert))
    lock = client.lock("r")
    async with lock:
        (task,) = await queue_up(lock, 1)
    assert await lock.release(await asyncio.wait_for(task, 5))
    with pytest.raises(RedleaseError, match="certificate"):
        async with Redlease.from_url(url):
            pytest.fail("the authority is not known")


@pytest.mark.parametrize(
    "options", [{}, {"decode_responses": True}, {"decode_responses": True, "max_connections": 1}, {"protocol": 2}]
)
async def test_a_client_that_is_passed_in(
    raw_client: Callable[..., redis.asyncio.Redis], engine: str, prefix: str, options: dict[str, Any]
) -> None:
    """Any redis.asyncio client leads to the server, whatever its settings, and is neither used up nor closed."""
    given = raw_client(**options)
    assert await given.ping()
    async with Redlease(given, prefix=prefix) as client:
        lock = client.lock("r")
        async with lock as hold:
            tasks = [asyncio.create_task(lock.acquire()) for _ in range(5)]
            await until_waiting(lock, 5)
            assert await given.ping()
        for task in tasks:
            permit = await asyncio.wait_for(task, 5)
            assert permit.fence > hold.fence
            assert await lock.release(permit)
    assert await given.ping()


async def test_a_client_used_without_entering(
    client_of_engine: Callable[..., Redlease], engine: str, prefix: str
) -> None:
    """The first call connects; close() ends what it began."""
    client = client_of_engine(prefix=prefix)
    async with client.lock("r") as hold:
        assert hold.fence
    await client.close()
    await client.close()


async def test_a_loss_is_no_refusal(server: Server, make_client: MakeClient, prefix: str) -> None:
    """A body on a server that begins to refuse loses its permit at the end of the lease, with LeaseLost."""
    client = await make_client(url=server.url)
    with pytest.raises(LeaseLost):
        async with client.lock("r", lease=0.6).hold():
            server.cli("CONFIG", "SET", "min-replicas-to-write", "1")
            await asyncio.sleep(30)
    server.cli("CONFIG", "SET", "min-replicas-to-write", "0")
    async with redis.asyncio.Redis.from_url(server.url, decode_responses=True) as raw:
        await eventually(lambda: _nothing(raw, prefix))


async def _nothing(raw: redis.asyncio.Redis, prefix: str) -> bool:
    return await left_over(raw, prefix) == []
