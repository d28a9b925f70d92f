"""The interface to the servers that a single connection and a cluster share."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

from redis.asyncio import ConnectionPool

from redlease._core import clock
from redlease._core.log import about
from redlease._core.protocol import encoding
from redlease._core.protocol.encoding import Resource
from redlease._core.protocol.error_replies import ErrorReply
from redlease._core.protocol.scripts import Script
from redlease.errors import ClientClosed, RedleaseError, Unavailable
from redlease.events import Connected, OnEvent

from .opening.delivery import ARRIVES_S
from .opening.dialects import Protocol as RespVersion
from .opening.manner import Manner

logger = logging.getLogger("redlease")

# None: the connection was lost, and it is unknown whether the server executed the call.
Reply = list[Any] | ErrorReply | None
T = TypeVar("T")
OnReply = Callable[[Reply], None]
Departs = Callable[[], bool]
Reached = Callable[[Resource], bool]

# How long a call may stay unanswered before the connection counts as half-open, at least and at most; within that, the
# shortest lease decides.
SILENCE_MS = (250.0, 3000.0)
LIMIT_MS = 5000.0  # the default time limit of calls without a timeout of their own
CANCEL_AGAIN_S = 0.1  # after which a task that goes on is cancelled again
CLIENT_DEFAULT = -1.0  # as a `limit_ms`: the client's default


def backed_off(first: float, times: int, most: float) -> float:
    """Returns the pause after `times` failures: it doubles each time, up to `most`."""
    return min(most, first * 2.0 ** min(times, 10))  # bounds the power, which could overflow a float


def set_result_once(future: asyncio.Future[T]) -> Callable[[T], None]:
    """Returns a callback that sets the future's result, unless the future is done."""
    return lambda result: None if future.done() else future.set_result(result)


def _is_waited_for(future: asyncio.Future[Any]) -> bool:
    return not future.done()


class GrowingTimeout:
    """The time limit of attempts that begin from the start each time.

    Each attempt that runs out of time doubles it until one succeeds: who is slow, as over a long way or on a machine
    under load, would never be heard else.
    """

    def __init__(self, most_s: float) -> None:
        self._most_s = most_s
        self._late = 0  # attempts that ran out of time

    @contextlib.asynccontextmanager
    async def attempt(self, first_s: float) -> AsyncGenerator[None]:
        """Limits one attempt; `first_s`: the limit if none was late before.

        Raises:
            TimeoutError: The time is over.
        """
        try:
            async with asyncio.timeout(backed_off(first_s, self._late, self._most_s)):
                yield
        except TimeoutError:
            self._late += 1
            raise
        self._late = 0


async def end(task: asyncio.Task[Any]) -> None:
    """Cancels a task until it has ended; raises what it raised, unless that is its cancellation."""
    # redis-py connects and sends under asyncio.wait_for, which before Python 3.12 swallows a cancellation that comes at
    # the moment at which what it waits for is done.
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=CANCEL_AGAIN_S)
    if not task.cancelled():
        task.result()


def all_resources(_: Resource) -> bool:
    """The `Reached` of a transport on which all resources can be called."""
    return True


class Answer(NamedTuple):
    """The reply to a call, without its tag, and the local time at which the call was sent."""

    sent_ms: float
    values: list[Any]


class Endpoint(Protocol):
    """The connection that serves a resource now, ready or not."""

    @property
    def pool(self) -> ConnectionPool | None: ...  # that leads to the server, if it is known
    @property
    def ready(self) -> bool: ...
    @property
    def refusal(self) -> RedleaseError | None: ...
    @property
    def silent_ms(self) -> float: ...  # since something was read, or since the first call after a pause
    def send(
        self, resource: Resource, script: Script, tail: bytes, on_reply: OnReply, departs: Departs | None = None
    ) -> bool:
        """Sends a script call with the current batch; `tail`: its arguments after the tag. Only while `ready`.

        Returns False if it waits until others are answered. Then `departs` is called right before it is sent, and tells
        whether anybody still waits for it; else it is dropped, and `on_reply` is not called.
        """
        ...


class Transport(ABC):
    """One connection, or one for each master of a cluster.

    Attributes:
        ready: Whether a server can be called.
        client_id: A random id of this client; made, like `channel`, when the client is first used.
        channel: The channel of this client, as the names of its queue places contain it.
        scripts: The scripts that are loaded on every connect.
        trouble: Why a server could not be reached.
        limit_ms: The default time limit of a call.
        emit: Gets an event when a connection is lost, and when it is there again.
        protocol: The version of RESP that the user asked for; None if the client chooses.
        manner: How the client works with the server, once that is known.
        on_manner: Called when that has changed.
    """

    ready: bool
    client_id: str
    channel: str
    scripts: tuple[Script, ...]
    trouble: str
    limit_ms = LIMIT_MS
    emit: OnEvent | None = None
    protocol: RespVersion | None = None
    manner: Manner | None = None
    on_manner: Callable[[Manner], None] | None = None

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._process = 0
        self._closed = False
        self._has_manner = asyncio.Event()

    # Calls

    @abstractmethod
    def endpoint_for(self, resource: Resource) -> Endpoint:
        """Returns what serves the resource now; to be called again before every call."""

    @abstractmethod
    async def until_ready(self, resource: Resource | None = None) -> None:
        """Waits until the resource's server can be called; raises if the server refuses (a wrong password, ...)."""

    @abstractmethod
    def master_pools(self) -> list[ConnectionPool]:
        """Returns a pool for each known master, with which a caller may open connections of its own."""

    async def call(
        self,
        *command: Any,
        limit_ms: float | None = CLIENT_DEFAULT,
        ticket: str | None = None,
        lease_ms: float = math.inf,
        losses_most: float = math.inf,
    ) -> Answer:
        """Calls an idempotent script, and repeats it after a lost connection: `call(resource, script, *args)`.

        `lease_ms`: the lease that the call grants. If it is over when the reply is read, the call is repeated.

        Raises:
            Unavailable: No reply within `limit_ms` (None: no limit), or more than `losses_most` connections were lost
                during the call.
            RedleaseError: The server refused.
        """
        resource, script, *args = command
        tail = encoding.pack(*args)
        limit_ms = self.limit_ms if limit_ms == CLIENT_DEFAULT else limit_ms
        losses = 0
        try:
            async with asyncio.timeout(None if limit_ms is None else limit_ms / 1000):
                while True:
                    await self.until_ready(resource)
                    sent_ms = clock.now_ms()
                    reply = await self._ask(resource, script, tail)
                    if isinstance(reply, ErrorReply):
                        if not reply.is_transient:
                            raise reply.error(resource.name, ticket)
                        await asyncio.sleep(reply.retry_ms / 1000)
                    elif reply is not None and (lease_ms == math.inf or clock.now_ms() < sent_ms + lease_ms):
                        return Answer(sent_ms, reply[1:])
                    elif (losses := losses + 1) > losses_most:
                        raise TimeoutError
        except TimeoutError:
            raise self.unavailable(resource, ticket, limit_ms) from None

    async def call_each(
        self, resources: Sequence[Resource], script: Script, *args: Any
    ) -> list[list[Any] | RedleaseError]:
        """Calls a script that writes nothing on each of the resources together; returns the values of the replies.

        Where the server refused a call, the error stands in the place of its values.

        Raises:
            Unavailable: No reply within `limit_ms`.
        """
        tail, futures = encoding.pack(*args), []
        loop = self.start()
        for resource in resources:
            link = self.endpoint_for(resource)
            future: asyncio.Future[Reply] = loop.create_future()
            if link.ready:
                link.send(resource, script, tail, set_result_once(future), partial(_is_waited_for, future))
            else:
                future.set_result(None)
            futures.append(future)
        try:
            async with asyncio.timeout(self.limit_ms / 1000):
                replies = [await future for future in futures]
        except TimeoutError:
            raise self.unavailable(resources[0], None, self.limit_ms) from None
        return [
            reply[1:] if isinstance(reply, list) else await self._values_or_error(reply, resource, script, *args)
            for resource, reply in zip(resources, replies, strict=True)
        ]

    async def _values_or_error(
        self, reply: ErrorReply | None, resource: Resource, script: Script, *args: Any
    ) -> list[Any] | RedleaseError:
        """Returns the error of a reply, or repeats the call if that may help."""
        if reply is not None and not reply.is_transient:
            return reply.error(resource.name)
        try:
            return (await self.call(resource, script, *args)).values
        except Unavailable:
            raise
        except RedleaseError as error:
            return error

    async def _ask(self, resource: Resource, script: Script, tail: bytes) -> Reply:
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self.endpoint_for(resource).send(resource, script, tail, set_result_once(future), lambda: not future.done())
        return await future

    def unavailable(self, resource: Resource, ticket: str | None, within_ms: float | None) -> Unavailable:
        """Returns the error for a server that was not reached in time."""
        why = "it has not answered" if self.endpoint_for(resource).ready else self.trouble
        in_time = "in time" if within_ms is None else f"within {within_ms / 1000:g} s"
        return Unavailable(
            f"resource {resource.name!r}: the Redis server was not reached {in_time} ({why}). The outcome is unknown; "
            "what an acquire may have taken is given back in the background. It is safe to try again, with the same "
            "ticket",
            resource=resource.name,
            ticket=ticket,
        )

    # Patience

    @abstractmethod
    def set_silence_limit(self, shortest_ms: Callable[[], float]) -> None:
        """Sets the function that returns how soon, in ms, a half-open connection must be detected."""

    @abstractmethod
    def check_silence_by(self, wait_ms: float) -> None:
        """Checks connections sooner, since a lease is kept that must be renewed within `wait_ms`."""

    # Messages

    @abstractmethod
    async def subscribe(self, channel: str, listener: Callable[[bytes], None]) -> None:
        """Subscribes to a channel, now and after every reconnect."""

    @abstractmethod
    def unsubscribe(self, channel: str, listener: Callable[[bytes], None]) -> None:
        """Ends one `subscribe`."""

    async def found_manner(self) -> Manner:
        """Waits until it is known how the client works with the server; call it once a server can be called.

        Raises:
            Unavailable: The connection was lost meanwhile, and none came in its place in time.
        """
        try:
            async with asyncio.timeout(ARRIVES_S + self.limit_ms / 1000):
                await self._has_manner.wait()
        except TimeoutError:
            raise Unavailable(f"no connection lasted long enough to see if messages arrive: {self.trouble}") from None
        return self.manner or Manner()

    def set_manner(self, manner: Manner) -> None:
        """Records how the client works with the server, and says so where it has changed."""
        was, self.manner = self.manner, manner
        self._has_manner.set()
        if was == manner:
            return
        logger.info("how redlease works with the server: %s", manner, extra=about())
        if manner.silence is not None:
            logger.warning(
                "no messages arrive from the server (%s), so waiting requests poll instead. Allow PUBLISH in "
                "scripts and SUBSCRIBE for this user, server and proxy; `redlease doctor` says more",
                manner.silence,
                extra=about(),
            )
        if self.on_manner is not None:
            self.on_manner(manner)
        if self.emit is not None:
            self.emit(Connected(manner.protocol, manner.connections, manner.sends_texts, manner.silence))

    # Life

    @property
    @abstractmethod
    def refusal(self) -> RedleaseError | None:
        """The error if the servers were reached and refused this client; None otherwise."""

    @abstractmethod
    async def close(self) -> None:
        """Closes every connection, in bounded time."""

    @abstractmethod
    def _take_channel(self) -> None:
        """Sets the channel that belongs to `client_id`."""

    @abstractmethod
    async def _run(self) -> None:
        """Connects, and reconnects after every loss."""

    def start(self) -> asyncio.AbstractEventLoop:
        """Starts to connect, if it has not started; returns the event loop of this client."""
        loop = asyncio.get_running_loop()
        if self._closed:
            raise ClientClosed
        if self._loop is None:
            self._loop, self._process = loop, os.getpid()
            # Not in the constructor: after a fork, each process needs an id of its own.
            self.client_id = secrets.token_hex(8)
            self._take_channel()
            self._task = asyncio.create_task(self._run(), name=f"redlease {type(self).__name__.lower()}")
        elif self._loop is not loop or self._process != os.getpid():
            raise RedleaseError("this client belongs to another event loop or process: make one for each")
        return loop

    def load_too(self, more: Iterable[Script]) -> None:
        """Adds scripts that are loaded on every connect."""
        if new := [script for script in more if script not in self.scripts]:
            self.scripts = (*self.scripts, *new)

    @property
    def in_own_loop(self) -> bool:
        """Whether the current event loop and process are those it was started in; true if it was not started."""
        return self._loop is None or (self._loop is asyncio.get_running_loop() and self._process == os.getpid())

    @property
    def is_foreign(self) -> bool:
        """Whether its event loop is closed, or this is a forked child of its process."""
        return self._loop is not None and (self._process != os.getpid() or self._loop.is_closed())

    @property
    def started(self) -> bool:
        """Whether it has started to connect."""
        return self._task is not None
