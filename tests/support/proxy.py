"""A TCP proxy between a client and a server that makes a network's faults happen on demand, or at random by a seed.

It reads the protocol in both directions, so it knows which reply belongs to which request. Most faults are those that
TCP allows: a connection that ends before a request or its reply, one that goes silent, one that is slow, and a request
that reaches the server twice, since a client or a network in between sent it again. Two are those of a broken proxy or
client library: a reply that is missing from the middle of the stream, and one that is there twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter, deque
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Coroutine

READ_SIZE = 65_536

# Requests that reach a server twice are those a client would send again: not the ones that set up a connection.
REPEATABLE = frozenset({"EVAL", "EVALSHA", "PUBLISH", "SET", "INCRBY"})

# The confirmations of these arrive as messages, one for each channel, and not as the one reply of a request.
SUBSCRIBING = frozenset(
    {"SUBSCRIBE", "UNSUBSCRIBE", "PSUBSCRIBE", "PUNSUBSCRIBE", "SSUBSCRIBE", "SUNSUBSCRIBE"},
)
MESSAGES = frozenset({"MESSAGE", "PMESSAGE", "SMESSAGE"})


class Fault(Enum):
    """What can go wrong with one request."""

    LOSE = auto()
    """The connection ends before the request reaches the server."""

    CUT = auto()
    """The server runs the request, and the connection ends before its reply. What was sent behind it is lost."""

    STALL = auto()
    """The server runs the request, and neither its reply nor anything after it arrives; the connection stays open."""

    DELAY = auto()
    """The reply is late, and with it those behind it."""

    DOUBLE = auto()
    """The server runs the request twice; the client gets the first reply."""

    LATE = auto()
    """The server runs the request, and a copy of it later, whatever has become of the connection by then."""

    DROP = auto()
    """The reply is left out of the stream, and those behind it arrive."""

    ECHO = auto()
    """The reply arrives twice."""


@dataclass(frozen=True)
class Chances:
    """How likely each fault is to befall a request, and how long a delay can last in seconds."""

    lose: float = 0
    cut: float = 0
    stall: float = 0
    delay: float = 0
    double: float = 0
    late: float = 0
    drop: float = 0
    echo: float = 0
    delay_max: float = 0.05
    late_max: float = 0.5


@dataclass
class _Planned:
    """A fault that befalls the ``after``-th request from now, counting those named ``name`` where there is a name."""

    fault: Fault
    after: int
    name: str | None


@dataclass
class Awaited:
    """A reply that the server owes, and what becomes of it."""

    fault: Fault | None = None
    swallow: bool = False
    instead: bytes | None = None  # what the client gets in its place


class Proxy:
    """Listens on ``port`` of loopback and passes everything on to ``upstream_port``, with faults."""

    def __init__(self, upstream_port: int, *, seed: int = 0) -> None:
        """Prepare; nothing listens before ``start``."""
        self.upstream_port = upstream_port
        self.port = 0
        self.chances = Chances()
        self.random = random.Random(seed)
        self.commands: Counter[str] = Counter()
        self.faults: Counter[Fault] = Counter()
        self.connections_most = 0
        self.connections_total = 0
        self._plans: list[_Planned] = []
        self._links: set[Link] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener: asyncio.Server | None = None
        self._flowing = asyncio.Event()
        self._flowing.set()

    async def __aenter__(self) -> Self:
        """Start."""
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        """Stop."""
        await self.stop()

    @property
    def url(self) -> str:
        """The proxy's address, to give to a client in place of the server's."""
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def connections(self) -> int:
        """How many client connections are open now."""
        return len(self._links)

    async def start(self) -> Self:
        """Listen on a free port."""
        await self.accept()
        return self

    async def stop(self) -> None:
        """Stop listening, end every connection, and forget the copies still to be sent."""
        self.refuse()
        self.drop_all()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def accept(self) -> None:
        """Take new connections, on the same port as before."""
        if self._listener is None:
            self._listener = await asyncio.start_server(self._take, "127.0.0.1", self.port, reuse_address=True)
            self.port = self._listener.sockets[0].getsockname()[1]

    def refuse(self) -> None:
        """Refuse new connections; those that are open stay."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def freeze(self) -> None:
        """Go silent in both directions: bytes and connections are taken, and nothing is passed on."""
        self._flowing.clear()

    def thaw(self) -> None:
        """Pass on what was kept back, and flow again."""
        self._flowing.set()

    def drop_all(self) -> None:
        """End every open connection at once; what was kept back on them is lost."""
        for link in list(self._links):
            link.abort()

    def plan(self, fault: Fault, after: int = 1, name: str | None = None) -> None:
        """Let a fault befall the ``after``-th request from now, counting only those called ``name`` if given."""
        self._plans.append(_Planned(fault, after, name))

    def cut_after_requests(self, after: int, name: str | None = None) -> None:
        """Let the server run the ``after``-th request from now, and end the connection before its reply."""
        self.plan(Fault.CUT, after, name)

    def fault_for(self, name: str) -> Fault | None:
        """Count a request, and decide what goes wrong with it: what was planned, or else what chance brings."""
        self.commands[name] += 1
        fault = self._planned(name) or self._by_chance()
        if fault in (Fault.DOUBLE, Fault.LATE) and name not in REPEATABLE:
            return None
        if fault is not None:
            self.faults[fault] += 1
        return fault

    def send_later(self, frame: bytes) -> None:
        """Send a copy of a request to the server after a while, on a connection of its own."""
        self.run(self._send_copy(frame, self.random.uniform(0, self.chances.late_max)))

    def run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine that ends with the proxy."""
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def flow(self) -> None:
        """Wait while the proxy is frozen."""
        await self._flowing.wait()

    async def settled(self) -> None:
        """Wait until no copy is still to be sent. Only for a proxy without connections."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _planned(self, name: str) -> Fault | None:
        due = None
        for plan in [plan for plan in self._plans if plan.name in (None, name)]:
            plan.after -= 1
            if plan.after <= 0 and due is None:
                due = plan.fault
                self._plans.remove(plan)
        return due

    def _by_chance(self) -> Fault | None:
        drawn = self.random.random()
        for fault in Fault:
            drawn -= getattr(self.chances, fault.name.lower())
            if drawn < 0:
                return fault
        return None

    async def _send_copy(self, frame: bytes, after: float) -> None:
        await asyncio.sleep(after)
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", self.upstream_port)
            with contextlib.closing(writer):
                writer.write(frame)
                await reader.read(READ_SIZE)

    def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Count a client's connection, and serve it in a task of the proxy's own."""
        link = self.link_of(reader, writer)
        self._links.add(link)
        self.connections_total += 1
        self.connections_most = max(self.connections_most, len(self._links))
        self.run(self._serve(link))

    def link_of(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Link:
        """Return what passes on one client connection."""
        return Link(self, reader, writer)

    async def _serve(self, link: Link) -> None:
        try:
            await link.run()
        finally:
            self._links.discard(link)
            link.close()


class Link:
    """One client connection and its counterpart to the server."""

    def __init__(self, proxy: Proxy, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._proxy = proxy
        self._from_client = reader
        self._to_client = writer
        self._to_server: asyncio.StreamWriter | None = None
        self.awaited: deque[Awaited] = deque()

    async def run(self) -> None:
        """Pass on both directions until one of them ends."""
        await self._proxy.flow()
        try:
            from_server, self._to_server = await asyncio.open_connection("127.0.0.1", self._proxy.upstream_port)
        except OSError:
            return
        pumps = [asyncio.ensure_future(pump) for pump in (self._requests(self._to_server), self._replies(from_server))]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            for ended in await asyncio.gather(*pumps, return_exceptions=True):
                if isinstance(ended, Exception) and not isinstance(ended, OSError):
                    raise ended

    def close(self) -> None:
        """End both connections; what was written already is still delivered."""
        for writer in self._writers():
            writer.close()

    def abort(self) -> None:
        """End both connections at once."""
        for writer in self._writers():
            writer.transport.abort()

    def _writers(self) -> list[asyncio.StreamWriter]:
        return [self._to_client] if self._to_server is None else [self._to_client, self._to_server]

    async def _requests(self, to_server: asyncio.StreamWriter) -> None:
        framer = Framer()
        fault = None
        while data := await self._from_client.read(READ_SIZE):
            await self._proxy.flow()
            passed = bytearray()
            for frame in framer.feed(data):
                name = first_word(frame)
                fault = self._proxy.fault_for(name)
                passed += self.request(frame, name, fault)
                if fault in (Fault.LOSE, Fault.CUT):
                    break
            # One write for what came in one read, as without the proxy.
            to_server.write(passed)
            await to_server.drain()
            if fault is Fault.LOSE:
                return
            if fault is Fault.CUT:
                # The reply, when it comes, ends the connection.
                await asyncio.Event().wait()

    def request(self, frame: bytes, name: str, fault: Fault | None) -> bytes:
        """Return what to send to the server for a request, and note the replies that it owes."""
        if fault is Fault.LOSE:
            return b""
        if fault is Fault.LATE:
            self._proxy.send_later(frame)
        if name not in SUBSCRIBING:
            self.awaited.append(Awaited(fault))
        if fault is Fault.DOUBLE:
            self.awaited.append(Awaited(swallow=True))
            return frame * 2
        return frame

    def arrives(self, frame: bytes) -> bool:  # noqa: ARG002  for subclasses
        """Tell whether what the server sent is passed on."""
        return True

    async def _replies(self, from_server: asyncio.StreamReader) -> None:
        framer = Framer()
        while data := await from_server.read(READ_SIZE):
            await self._proxy.flow()
            for frame in filter(self.arrives, framer.feed(data)):
                # A server that turns a connection away says so without having been asked.
                asked_for = self.awaited and not is_message(frame)
                awaited = self.awaited.popleft() if asked_for else Awaited()
                if awaited.fault is Fault.CUT:
                    return
                if awaited.fault is Fault.STALL:
                    # Whoever waits on the other side has to notice by itself.
                    await asyncio.Event().wait()
                if awaited.fault is Fault.DELAY:
                    await asyncio.sleep(self._proxy.random.uniform(0, self._proxy.chances.delay_max))
                if not awaited.swallow and awaited.fault is not Fault.DROP:
                    reply = awaited.instead or frame
                    self._to_client.write(reply * 2 if awaited.fault is Fault.ECHO else reply)
            await self._to_client.drain()


@dataclass
class Framer:
    """Cuts a stream of RESP2 or RESP3 into whole frames."""

    _buffer: bytearray = field(default_factory=bytearray)

    def feed(self, data: bytes) -> list[bytes]:
        """Take some more of the stream and return the frames it completes."""
        self._buffer += data
        frames = []
        start = 0
        while (end := frame_end(self._buffer, start)) is not None:
            frames.append(bytes(self._buffer[start:end]))
            start = end
        del self._buffer[:start]
        return frames


def frame_end(buffer: bytes | bytearray, start: int) -> int | None:
    """Return where the frame that begins at ``start`` ends, or None while some of it is missing."""
    due = 1
    while due:
        line_end = buffer.find(b"\r\n", start)
        if line_end < 0:
            return None
        kind, length = buffer[start : start + 1], buffer[start + 1 : line_end]
        start = line_end + 2
        due -= 1
        if kind in (b"$", b"=", b"!"):
            # A null has the length -1 and no content.
            start += int(length) + 2 if int(length) >= 0 else 0
        elif kind in (b"*", b"~", b">"):
            due += max(int(length), 0)
        elif kind == b"%":
            due += 2 * int(length)
        elif kind == b"|":
            # Attributes come in front of the value they are about, and are no value themselves.
            due += 2 * int(length) + 1
    return start if start <= len(buffer) else None


def first_word(frame: bytes) -> str:
    """Return the first string of an array in upper case: the name of a command, or the kind of a message."""
    words = frame.split(b"\r\n", 3)
    return words[2].decode(errors="replace").upper() if len(words) > 2 and words[1][:1] == b"$" else ""


def is_message(frame: bytes) -> bool:
    """Tell a message, or the confirmation of a subscription, from a reply."""
    if frame[:1] == b">":
        return True
    return frame[:1] == b"*" and first_word(frame) in MESSAGES | SUBSCRIBING
