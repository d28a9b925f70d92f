"""The way to the servers: what one connection and the connections to a cluster have in common."""

from __future__ import annotations

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

from . import clock, wire
from .errors import RedleaseError, Unavailable

# None: the connection was lost, and nobody knows whether the call was carried out.
Reply = list[Any] | wire.Fault | None
T = TypeVar("T")
OnReply = Callable[[Reply], None]
Reached = Callable[[wire.Resource], bool]

# How long a call may stay unanswered before the connection counts as half-open: the least that is sensible, and the
# most, which the leases that are kept can make shorter.
PATIENCE_MS = (250.0, 3000.0)
CLOSED = "this client is closed: make a new one"
LIMIT_MS = 5000.0  # how long a call that has no timeout of its own may take, outages included


def backed_off(first: float, times: int, most: float) -> float:
    """The pause after so many failures: twice the one before, up to the longest."""
    return min(most, first * 2.0 ** min(times, 10))  # bounded twice: a larger power is more than a float holds


def settles(future: asyncio.Future[T]) -> Callable[[T], None]:
    """What sets the future's result, unless somebody has stopped waiting for it."""
    return lambda result: None if future.done() else future.set_result(result)


def everything(_: wire.Resource) -> bool:
    """Every resource is reached."""
    return True


class Answer(NamedTuple):
    """The reply to a call, without its tag, and the local time at which that call was sent."""

    sent_ms: float
    values: list[Any]


class Link(Protocol):
    """What serves a resource at this moment: an open connection, or the lack of one."""

    @property
    def ready(self) -> bool: ...
    @property
    def refusal(self) -> RedleaseError | None: ...
    def send(self, resource: wire.Resource, script: wire.Script, tail: bytes, on_reply: OnReply) -> None: ...


class Route(ABC):
    """One connection, or one for each master of a cluster.

    Attributes:
        ready: Whether there is something that can be called.
        channel: What stands in a place for the channel of this client.
        scripts: Loaded on every connect.
        trouble: Why a server could not be reached.
    """

    ready: bool
    channel: str
    scripts: tuple[wire.Script, ...]
    trouble: str

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._process = 0
        self._closed = False

    # Calls

    @abstractmethod
    def of(self, resource: wire.Resource) -> Link:
        """What serves this resource now; it is asked for anew before every call."""

    @abstractmethod
    async def until_ready(self, resource: wire.Resource | None = None) -> None:
        """Returns when the resource's server can be called; raises the server's refusal (a wrong password, ...)."""

    async def call(
        self,
        *command: Any,
        limit_ms: float | None = LIMIT_MS,
        ticket: str | None = None,
    ) -> Answer:
        """Calls a script that may be repeated, and again after a lost connection: `call(resource, script, *args)`.

        Raises:
            Unavailable: No reply within `limit_ms`.
            RedleaseError: The server refused.
        """
        resource, script, *args = command
        tail = wire.pack(*args)
        try:
            async with asyncio.timeout(None if limit_ms is None else limit_ms / 1000):
                while True:
                    await self.until_ready(resource)
                    sent_ms = clock.now_ms()
                    reply = await self._ask(resource, script, tail)
                    if isinstance(reply, wire.Fault):
                        if not reply.passes:
                            raise reply.error(resource.name, ticket)
                        await asyncio.sleep(reply.retry_ms / 1000)
                    elif reply is not None:
                        return Answer(sent_ms, reply[1:])
        except TimeoutError:
            raise self.unavailable(resource.name, ticket) from None

    async def _ask(self, resource: wire.Resource, script: wire.Script, tail: bytes) -> Reply:
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self.of(resource).send(resource, script, tail, settles(future))
        return await future

    def unavailable(self, resource: str | None = None, ticket: str | None = None) -> Unavailable:
        """The error for a server that was not reached in time."""
        where = f"resource {resource!r}: " if resource is not None else ""
        return Unavailable(
            f"{where}the Redis server was not reached in time ({self.trouble}). The outcome is unknown; what "
            "an acquire may have taken is given back in the background. It is safe to try again, with the same ticket",
            resource=resource,
            ticket=ticket,
        )

    # Patience

    @abstractmethod
    def be_patient_for(self, shortest_ms: Callable[[], float]) -> None:
        """Asks `shortest_ms` how soon a half-open connection has to be noticed."""

    @abstractmethod
    def look_sooner(self, wait_ms: float) -> None:
        """Something is kept from now on that has to be renewed within `wait_ms`."""

    # Messages

    @abstractmethod
    async def subscribe(self, channel: str, listener: Callable[[bytes], None]) -> None:
        """Listens to one more channel, now and after every reconnect."""

    @abstractmethod
    def unsubscribe(self, channel: str, listener: Callable[[bytes], None]) -> None:
        """Ends one `subscribe`."""

    # Life

    @property
    @abstractmethod
    def refusal(self) -> RedleaseError | None:
        """Why the servers, reached, would not serve this client; None while there is hope."""

    @abstractmethod
    async def close(self) -> None:
        """Ends every connection; bounded in time."""

    @abstractmethod
    async def _run(self) -> None:
        """Connects, and connects again."""

    def start(self) -> asyncio.AbstractEventLoop:
        """Begins to connect, if it has not begun; returns the loop that it is used in."""
        loop = asyncio.get_running_loop()
        if self._closed:
            raise RedleaseError(CLOSED)
        if self._loop is None:
            self._loop, self._process = loop, os.getpid()
            self._task = asyncio.create_task(self._run(), name=f"redlease {type(self).__name__.lower()}")
        elif self._loop is not loop or self._process != os.getpid():
            raise RedleaseError("this client belongs to another event loop or process: make one for each")
        return loop

    @property
    def at_home(self) -> bool:
        """Whether this is the event loop and the process in which it was started, if it was."""
        return self._loop is None or (self._loop is asyncio.get_running_loop() and self._process == os.getpid())

    @property
    def orphaned(self) -> bool:
        """Whether its loop is over or, in a forked child, its process another."""
        return self._loop is not None and (self._process != os.getpid() or self._loop.is_closed())

    @property
    def started(self) -> bool:
        """Whether it has begun to connect."""
        return self._task is not None
