"""The simulated network: connections as streams of bytes between clients and the server, which faults befall."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from .loop import ARRIVED, SimulatedLoop
from .process import PROCESS, Process

FOREVER_S = 1e9


class Peer(Protocol):
    """The server's end of a connection."""

    def received(self, data: bytes) -> None: ...
    def lost(self) -> None: ...
    def inject(self, kind: str, seconds: float) -> None: ...


class Line:
    """One direction of one client's network: bytes keep their order, however late they are."""

    def __init__(self) -> None:
        self.held_until = 0.0
        self.last = 0.0

    def arrives(self, now: float, latency: float) -> float:
        """Return when what is sent now arrives."""
        self.last = max(self.last, self.held_until, now + latency)
        return self.last


class Link(asyncio.Transport):
    """A connection, as its client has it.

    Attributes:
        process: The client's process.
        is_open: Whether anything still arrives at the client.
        late_s: How late requests arrive that were on their way when it was cut; None: never.
    """

    def __init__(self, network: Network, process: Process) -> None:
        super().__init__()
        self.network, self.process = network, process
        self.is_open = self.reaches_server = True
        self.late_s: float | None = 0.0
        self.peer: Peer
        self.up, self.down = Line(), Line()
        self._protocol: Any = None

    # As a transport

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def get_protocol(self) -> Any:
        return self._protocol

    def get_extra_info(self, name: str, default: Any = None) -> Any:  # noqa: ARG002
        return default

    def is_closing(self) -> bool:
        return not self.is_open

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        if self.is_open:
            at = self.up.arrives(self.network.loop.time(), self.network.latency(self.process))
            self.network.later(at, self._reaches, bytes(data))

    def close(self) -> None:
        """Close it; what was sent before arrives."""
        if self.is_open:
            self.is_open = False
            at = self.up.arrives(self.network.loop.time(), self.network.latency(self.process))
            self.network.later(at, self.end)
            self.network.loop.call_soon(self._tell_lost, None)

    abort = close

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...

    # As the network has it

    def _reaches(self, data: bytes) -> None:
        if self.reaches_server:
            self.peer.received(data)
        elif self.late_s is not None:
            self.network.later(self.network.loop.now + self.late_s, self.peer.received, data)

    def send_back(self, data: bytes) -> None:
        """Send bytes from the server to the client."""
        if self.is_open:
            at = self.down.arrives(self.network.loop.now, self.network.latency(self.process))
            self.network.loop.put(at, ARRIVED, self.process, self._arrives, data)

    def _arrives(self, data: bytes) -> None:
        if self.is_open:
            self._protocol.data_received(data)

    def cut(self, late_s: float | None = None) -> None:
        """Lose it, with all that is on its way; with `late_s`, requests arrive so much later."""
        if self.is_open:
            self.is_open = self.reaches_server = False
            self.late_s = late_s
            lost = ConnectionResetError("connection reset by peer")
            self.network.loop.put(self.network.loop.now, ARRIVED, self.process, self._tell_lost, lost)
        if late_s is None:
            self.end()

    def end(self) -> None:
        """Tell the server that it is closed."""
        self.reaches_server = False
        self.network.links.pop(self, None)
        self.peer.lost()

    def _tell_lost(self, error: Exception | None) -> None:
        self._protocol.connection_lost(error)


class Network:
    """All connections to the one server.

    Args:
        loop: The loop on which everything arrives.
        server: The process of the server, which never stands still.
        accept: Makes the server's end of a new connection; None while the server does not listen.
        latency_s: How long bytes travel at most.
    """

    def __init__(
        self, loop: SimulatedLoop, server: Process, accept: Callable[[Link], Peer | None], latency_s: float
    ) -> None:
        self.loop, self._server, self._accept, self._latency_s = loop, server, accept, latency_s
        self.links: dict[Link, None] = {}
        self.held_until: dict[Process, float] = {}
        self.is_over = False
        loop.connect = self._connect

    def latency(self, process: Process) -> float:
        """Draw how long bytes travel from or to a process."""
        return self._latency_s * (0.05 + 0.95 * process.random.random())

    def later(self, at: float, callback: Callable[..., object], *args: Any) -> None:
        """Call the server's side at a time."""
        self.loop.put(at, ARRIVED, self._server, callback, *args)

    def of(self, process: Process) -> Iterable[Link]:
        """Return the connections of a process."""
        return [link for link in self.links if link.process is process]

    def hold(self, process: Process, seconds: float) -> None:
        """Let nothing arrive at a process, or from it, for so long; then everything does, in its order."""
        until = self.held_until[process] = self.loop.now + seconds
        for link in self.of(process):
            link.up.held_until = link.down.held_until = until

    async def _connect(self, protocol_factory: Callable[[], Any]) -> tuple[Link, Any]:
        process = PROCESS.get()
        if self.is_over:
            raise ConnectionRefusedError("the simulation is over")
        held = self.held_until.get(process, 0.0) - self.loop.now
        await asyncio.sleep(max(held, 0.0) + self.latency(process))
        link, protocol = Link(self, process), protocol_factory()
        peer = self._accept(link)
        if peer is None or self.is_over:
            raise ConnectionRefusedError("the server does not listen")
        link.peer = peer
        self.links[link] = None
        link.set_protocol(protocol)
        protocol.connection_made(link)
        return link, protocol
