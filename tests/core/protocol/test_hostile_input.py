"""What the network sends, whatever it is, is read or refused as the loop expects."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.asyncio import ConnectionPool

from redlease import RedleaseError
from redlease._core import limits
from redlease._core.protocol import replies
from redlease._core.protocol.encoding import Resource
from redlease._core.protocol.error_replies import ErrorReply
from redlease._core.protocol.replies import MESSAGE_BYTES_MAX, Message, ServerInfo
from redlease._core.transport.connection import Connection
from redlease._core.transport.opening.driver import ReplyError
from redlease._core.transport.opening.handshake import read_hello

words = st.one_of(
    st.sampled_from([b"g", b"x", b"m", b"r", b"c", b"l", b"", b"-1", b"9" * 5000, b"1e9", b"1_0", b"\xff", b"nan"]),
    st.binary(max_size=30),
    st.integers(-(2**70), 2**70).map(lambda number: str(number).encode()),
)
payloads = st.one_of(st.binary(max_size=200), st.lists(words, max_size=8).map(b" ".join))


@given(payloads)
def test_a_payload_is_a_message_or_a_value_error(payload: bytes) -> None:
    """Its numbers fit into a float, so that no arithmetic with them fails, and there are as many as its kind has."""
    message: Message | ValueError
    try:
        message = replies.read_message(payload)
    except ValueError as error:
        message = error
    if isinstance(message, ValueError):
        assert len(str(message)) < 1000
        return
    assert len(message.numbers) == replies.NUMBERS[message.kind]
    assert all(0 <= number <= limits.FENCE_MAX for number in message.numbers)


def test_no_message_is_longer_than_the_longest() -> None:
    """The longest prefix and a name of braces alone still fit; whatever is longer is refused before it is looked at."""
    key = Resource("p" * limits.PREFIX_BYTES_MAX, "{" * limits.NAME_BYTES_MAX).state_key
    longest = b"c %d %b" % (limits.CAPACITY_MAX, key)
    assert replies.read_message(longest).about == key.decode()
    assert len(longest) <= MESSAGE_BYTES_MAX
    with pytest.raises(ValueError, match="is not a redlease message"):
        replies.read_message(b"c 1 " + b"k" * MESSAGE_BYTES_MAX)


@given(st.text(max_size=300))
def test_every_error_reply_has_an_error(text: str) -> None:
    """Whatever a server writes as an error, it is told with the resource, and nothing is guessed from it that fails."""
    fault = ErrorReply(text)
    assert repr("a\nb")[1:-1] in str(fault.error("a\nb"))
    assert fault.retry_ms > 0


errors = st.text(max_size=20).map(ReplyError)
values = st.recursive(
    st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1), st.binary(max_size=20), errors),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=8,
)


@given(st.lists(values, max_size=6), st.lists(st.lists(st.binary(max_size=12), min_size=3, max_size=3), max_size=3))
def test_replies_and_pushes_never_stop_the_connection(said: list[Any], pushes: list[list[bytes]]) -> None:
    """Whatever comes in place of the answers, each call gets a reply with its tag, an error, or None."""
    connection = Connection(ConnectionPool(), "p", lambda: None, lambda payload: None)
    got: list[Any] = []
    for number in range(3):
        connection._pending.append((b"%04x" % number, got.append, False, 0))
    for push in pushes:
        connection.on_push(push)
    for reply in said:
        connection.on_reply(reply)
    connection.on_lost("the end")
    assert len(got) == 3
    for number, reply in enumerate(got):
        assert reply is None or isinstance(reply, ErrorReply) or reply[0] == b"%04x" % number


keys = st.one_of(st.text(max_size=9), st.sampled_from(["version", "role", "mode", "server"]))
told = st.one_of(
    st.text(max_size=9), st.sampled_from(["sentinel", "master", "slave", "redis", "valkey", "5.0.14", "6.2.0"])
)


@given(st.dictionaries(keys, told))
def test_no_hello_is_misread(said: dict[str, str]) -> None:
    """What a server says of itself, in any encoding of text, gives its version and role, or is refused in words."""
    hello = {key.encode(): value.encode() for key, value in said.items()}
    is_sentinel = "sentinel" in (said.get("role"), said.get("mode"))
    is_old = said.get("server") in ("redis", "valkey") and ServerInfo(said.get("version", ""), "").too_old
    if is_sentinel or is_old:
        with pytest.raises(RedleaseError, match="is a Sentinel" if is_sentinel else "needs Redis 6.2"):
            read_hello(hello)
        return
    info = read_hello(hello)
    assert info is not None
    assert (info.version, info.role) == (said.get("version", ""), said.get("role", "master"))
