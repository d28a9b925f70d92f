"""One multiplexed connection for commands and messages, shared by all tasks of a client.

The first call made in an iteration of the event loop is written at once, further calls of that iteration in ever larger
batches: the server works on one batch while the next is built, and many calls need few writes. Replies come in the
order of the calls. A call is never cancelled on the wire: a task that stops waiting only ignores the reply. When the
connection is lost, every call without a reply gets None (its outcome is unknown), and the client reconnects with
back-off and jitter.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import random
from collections import deque
from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import Any

from redis import exceptions
from redis.asyncio import ConnectionPool
from redis.asyncio.sentinel import SentinelConnectionPool

from redlease._core.log import about, report
from redlease._core.protocol import encoding, scripts
from redlease._core.protocol.encoding import Resource
from redlease._core.protocol.error_replies import ErrorReply
from redlease._core.protocol.replies import ServerInfo
from redlease._core.protocol.scripts import Script
from redlease.errors import RedleaseError
from redlease.events import Disconnected, Reconnected

from .base import SILENCE_MS, GrowingTimeout, OnReply, Reply, Transport, backed_off, end, set_result_once
from .opening import dialects
from .opening.delivery import DeliveryProbe
from .opening.driver import Driver, ReplyError, error_text
from .opening.drivers import open_driver
from .opening.handshake import (
    INFO_PARTS,
    check_eviction,
    explain,
    is_mistake,
    needs_texts,
    probe,
    read_info,
    read_server,
    refusal_of,
    run_once,
    settle_exchange,
)
from .opening.manner import Manner
from .window import Windowed

logger = logging.getLogger("redlease")

CONNECT_S = (1.0, 5.0)  # the bounds of the time limit of an attempt: short leases shorten it, late answers prolong it
BACKOFF_S = (0.02, 1.0)  # the first and the longest pause between attempts, before jitter
AGAIN_S = 0.1  # the pause before a failed callback is retried
LIVED_S = 0.25  # after a connection that lasted this long, the back-off starts at the first pause again


class Connection(Windowed, Transport):
    """The one connection of a client.

    Args:
        pool: The redis-py pool that knows the server.
        prefix: The prefix of the keys and channels.
        on_ready: Called each time the connection is usable.
        on_message: Called with each payload published to `channel`.
        channel: The channel that this client subscribes to; by default one derived from its id.
    """

    in_cluster = False

    def __init__(
        self,
        pool: ConnectionPool,
        prefix: str,
        on_ready: Callable[[], None],
        on_message: Callable[[bytes], None],
        channel: str = "",
    ) -> None:
        super().__init__()
        self.ready = False
        self._shortest_ms: Callable[[], float] = lambda: math.inf
        self._round_trip_ms = 0.0
        self.pool = pool
        self.scripts: tuple[Script, ...] = scripts.SCRIPTS  # loaded on every connect
        self._prefix = prefix
        self.channel = channel
        self._on_ready = on_ready
        self._on_message = on_message
        self._listeners: dict[bytes, list[Callable[[bytes], None]]] = {}
        self._driver: Driver | None = None
        # Of a driver with a connection of its own for messages: subscribe calls without a reply, with verb and channel.
        self._subscriptions: deque[tuple[bytes, bytes, OnReply]] = deque()
        self._delivery: DeliveryProbe | None = None
        self._probe_channel = ""
        self._may_write = True
        self._probe_losses = 0  # connections lost one after another while messages were probed
        # Calls without a reply, in the order sent: the tag that the reply must carry (None: not a script; "": a
        # subscription, answered by a push), the callback, whether it runs after the pushes of that read, and its units.
        self._pending: deque[tuple[bytes | None, OnReply, bool, int]] = deque()
        self._handed_on: deque[tuple[OnReply, Reply]] = deque()
        self._out: list[bytes] = []
        self._changed: asyncio.Event = asyncio.Event()
        self._lost: asyncio.Event = asyncio.Event()
        self._refusal: RedleaseError | None = None
        self.trouble = explain(TimeoutError("it has not been reached yet"), pool)
        self._heard_at = 0.0  # by `monotonic`
        self._silence_limit_ms = SILENCE_MS[1]  # of the current watchdog
        self._watchdog: asyncio.TimerHandle | None = None
        self._probed = False
        self._lost_at: float | None = None  # when an established connection was lost; by `monotonic`
        self.server = ServerInfo("", "master")  # read on connect
        self._loading = False
        self._connect_timeout = GrowingTimeout(CONNECT_S[1])

    # Calls

    def endpoint_for(self, resource: Resource) -> Connection:  # noqa: ARG002  it serves every resource
        return self

    def master_pools(self) -> list[ConnectionPool]:
        return [self.pool]

    def _enqueue(
        self, data: bytes, tag: bytes | None, on_reply: OnReply, deliver_after_pushes: bool = False, units: int = 0
    ) -> None:
        self._pending.append((tag, on_reply, deliver_after_pushes, units))
        out = self._out
        out.append(data)
        if len(out) >= self._enough:
            if self._enough == 1:
                self._begin_batch()
            else:
                self._enough *= 2
            self._write()

    def _begin_batch(self) -> None:
        loop = asyncio.get_running_loop()
        if self._watchdog is None:
            self._heard_at = monotonic()
            self._watch(loop)
        # A lone call needs no batch, so skip `call_soon`; asyncio's own loops show in `_ready` what else will run.
        if len(self._pending) > 1 or getattr(loop, "_ready", True):
            self._enough = 2
            loop.call_soon(self._end_batch)

    def _write(self) -> None:
        out, self._out = self._out, []
        # A forked child shares the socket: its copies of the tasks must not send anything in the parent's name.
        if self._driver is not None and out and self._process == os.getpid():
            self._driver.write(b"".join(out))

    @property
    def silent_ms(self) -> float:
        return (monotonic() - self._heard_at) * 1000

    def set_silence_limit(self, shortest_ms: Callable[[], float]) -> None:
        self._shortest_ms = shortest_ms

    @property
    def silence_limit_ms(self) -> float:
        """How long, in ms, a call may stay unanswered: short leases reduce it, but never below the round-trip time."""
        if not self.ready:
            return SILENCE_MS[1]
        return max(self._least_ms, min(SILENCE_MS[1], self._shortest_ms()))

    @property
    def _least_ms(self) -> float:
        return max(SILENCE_MS[0], 3 * self._round_trip_ms)

    def check_silence_by(self, wait_ms: float) -> None:
        if self._watchdog is None or wait_ms >= self._silence_limit_ms:
            return
        loop = asyncio.get_running_loop()
        if self._watchdog.when() > loop.time() + max(self._least_ms, wait_ms) / 2000:
            self._watchdog.cancel()
            self._watch(loop)

    # Messages

    async def subscribe(self, channel: str, listener: Callable[[bytes], None]) -> None:
        self.listen(channel, listener)
        if len(self._listeners[channel.encode()]) > 1:
            return
        while self._driver is not None and isinstance(fault := await self._subscribe(channel), ErrorReply):
            if fault.lacks_command:
                return  # the delivery probe has warned that no messages arrive
            if not fault.is_transient:
                raise fault.error()
            await asyncio.sleep(fault.retry_ms / 1000)

    def listen(self, channel: str, listener: Callable[[bytes], None]) -> None:
        """Adds a listener; the channel is subscribed to on connect."""
        self._listeners.setdefault(channel.encode(), []).append(listener)

    def unsubscribe(self, channel: str, listener: Callable[[bytes], None]) -> None:
        listeners = self._listeners.get(channel.encode(), [])
        if listener not in listeners:
            return
        listeners.remove(listener)
        if not listeners:
            del self._listeners[channel.encode()]
            if self._driver is not None:
                self._subscription("UNSUBSCRIBE", channel, lambda reply: None)

    def _subscribe(self, *channels: str) -> asyncio.Future[Reply]:
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        for channel in channels:
            self._subscription("SUBSCRIBE", channel, set_result_once(future))
        return future

    def _subscription(self, verb: str, channel: str, on_reply: OnReply) -> None:
        command = encoding.plain(verb, channel)
        if self._driver is None:
            raise exceptions.ConnectionError(self.trouble)
        if self._driver.inline_push:
            self._enqueue(command, b"", on_reply)
        else:
            self._subscriptions.append((verb.lower().encode(), channel.encode(), on_reply))
            self._driver.subscribe(command)

    # Called by the driver

    def on_reply(self, reply: Any) -> None:
        if not self._pending:
            self._abort("the server sent a reply that nobody asked for")
            return
        tag, on_reply, deliver_after_pushes, units = self._pending[0]
        if type(reply) is ReplyError:
            reply = ErrorReply(str(reply))
            if reply.needs_new_connection and self.ready:
                self._abort(reply.text)
                return
            if reply.forgot_scripts:
                self._forget_scripts()
                self._load_again()
        elif tag is not None and (type(reply) is not list or not reply or reply[0] != tag):
            self._abort("the server sent a reply that answers another call")
            return
        self._pending.popleft()
        self._room += units
        if self._is_full and self._room >= self._window.half:
            self._send_waiting()  # so that the server works on these while the other replies are handled here
        if deliver_after_pushes:
            self._handed_on.append((on_reply, reply))
            return
        try:
            on_reply(reply)
        except Exception as error:  # noqa: BLE001  a bug in one callback must not stop the others
            self._mistaken(on_reply, error)

    def _mistaken(self, on_reply: OnReply, error: Exception) -> None:
        """Reports a failed callback, and soon calls it with None, so that it repeats its call."""
        report(error)
        if not self._closed:
            asyncio.get_running_loop().call_later(AGAIN_S, self._answer, on_reply, None)

    def on_read(self) -> None:
        """Runs release callbacks after the grants that were read with them, so that new holders start first."""
        self._heard_at = monotonic()
        while self._handed_on:
            self._answer(*self._handed_on.popleft())
        if self._is_full:
            self._send_waiting()

    def _load_again(self) -> None:
        """Loads the scripts again after SCRIPT FLUSH; callers repeat the calls that failed."""
        if not self._loading and not self._sends_texts:
            self._loading = True
            for script in self.scripts[:-1]:
                self._enqueue(encoding.plain("SCRIPT", "LOAD", script.text), None, lambda _: None)
            last = encoding.plain("SCRIPT", "LOAD", self.scripts[-1].text)
            self._enqueue(last, None, self._loaded)

    def _loaded(self, reply: Reply) -> None:
        self._loading = False
        if isinstance(reply, ErrorReply) and not reply.is_transient:
            self._abort(reply.text)  # the reconnect finds the cause and reports it to the waiting callers

    def on_push(self, push: list[Any]) -> None:
        if push[0] == b"message" or push[0] == b"smessage":
            for listener in tuple(self._listeners.get(push[1], ())):
                self._notify(listener, push[2])
        elif push[0].endswith(b"subscribe"):
            if self._subscriptions and self._subscriptions[0][:2] == (push[0], push[1]):
                self._notify(self._subscriptions.popleft()[-1], push)
            elif self._pending and self._pending[0][0] == b"":
                self._notify(self._pending.popleft()[1], push)

    def on_subscription_refused(self, error: ReplyError) -> None:
        if self._subscriptions:
            self._notify(self._subscriptions.popleft()[-1], ErrorReply(str(error)))

    def on_lost(self, why: str) -> None:
        self._driver = None
        self._abort(why)

    @staticmethod
    def _notify(listener: Callable[[Any], None], what: Any) -> None:
        try:
            listener(what)
        except Exception as error:  # noqa: BLE001  as above
            report(error)

    def _answer(self, on_reply: OnReply, reply: Reply) -> None:
        try:
            on_reply(reply)
        except Exception as error:  # noqa: BLE001  as above
            self._mistaken(on_reply, error)

    def _abort(self, why: str) -> None:
        """Closes the connection; every call without a reply gets None."""
        self._lost.set()  # first, in case a later step fails: the reconnect cleans up the rest
        self.trouble = why.rstrip(". ")
        self.ready = False
        self._lost_while_probing()
        self._stop_probing()
        self._changed.clear()
        if self._driver is not None:
            self._driver.abort()
            self._driver = None
        self._out.clear()
        unsent = self._reset_window()
        self.on_read()
        pending = [*(call[1] for call in self._pending), *(call[-1] for call in self._subscriptions), *unsent]
        self._pending.clear()
        self._subscriptions.clear()
        for on_reply in pending:
            self._answer(on_reply, None)

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        self._silence_limit_ms = self.silence_limit_ms
        due = loop.time() + self._silence_limit_ms / 2000
        self._watchdog = loop.call_at(due, self._check_silence, loop, due)

    def _check_silence(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        """Closes a connection on which calls stay unanswered: a half-open connection reports no error."""
        self._watchdog = None
        try:
            self._abort_if_silent(loop, due)
        except Exception as error:  # noqa: BLE001  nothing else detects a half-open connection
            report(error)
            self._watchdog = loop.call_later(AGAIN_S, self._check_silence, loop, loop.time() + AGAIN_S)

    def _abort_if_silent(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        if not self._pending:
            return
        late = loop.time() - due
        if late > self.silence_limit_ms / 4000:  # the loop was blocked: data may have arrived that is not read yet
            self._heard_at = monotonic()
        if monotonic() - self._heard_at > self.silence_limit_ms / 1000:
            self._abort(f"no answer for {self.silence_limit_ms / 1000:g} s")
        else:
            self._watch(loop)

    @property
    def role_may_change(self) -> bool:
        """Whether every connect looks up the primary, so that finding a replica is a temporary error."""
        return isinstance(self.pool, SentinelConnectionPool)

    # Life

    def go_to(self, pool: ConnectionPool) -> None:
        """Uses this pool for the next connect."""
        self.pool = pool
        self._refusal = None

    async def until_ready(self, resource: Resource | None = None) -> None:  # noqa: ARG002  it serves every resource
        self.start()
        while not self.ready:
            if self._refusal is not None:
                raise self._refusal
            await self._changed.wait()

    @property
    def refusal(self) -> RedleaseError | None:
        """The error if the server was reached and refused this client; None otherwise."""
        return self._refusal

    async def close(self) -> None:
        self._closed = True
        if not self.in_own_loop:
            return  # its tasks belong to another loop or process
        if self._watchdog is not None:
            self._watchdog.cancel()
        self._send_all()
        try:
            if self._task is not None:
                await end(self._task)
        finally:
            driver = self._driver
            self._abort("the client is closed")
        if driver is not None:
            await driver.wait_closed()

    def _take_channel(self) -> None:
        self.channel = self.channel or f"{self._prefix}:client:{self.client_id}"
        self.listen(self.channel, self._on_message)

    async def _run(self) -> None:
        attempt = 0
        loop = asyncio.get_running_loop()
        while not self._closed:  # a cancellation may be swallowed, see `end`
            began = loop.time()
            try:
                await self._serve()
            except Exception as error:  # noqa: BLE001  waiting callers must learn of any error
                self._notify(self._failed, error)
            attempt = 0 if loop.time() - began > LIVED_S else attempt + 1
            first_s, most_s = BACKOFF_S
            await asyncio.sleep(backed_off(first_s, attempt - 1, most_s) * random.uniform(0.5, 1.0))

    async def _serve(self) -> None:
        """Connects, and returns when that connection is lost."""
        if self._driver is not None or self._pending:  # left by a failed attempt
            self._abort(self.trouble)
        self._lost.clear()
        async with self._connect_timeout.attempt(max(CONNECT_S[0], self._shortest_ms() / 1000)):
            await self._open()
        if not self._lost.is_set():  # else it was lost with the last reply, and `_abort` has run
            if self._lost_at is not None:
                lost_s, self._lost_at = monotonic() - self._lost_at, None
                logger.warning("reconnected to Redis after %.1f s", lost_s, extra=about())
                if self.emit is not None:
                    self.emit(Reconnected(lost_s))
            self._become_ready()
        await self._lost.wait()
        self._lost_at = self._lost_at or monotonic()
        logger.warning("the connection to Redis was lost: %s; connecting again", self.trouble, extra=about())
        if self.emit is not None:
            self.emit(Disconnected(self.trouble))

    def _failed(self, error: Exception) -> None:
        """Aborts after a failed attempt; if the server refused, wakes the waiting callers with that error."""
        # Once a connection has worked, an unexpected error is a bug and not a wrong setting.
        mistake = self._probed and is_mistake(error)
        if mistake:
            report(error)
        self._abort(explain(error, None if self._probed else self.pool))
        self._refusal = None if mistake else refusal_of(error, self._prefix, cluster=self.in_cluster)
        self._changed.set()  # waiting callers check the refusal, and keep waiting if there is none
        self._changed.clear()
        if self._refusal is not None:
            self._on_ready()

    def _become_ready(self) -> None:
        self._refusal = None
        self.ready = True
        self._changed.set()
        self._on_ready()

    async def _open(self) -> None:
        """Connects with the protocol that works."""
        protocol = self.protocol or dialects.protocol_for(self.pool)
        try:
            await self._open_with(protocol)
        except exceptions.RedisError as error:
            if protocol == 3 and self.protocol is None and dialects.refuses_resp3(error_text(error)):
                dialects.remember_resp2(self.pool)
                raise exceptions.ConnectionError(f"RESP3 does not work: {error_text(error)}") from error
            raise

    async def _open_with(self, protocol: dialects.Protocol) -> None:
        """Connects, checks the server, subscribes and loads the scripts."""
        driver = self._driver = await open_driver(self.pool, self, protocol)
        began = asyncio.get_running_loop().time()
        hello = await self._exchange(encoding.plain("HELLO", str(protocol)))
        self._round_trip_ms = (asyncio.get_running_loop().time() - began) * 1000
        if driver.protocol == 3 and isinstance(hello, list):  # of RESP3 it is a map
            raise exceptions.ResponseError("NOPROTO HELLO 3 is granted, and RESP2 is spoken")
        if isinstance(hello, ErrorReply):
            hello = read_info([await self._exchange(encoding.plain("INFO", part)) for part in INFO_PARTS])
        self._check_role(hello)
        # Subscribed first: where RESP3 has no other commands after that, the replies to the next ones tell.
        subscribing = self._subscribe(*(channel.decode() for channel in self._listeners))
        loads = [self._exchange(encoding.plain("SCRIPT", "LOAD", script.text)) for script in self.scripts]
        subscribed, *loaded = await asyncio.gather(subscribing, *loads)
        self._sends_texts = needs_texts(loaded)
        if isinstance(subscribed, ErrorReply) and not subscribed.lacks_command:
            raise exceptions.ResponseError(subscribed.text)
        if not self._probed:
            run = partial(run_once, self._exchange, sends_text=self._sends_texts)
            self._may_write = await probe(run, self._probed_by()[0], self._prefix, cluster=self.in_cluster)
            await check_eviction(self._exchange)
            self._probed = True
        if self._may_write:
            await self._probe_delivery()
        else:  # a reader may not publish, so it cannot know
            self._on_delivery(None)

    # Messages arrive, or not

    async def _probe_delivery(self) -> None:
        """Finds out whether messages arrive: usually at once, or else while calls are served already."""
        resource, channel = self._probed_by()
        self._delivery = probe = DeliveryProbe(self._on_delivery)
        self._probe_channel = self._listen_for(probe, resource)
        reply = await run_once(self._exchange, scripts.DELIVER, resource, channel, sends_text=self._sends_texts)
        if isinstance(reply, ErrorReply):
            self._on_delivery(None)  # it did not run, as the slot has moved for example: nothing is known
        elif reply[1]:
            probe.refused(reply[1].decode())

    def _listen_for(self, probe: DeliveryProbe, resource: Resource) -> str:  # noqa: ARG002  one channel is for all
        self.listen(self.channel, probe.arrived)
        return self.channel

    def _stop_probing(self) -> None:
        probe, self._delivery = self._delivery, None
        if probe is not None:
            probe.cancel()
            self.unsubscribe(self._probe_channel, probe.arrived)

    def _on_delivery(self, reason: str | None) -> None:
        self._stop_probing()
        self._probe_losses = 0
        self.set_manner(self._manner(reason))

    def _manner(self, silence: str | None) -> Manner:
        protocol = 3 if self._driver is None else self._driver.protocol
        return Manner(protocol, self._sends_texts, silence)

    def _lost_while_probing(self) -> None:
        """Notes a connection that was lost as soon as a message was published: some servers do that with RESP3."""
        if self._delivery is not None and self._delivery.is_open:
            self._probe_losses += 1
            if self._probe_losses >= dialects.LOSSES_MOST and self.protocol is None:
                dialects.remember_resp2(self.pool)

    def _exchange(self, command: bytes) -> asyncio.Future[Any]:
        """Sends a command that is not a script call, before the connection is ready.

        Its future raises ConnectionError if the connection is lost meanwhile or the server is loading or busy.
        """
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._enqueue(command, None, lambda reply: settle_exchange(future, reply, self.trouble))
        return future

    def _check_role(self, hello: Any) -> None:
        # A former primary may become one again, or its host name may point to another server.
        self.server = read_server(hello, was_primary=self.role_may_change or self._probed) or self.server

    def _probed_by(self) -> tuple[Resource, str]:
        return Resource(self._prefix, f"probe of {self.channel}"), self.channel
