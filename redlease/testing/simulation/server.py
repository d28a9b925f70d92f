"""The simulated server: it reads commands from its connections, executes them, and sends replies and messages."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable
from typing import Any

import hiredis

from .engines import Engine, Executed, Refused
from .network import Link

HELLO = {b"server": b"redis", b"version": b"7.4.0", b"proto": 3, b"mode": b"standalone", b"role": b"master"}
ANSWERS: dict[bytes, Any] = {
    b"AUTH": "OK",
    b"CLIENT": "OK",
    b"INFO": b"# Memory\r\nmaxmemory_policy:noeviction\r\n",
    b"PING": "PONG",
    b"SELECT": "OK",
    b"WAIT": 0,
}
NOTHING = object()  # the "reply" of what is answered by pushes
OnCall = Callable[[str, list[bytes], Executed], None]


@functools.lru_cache
def digest(text: bytes) -> str:
    """Return what EVALSHA calls a script."""
    return hashlib.sha1(text, usedforsecurity=False).hexdigest()


def encode(value: Any) -> bytes:  # noqa: PLR0911 - a line for each kind
    """Return a reply as bytes: bytes are a bulk string, `str` is a status."""
    if isinstance(value, int):
        return b":%d\r\n" % value
    if isinstance(value, bytes):
        return b"$%d\r\n%b\r\n" % (len(value), value)
    if isinstance(value, list | tuple):
        return b"*%d\r\n%b" % (len(value), b"".join(map(encode, value)))
    if isinstance(value, dict):
        return b"%%%d\r\n%b" % (len(value), b"".join(encode(part) for pair in value.items() for part in pair))
    if isinstance(value, float):
        return encode(b"%.17g" % value)
    if value is NOTHING:
        return b""
    return b"$-1\r\n" if value is None else b"+%b\r\n" % str(value).encode()


class Session:
    """The server's end of a connection.

    Attributes:
        channels: What it subscribed to.
        is_reading: Whether it executes what has arrived, and sends all replies together after that.
        repeat_after_s: Executes the next script call once more, so much later, as a proxy might that repeats it.
        reply_fault: What befalls the reply to the next script call: "lose", which closes the connection, or "double".
        push_fault: What befalls the next message, "lose", "double" or "delay", and for how many seconds.
    """

    def __init__(self, server: Server, link: Link) -> None:
        self.server, self.link = server, link
        self.channels: dict[bytes, None] = {}
        self.repeat_after_s: float | None = None
        self.reply_fault = ""
        self.push_fault = ("", 0.0)
        self.is_reading = self._is_resp3 = False
        self._reader = hiredis.Reader()
        self._out: list[bytes] = []
        self._commands: dict[bytes, Callable[..., Any]] = {
            b"HELLO": self._hello,
            b"SUBSCRIBE": self._subscribe,
            b"UNSUBSCRIBE": self._unsubscribe,
        }

    def received(self, data: bytes) -> None:
        """Execute the commands in what arrived, and send the replies."""
        self._reader.feed(data)
        self.is_reading = True
        while (command := self._reader.gets()) is not False and self in self.server.sessions:
            self._out.append(self._answer(command))
        self.is_reading = False
        self.flush()

    def flush(self) -> None:
        """Send what is there to send."""
        if self._out:
            data = b"".join(self._out)
            self._out.clear()
            self.link.send_back(data)

    def _answer(self, command: list[bytes]) -> bytes:
        is_script = command[0] == b"EVALSHA"
        if is_script and self.repeat_after_s is not None:
            after_s, self.repeat_after_s = self.repeat_after_s, None
            self.server.later(after_s, self._repeat, command)
        own: Callable[..., Any] = self._commands.get(command[0].upper(), self.server.execute)
        try:
            reply = encode(own(command))
        except Refused as error:
            reply = b"-%b\r\n" % str(error).encode()
        if not is_script or not self.reply_fault:
            return reply
        fault, self.reply_fault = self.reply_fault, ""
        if fault == "lose":
            self.link.cut()
        return reply + reply

    def _repeat(self, command: list[bytes]) -> None:
        if self.server.is_up:
            with contextlib.suppress(Refused):
                self.server.execute(command)

    def push(self, kind: bytes, channel: bytes, last: bytes | int) -> None:
        """Send a push, at the latest with the replies to what has arrived."""
        head = b">3\r\n" if self._is_resp3 else b"*3\r\n"
        data = head + b"".join(map(encode, (kind, channel, last)))
        fault, late_s = "", 0.0
        if kind == b"message":
            (fault, late_s), self.push_fault = self.push_fault, ("", 0.0)
        if late_s:
            self.server.later(late_s, self.link.send_back, data)
        elif fault != "lose":
            self._out.append(data * (2 if fault == "double" else 1))

    def inject(self, kind: str, seconds: float) -> None:
        """Remember what befalls the next call, reply or message."""
        if kind == "repeat_request":
            self.repeat_after_s = seconds
        elif kind.endswith("_reply"):
            self.reply_fault = kind.removesuffix("_reply")
        elif kind.endswith("_message"):
            self.push_fault = (kind.removesuffix("_message"), seconds)

    def lost(self) -> None:
        """The connection is closed."""
        self.server.sessions.pop(self, None)

    def _hello(self, command: list[bytes]) -> Any:
        self._is_resp3 = self._is_resp3 or command[1:2] == [b"3"]
        return HELLO

    def _subscribe(self, command: list[bytes]) -> Any:
        for channel in command[1:]:
            self.channels[channel] = None
            self.push(b"subscribe", channel, 1)
        return NOTHING

    def _unsubscribe(self, command: list[bytes]) -> Any:
        for channel in command[1:]:
            self.channels.pop(channel, None)
            self.push(b"unsubscribe", channel, 0)
        return NOTHING


class Server:
    """One server.

    Args:
        engine: Its data.
        later: Calls something so many seconds later.
        on_call: Gets each script call that was executed: the name of the script, the command, and what came of it.

    Attributes:
        is_up: Whether it accepts connections.
    """

    def __init__(self, engine: Engine, later: Callable[..., None], on_call: OnCall) -> None:
        self.engine, self.later, self._on_call = engine, later, on_call
        self.is_up = True
        self.sessions: dict[Session, None] = {}
        self._loaded: set[str] = set()

    def accept(self, link: Link) -> Session | None:
        """Return the end of a new connection."""
        if not self.is_up:
            return None
        session = Session(self, link)
        self.sessions[session] = None
        return session

    def crash(self) -> None:
        """Close all connections, forget the scripts, and accept nothing."""
        self.is_up = False
        self._loaded.clear()
        for session in list(self.sessions):
            session.link.cut()

    def execute(self, command: list[bytes]) -> Any:
        """Execute a command; returns its reply, or raises Refused."""
        name = command[0].upper()
        if name == b"EVALSHA":
            sha, count = command[1].decode(), int(command[2])
            if sha not in self._loaded:
                raise Refused("NOSCRIPT No matching script. Please use EVAL.")
            executed = self.engine.script(command[3 : 3 + count], sha, command[3 + count :])
            self._on_call(sha, command[3:], executed)
        elif name == b"SCRIPT" and command[1].upper() == b"LOAD":
            sha = digest(command[2])
            if sha not in self._loaded:
                self.engine.load(command[2])
                self._loaded.add(sha)
            return sha.encode()
        elif name in ANSWERS:
            return ANSWERS[name]
        else:
            executed = self.engine.command(command)
        for channel, payload in executed.messages:
            self._deliver(channel.encode(), payload.encode())
        return executed.reply

    def _deliver(self, channel: bytes, payload: bytes) -> None:
        for session in [session for session in self.sessions if channel in session.channels]:
            session.push(b"message", channel, payload)
            if not session.is_reading:
                session.flush()
