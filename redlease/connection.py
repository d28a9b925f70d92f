"""One multiplexed connection for commands and messages, however many tasks use it.

The first call made in a turn of the event loop leaves at once, and the others of that turn in ever larger batches: the
server works on some while the next are made, and many cost few writes. Replies come back in that order. No call is ever
cancelled on the wire: whoever stops waiting for a reply only stops listening. When the connection is lost, every call
without a reply is told so (its outcome is unknown), and the connection is made anew with back-off and jitter.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import random
import ssl
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Any

from redis import exceptions
from redis.asyncio import ConnectionPool
from redis.asyncio.sentinel import SentinelConnectionPool

from . import wire
from .driver import Driver, ReplyError, error_text, open_driver
from .errors import RedleaseError
from .route import PATIENCE_MS, OnReply, Reply, Route, backed_off, settles

logger = logging.getLogger("redlease")

CONNECT_S = (1.0, 5.0)  # how long one attempt may take: the least, for the sake of short leases, and the most
BACKOFF_S = (0.02, 1.0)  # the first and the longest pause between attempts, before jitter
LIVED_S = 0.25  # a connection that was good for so long begins again with the first pause


class Connection(Route):
    """The one connection of a client.

    Args:
        pool: Where redis-py finds the server.
        prefix: Of the keys and channels.
        channel: What this client listens to.
        on_ready: Called each time the connection is usable.
        on_message: Called with each payload published to `channel`.
    """

    def __init__(
        self,
        pool: ConnectionPool,
        prefix: str,
        channel: str,
        on_ready: Callable[[], None],
        on_message: Callable[[bytes], None],
    ) -> None:
        super().__init__()
        self.ready = False
        self._shortest_ms: Callable[[], float] = lambda: math.inf
        self._round_trip_ms = 0.0
        self.pool = pool
        self.scripts: tuple[wire.Script, ...] = wire.SCRIPTS  # loaded on every connect
        self._prefix = prefix
        self.channel = channel
        self._on_ready = on_ready
        self._listeners: dict[bytes, list[Callable[[bytes], None]]] = {channel.encode(): [on_message]}
        self._driver: Driver | None = None
        # Calls without a reply, in the order sent: the tag that its reply must carry (None: not a script; "": a
        # subscription, whose answer is a push), who is told, and whether that may wait for what came with the reply.
        self._pending: deque[tuple[bytes | None, OnReply, bool]] = deque()
        self._handed_on: list[tuple[OnReply, Reply]] = []
        self._out: list[bytes] = []
        self._enough = 1  # calls for the next write of this turn
        self._tag = 0
        self._changed: asyncio.Event = asyncio.Event()
        self._lost: asyncio.Event = asyncio.Event()
        self._refusal: RedleaseError | None = None
        self.trouble = "it has not been reached yet"
        self._heard_at = 0.0  # by `monotonic`
        self._patience_ms = PATIENCE_MS[1]  # that of the watchdog which is set now
        self._watchdog: asyncio.TimerHandle | None = None
        self._probed = False
        self.server = wire.ServerInfo("", "master")  # what it says of itself on connect
        self._loading = False

    # Calls

    def of(self, resource: wire.Resource) -> Connection:  # noqa: ARG002  it serves every one
        return self

    def send(self, resource: wire.Resource, script: wire.Script, tail: bytes, on_reply: OnReply) -> None:
        """Sends a script call with this loop turn's batch; `tail`: its arguments after the tag. Only while `ready`."""
        self._tag = number = (self._tag + 1) % wire.TAGS
        tag = b"%04x" % number
        self._enqueue(
            b"%b%b$4\r\n%b\r\n%b" % (script.head, resource.packed_keys, tag, tail), tag, on_reply, script.hands_on
        )

    def _enqueue(self, data: bytes, tag: bytes | None, on_reply: OnReply, hands_on: bool = False) -> None:
        self._pending.append((tag, on_reply, hands_on))
        out = self._out
        out.append(data)
        if len(out) >= self._enough:
            if self._enough == 1:
                self._begin_turn()
            else:
                self._enough *= 2
            self._write()

    def _begin_turn(self) -> None:
        loop = asyncio.get_running_loop()
        if self._watchdog is None:
            self._heard_at = monotonic()
            self._watch(loop)
        # A caller that is alone is spared the end of its turn; asyncio's own loops show what else is to run in it.
        if len(self._pending) > 1 or getattr(loop, "_ready", True):
            self._enough = 2
            loop.call_soon(self._end_turn)

    def _end_turn(self) -> None:
        self._enough = 1
        self._write()

    def _write(self) -> None:
        out, self._out = self._out, []
        # A forked child has the same socket: what its copies of the tasks say as they end is not the parent's word.
        if self._driver is not None and out and self._process == os.getpid():
            self._driver.write(b"".join(out))

    def be_patient_for(self, shortest_ms: Callable[[], float]) -> None:
        """Asks `shortest_ms` how soon a half-open connection has to be noticed."""
        self._shortest_ms = shortest_ms

    @property
    def patience_ms(self) -> float:
        """How long a call may stay unanswered now: longer than the network takes, whatever the leases would want."""
        if not self.ready:
            return PATIENCE_MS[1]
        return max(self._least_ms, min(PATIENCE_MS[1], self._shortest_ms()))

    @property
    def _least_ms(self) -> float:
        return max(PATIENCE_MS[0], 3 * self._round_trip_ms)

    def look_sooner(self, wait_ms: float) -> None:
        """Something is kept from now on that has to be renewed within `wait_ms`."""
        if self._watchdog is None or wait_ms >= self._patience_ms:
            return
        loop = asyncio.get_running_loop()
        if self._watchdog.when() > loop.time() + max(self._least_ms, wait_ms) / 2000:
            self._watchdog.cancel()
            self._watch(loop)

    # Messages

    async def subscribe(self, channel: str, listener: Callable[[bytes], None]) -> None:
        """Listens to one more channel, now and after every reconnect."""
        self.listen(channel, listener)
        if self._driver is not None and len(self._listeners[channel.encode()]) == 1:
            await self._subscribe(channel)

    def listen(self, channel: str, listener: Callable[[bytes], None]) -> None:
        """What `subscribe` does before anything is connected."""
        self._listeners.setdefault(channel.encode(), []).append(listener)

    def unsubscribe(self, channel: str, listener: Callable[[bytes], None]) -> None:
        """Ends one `subscribe`."""
        listeners = self._listeners.get(channel.encode(), [])
        if listener not in listeners:
            return
        listeners.remove(listener)
        if not listeners:
            del self._listeners[channel.encode()]
            if self._driver is not None:
                self._subscription("UNSUBSCRIBE", channel, lambda reply: None)

    async def _subscribe(self, *channels: str) -> None:
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        for channel in channels:
            self._subscription("SUBSCRIBE", channel, settles(future))
        reply = await future if self._driver is not None and self._driver.inline_push else None
        if isinstance(reply, wire.Fault):
            raise reply.error()

    def _subscription(self, verb: str, channel: str, on_reply: OnReply) -> None:
        command = wire.plain(verb, channel)
        if self._driver is None:
            raise exceptions.ConnectionError(self.trouble)
        if self._driver.inline_push:
            self._enqueue(command, b"", on_reply)
        else:
            self._driver.subscribe(command)

    # What comes in (the driver calls these)

    def on_reply(self, reply: Any) -> None:
        if not self._pending:
            self._abort("the server sent a reply that nobody asked for")
            return
        tag, on_reply, hands_on = self._pending[0]
        if type(reply) is ReplyError:
            reply = wire.Fault(str(reply))
            if reply.needs_new_connection and self.ready:
                self._abort(reply.text)
                return
            if reply.forgot_scripts:
                self._load_again()
        elif tag is not None and (type(reply) is not list or not reply or reply[0] != tag):
            self._abort("the server sent a reply that answers another call")
            return
        self._pending.popleft()
        if hands_on:
            self._handed_on.append((on_reply, reply))
            return
        try:
            on_reply(reply)
        except Exception as error:  # noqa: BLE001  a mistake in one listener must not silence the others
            self._report(error)

    def on_read(self) -> None:
        """Tells who has handed something on, after those to whom it went: their tasks begin first, as others wait."""
        self._heard_at = monotonic()
        if self._handed_on:
            handed_on, self._handed_on = self._handed_on, []
            for on_reply, reply in handed_on:
                self._tell(on_reply, reply)

    def _load_again(self) -> None:
        """Somebody flushed the scripts: they are loaded once more, and whoever got the error repeats its call."""
        if not self._loading:
            self._loading = True
            for script in self.scripts[:-1]:
                self._enqueue(wire.plain("SCRIPT", "LOAD", script.text), None, lambda _: None)
            last = wire.plain("SCRIPT", "LOAD", self.scripts[-1].text)
            self._enqueue(last, None, self._loaded)

    def _loaded(self, _: Reply) -> None:
        self._loading = False

    def on_push(self, push: list[Any]) -> None:
        if push[0] == b"message":
            for listener in tuple(self._listeners.get(push[1], ())):
                self._tell(listener, push[2])
        elif push[0].endswith(b"subscribe") and self._pending and self._pending[0][0] == b"":
            self._tell(self._pending.popleft()[1], push)

    def on_lost(self, why: str) -> None:
        self._driver = None
        self._abort(why)

    @classmethod
    def _tell(cls, listener: Callable[[Any], None], what: Any) -> None:
        try:
            listener(what)
        except Exception as error:  # noqa: BLE001  as above
            cls._report(error)

    @staticmethod
    def _report(error: Exception) -> None:
        context = {"message": "redlease: a listener failed", "exception": error}
        asyncio.get_running_loop().call_exception_handler(context)

    def _abort(self, why: str) -> None:
        """Gives the connection up; every call without a reply is told."""
        self.trouble = why
        self.ready = False
        self._changed.clear()
        driver, self._driver = self._driver, None
        if driver is not None:
            driver.abort()
        self._out.clear()
        self.on_read()
        pending, self._pending = self._pending, deque()
        for _, on_reply, _ in pending:
            self._tell(on_reply, None)
        self._lost.set()

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        self._patience_ms = self.patience_ms
        due = loop.time() + self._patience_ms / 2000
        self._watchdog = loop.call_at(due, self._look, loop, due)

    def _look(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        """Gives up a connection on which calls stay unanswered: a half-open one tells nothing by itself."""
        self._watchdog = None
        if not self._pending:
            return
        late = loop.time() - due
        if late > self.patience_ms / 4000:  # the loop stood still: what came meanwhile has not been read yet
            self._heard_at = monotonic()
        if monotonic() - self._heard_at > self.patience_ms / 1000:
            self._abort(f"no answer for {self.patience_ms / 1000:g} s")
        else:
            self._watch(loop)

    @property
    def moves(self) -> bool:
        """Whether the primary is looked for on every connect, so that a replica is not there for good."""
        return isinstance(self.pool, SentinelConnectionPool)

    # Life

    def go_to(self, pool: ConnectionPool) -> None:
        """Looks for the server there from now on."""
        self.pool = pool
        self._refusal = None

    async def until_ready(self, resource: wire.Resource | None = None) -> None:  # noqa: ARG002  it serves every one
        self.start()
        while not self.ready:
            if self._refusal is not None:
                raise self._refusal
            await self._changed.wait()

    @property
    def refusal(self) -> RedleaseError | None:
        """Why the server, reached, would not serve this client; None while there is hope."""
        return self._refusal

    async def close(self) -> None:
        """Ends the connection; bounded in time."""
        self._closed = True
        if not self.at_home:
            return  # nothing of it can be ended from here
        if self._watchdog is not None:
            self._watchdog.cancel()
        self._write()
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        driver = self._driver
        self._abort("the client is closed")
        if driver is not None:
            await driver.wait_closed()

    async def _run(self) -> None:
        attempt = 0
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            self._lost.clear()
            try:
                async with asyncio.timeout(min(CONNECT_S[1], max(CONNECT_S[0], self._shortest_ms() / 1000))):
                    await self._open()
            except Exception as error:  # noqa: BLE001  whatever it is, somebody waits to be told
                self._abort(explain(error))
                self._refusal = refusal_of(error)
                self._changed.set()  # whoever waits looks at the refusal; without one it waits on
                self._changed.clear()
                if self._refusal is not None:
                    self._on_ready()
            else:
                if not self._lost.is_set():  # else it was given up with the last reply, and every call was told
                    self._become_ready()
                await self._lost.wait()
                logger.warning("the connection to Redis was lost: %s; connecting again", self.trouble)
            attempt = 0 if loop.time() - began > LIVED_S else attempt + 1
            first_s, most_s = BACKOFF_S
            await asyncio.sleep(backed_off(first_s, attempt - 1, most_s) * random.uniform(0.5, 1.0))

    def _become_ready(self) -> None:
        self._refusal = None
        self.ready = True
        self._changed.set()
        self._on_ready()

    async def _open(self) -> None:
        """Connects, looks at the server, listens and loads the scripts."""
        self._driver = await open_driver(self.pool, self)
        began = asyncio.get_running_loop().time()
        self._check_role(await self._exchange(wire.plain("HELLO", *self._driver.protocol)))
        self._round_trip_ms = (asyncio.get_running_loop().time() - began) * 1000
        loads = [self._exchange(wire.plain("SCRIPT", "LOAD", script.text)) for script in self.scripts]
        await self._subscribe(*(channel.decode() for channel in self._listeners))
        for reply in await asyncio.gather(*loads):
            if isinstance(reply, wire.Fault):
                raise reply.error()
        if not self._probed:
            await self._probe()
            await self._look_at_eviction()
            self._probed = True

    def _exchange(self, command: bytes) -> asyncio.Future[Any]:
        """Sends a command that is no script, before the connection is ready; raises when it is lost meanwhile."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def settle(reply: Any) -> None:
            if future.done():
                return
            if reply is None:
                future.set_exception(exceptions.ConnectionError(self.trouble))
                future.exception()  # read here: of several such calls only the first is awaited
            else:
                future.set_result(reply)

        self._enqueue(command, None, settle)
        return future

    def _check_role(self, hello: Any) -> None:
        if isinstance(hello, list):
            hello = dict(zip(hello[::2], hello[1::2], strict=True))
        if not isinstance(hello, dict):
            return  # some users may not call HELLO a second time
        said = {_text(key): _text(value) for key, value in hello.items()}
        server = wire.ServerInfo(said.get("version", ""), said.get("role", "master"))
        self.server = server
        if said.get("server") in ("redis", "valkey") and server.too_old:
            raise RedleaseError(f"the server is version {server.version}; redlease needs Redis 6.2 or newer, or Valkey")
        if server.role in ("slave", "replica"):
            if self.moves:
                raise exceptions.ConnectionError("it is a replica now, and what took its place is not known yet")
            raise RedleaseError("the server is a read-only replica. Connect to its primary, or through Sentinel")

    def _probed_by(self) -> tuple[wire.Resource, str]:
        return wire.Resource(self._prefix, f"probe of {self.channel}"), self.channel

    async def _probe(self) -> None:
        """Finds missing rights now, so that no operation fails half-way for want of one."""
        resource, channel = self._probed_by()
        await self._exchange(wire.plain("SCRIPT", "LOAD", wire.PROBE.text))
        call = wire.plain("EVALSHA", wire.PROBE.sha, "4", *resource.keys, "probe", channel)
        reply = await self._exchange(call)
        errors = [reply.text] if isinstance(reply, wire.Fault) else [_text(error) for error in reply[1:]]
        missing = [error for error in errors if wire.Fault(error).not_allowed]
        if missing:
            raise RedleaseError(
                f"the Redis user lacks rights that redlease needs: {'; '.join(missing)}. Grant them, for example: "
                f"ACL SETUSER <user> ~{self._prefix}:* &{self._prefix}:* +@hash +@sortedset +@scripting +@pubsub "
                "+time +pexpireat +hello +info +ping"
            )

    async def _look_at_eviction(self) -> None:
        info = await self._exchange(wire.plain("INFO", "memory"))
        text = info.decode() if isinstance(info, bytes) else str(info)
        policy = wire.info_value(text, "maxmemory_policy")
        if policy not in ("", "noeviction"):
            logger.warning(
                "the server's maxmemory-policy is %r: it may drop the keys of locks when memory runs short. "
                "Use a server with 'noeviction' for locks",
                policy,
            )


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def explain(error: Exception) -> str:
    """The error in a few words."""
    return error_text(error) if str(error) else type(error).__name__


def refusal_of(error: Exception) -> RedleaseError | None:
    """The error for callers when the server was reached and said no; None for one that could not be reached."""
    if isinstance(error, RedleaseError):
        return error
    if isinstance(error, exceptions.AuthenticationError | exceptions.AuthorizationError):
        return RedleaseError(f"the server refused the user name or password: {error}. Put the right ones into the URL")
    if isinstance(error.__cause__ or error.__context__, ssl.SSLCertVerificationError):
        return RedleaseError(f"the server's certificate is not trusted: {error}. Give its authority as `ssl_ca_certs`")
    if isinstance(error, exceptions.ResponseError) or "unknown command" in str(error):
        return _refused_reply(wire.Fault(error_text(error)))
    if isinstance(error, exceptions.RedisError | OSError | TimeoutError):
        return None
    return RedleaseError(f"no connection can be made with these settings: {error!r}")


def _refused_reply(fault: wire.Fault) -> RedleaseError | None:
    if "HELLO" in fault.text.upper() and "unknown command" in fault.text:
        return RedleaseError("the server is older than Redis 6; redlease needs Redis 6.2 or newer, or Valkey")
    return None if fault.passes else fault.error()
