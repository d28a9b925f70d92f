"""A proxy that makes a server speak like others: without RESP3, without some commands, or without messages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from proxy import MESSAGES, SUBSCRIBING, Awaited, Link, Proxy, first_word, is_message

if TYPE_CHECKING:
    import asyncio

    from proxy import Fault

NO_HELLO = b"-ERR unknown command 'HELLO', with args beginning with: '3' \r\n"
NO_PROTO = b"-NOPROTO unsupported protocol version\r\n"
STILL_RESP2 = b"*6\r\n$6\r\nserver\r\n$5\r\nredis\r\n$7\r\nversion\r\n$5\r\n7.0.0\r\n$5\r\nproto\r\n:2\r\n"
SUBSCRIBED_ONLY = b"-ERR Can't execute '%b': only (P|S)SUBSCRIBE / PING / QUIT / RESET are allowed in this context\r\n"


@dataclass
class Client:
    """What a connection has done so far."""

    has_resp3: bool = False
    has_subscribed: bool = False


# What a command is answered with in place of the server; None: the server answers. It raises `Closes` to close.
Answer = Callable[[Client, str, bytes], bytes | None]


class Closes(ConnectionError):
    """The server closes the connection."""


def asks_for_resp3(name: str, frame: bytes) -> bool:
    """Tell whether a command is HELLO 3."""
    return name == "HELLO" and b"\r\n3\r\n" in frame


def without_resp3(_: Client, name: str, frame: bytes) -> bytes | None:
    """HELLO 3 is refused, as where RESP2 was chosen for a database."""
    return NO_PROTO if asks_for_resp3(name, frame) else None


def keeps_resp2(_: Client, name: str, frame: bytes) -> bytes | None:
    """HELLO 3 is answered as if it were granted, and RESP2 is spoken, as with Kvrocks unless RESP3 is switched on."""
    return STILL_RESP2 if asks_for_resp3(name, frame) else None


def without_hello(_: Client, name: str, frame: bytes) -> bytes | None:
    """There is no HELLO, as in Redis 5 and behind Envoy."""
    return NO_HELLO if name == "HELLO" else None


def broken_by_subscribe(client: Client, name: str, frame: bytes) -> bytes | None:
    """HELLO 3 is granted, and no other command after SUBSCRIBE, as with miniredis."""
    client.has_resp3 = client.has_resp3 or asks_for_resp3(name, frame)
    if client.has_resp3 and client.has_subscribed and name not in {*SUBSCRIBING, "PING"}:
        return SUBSCRIBED_ONLY % name.lower().encode()
    return None


def closed_by_publish(client: Client, name: str, frame: bytes) -> bytes | None:
    """A RESP3 connection is closed once a script publishes, as with some versions of Garnet."""
    client.has_resp3 = client.has_resp3 or asks_for_resp3(name, frame)
    if client.has_resp3 and name.startswith("EVAL") and b"\r\ndeliver\r\n" in frame:
        raise Closes
    return None


def lacks(*names: str) -> Answer:
    """Some commands are unknown."""

    def answer(_: Client, name: str, frame: bytes) -> bytes | None:
        return b"-ERR unknown command '%b'\r\n" % name.encode() if name in names else None

    return answer


class DialectProxy(Proxy):
    """A proxy for a server whose dialect differs. ``has_messages``: whether what is published arrives."""

    def __init__(self, upstream_port: int, *answers: Answer, has_messages: bool = True) -> None:
        """Prepare; nothing listens before it is entered."""
        super().__init__(upstream_port)
        self.answers = answers
        self.has_messages = has_messages
        self.is_silent = False  # whether nothing more comes from connections that have subscribed

    def link_of(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Link:
        """Return what passes on one client connection."""
        return DialectLink(self, reader, writer)


class DialectLink(Link):
    """One client connection of such a proxy."""

    def __init__(self, proxy: DialectProxy, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Begin with a client that has done nothing."""
        super().__init__(proxy, reader, writer)
        self._dialect = proxy
        self._client = Client()

    def request(self, frame: bytes, name: str, fault: Fault | None) -> bytes:
        """Let the server answer an unknown command where the dialect has an answer, so that the order is kept."""
        answers = (answer(self._client, name, frame) for answer in self._dialect.answers)
        if (reply := next(filter(None, answers), None)) is not None:
            self.awaited.append(Awaited(instead=reply))
            return b"*1\r\n$5\r\nNOCMD\r\n"
        self._client.has_subscribed = self._client.has_subscribed or name in SUBSCRIBING
        return super().request(frame, name, fault)

    def arrives(self, frame: bytes) -> bool:
        """Leave out messages where none arrive, and all on a connection for messages that is half-open."""
        if self._dialect.is_silent and self._client.has_subscribed:
            return False
        return self._dialect.has_messages or not is_message(frame) or first_word(frame) not in MESSAGES
