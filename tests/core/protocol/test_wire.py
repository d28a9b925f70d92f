"""What goes over the wire: pure functions, and each undone by its counterpart."""

from __future__ import annotations

import json
import math
from datetime import timedelta
from operator import itemgetter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redlease import NotReplicated, RedleaseError
from redlease._core import limits
from redlease._core.protocol import arguments, encoding, replies, scripts
from redlease._core.protocol.arguments import AcquireRequest, Terms
from redlease._core.protocol.encoding import Resource
from redlease._core.protocol.error_replies import ErrorReply
from redlease._core.protocol.replies import Message, ServerInfo
from redlease._core.protocol.snapshots import Reading, read_record

from proxy import Framer

texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=60)
metadata = st.dictionaries(texts, texts, max_size=4)


@given(texts, texts)
def test_escaped_names_are_as_different_as_the_names(one: str, other: str) -> None:
    """Names map to hash tags one to one, and no brace is left in them."""
    assert (encoding.escape(one) == encoding.escape(other)) == (one == other)
    assert not {"{", "}"} & set(encoding.escape(one))


@given(st.text("{}%7BD25", min_size=1, max_size=8), st.text("{}%7BD25", min_size=1, max_size=8))
def test_names_that_look_escaped_stay_apart(one: str, other: str) -> None:
    """The same of names made of what escaping itself writes."""
    assert (encoding.escape(one) == encoding.escape(other)) == (one == other)


@given(texts)
def test_all_keys_are_in_one_slot(name: str) -> None:
    """The four keys of a resource share their one hash tag, and differ."""
    keys = Resource("p", name).keys
    assert len(set(keys)) == 4
    assert {key[key.index("{") : key.index("}") + 1] for key in keys} == {f"{{{encoding.escape(name)}}}"}


@given(st.lists(st.one_of(texts, st.integers(-(2**60), 2**60), st.just("")), max_size=8))
def test_a_command_is_one_frame(args: list[Any]) -> None:
    """What is packed is a frame of the protocol with these words, whatever characters they are made of."""
    words = ["CMD", *map(str, args)]
    (frame,) = Framer().feed(encoding.plain(*words))
    assert frame.startswith(b"*%d\r\n" % len(words))
    rest = frame[frame.index(b"\r\n") + 2 :]
    for word in words:
        data = word.encode()
        part = b"$%d\r\n%b\r\n" % (len(data), data)
        assert rest.startswith(part)
        rest = rest[len(part) :]
    assert rest == b""


@given(texts, texts, texts, st.integers(1, 2**31 - 1))
def test_a_call_is_one_frame(name: str, ticket: str, written: str, weight: int) -> None:
    """A script's head, tag and tail make one frame with as many words as the head announces."""
    terms = Terms("o", lease_ms=1000, capacity=3)
    packed_terms = arguments.pack_terms(terms, weight, written)
    ask = AcquireRequest(Resource("p", name), terms, ticket, "1-1", weight, packed_terms)
    tail = arguments.acquire_tail(ask, "c|1")
    head = scripts.ACQUIRE.head + ask.resource.packed_keys
    frame = head + b"$4\r\n0001\r\n" + tail
    assert Framer().feed(frame + b"*0\r\n") == [frame, b"*0\r\n"]


@given(texts, metadata, st.just("") | texts, st.integers(1, 2**31 - 1), st.integers(0, 2**53))
def test_a_record_is_read_as_it_was_written(
    owner: str, said: dict[str, str], key: str, weight: int, fence: int
) -> None:
    """Owner, metadata and key come out of a record as they went in, spaces and all."""
    text = f"{weight} {fence} 30000 1700000000000 c|1 r-1 {arguments.label(owner, said, key)}"
    assert read_record(text.encode()) == (weight, fence, 30_000, 1_700_000_000_000, owner, said, key or None)
    assert "\n" not in arguments.label(owner, said)


@given(texts, metadata)
def test_a_label_is_json(owner: str, said: dict[str, str]) -> None:
    """What stands in a record can be read with any tool."""
    assert json.loads(arguments.label(owner, said)) == [owner, said]


@given(st.floats(0.01, 1e6))
def test_durations_are_rounded_up(seconds: float) -> None:
    """A duration is never shorter than asked for, and less than a millisecond longer."""
    ms = limits.milliseconds("lease", seconds, 10)
    assert -1e-5 <= ms - seconds * 1000 < 1


@given(st.integers(10, 10**9))
def test_whole_milliseconds_stay_what_they_are(ms: int) -> None:
    """No rounding error makes 0.3 s 301 ms, as float or as timedelta."""
    assert limits.milliseconds("lease", ms / 1000, 10) == ms
    assert limits.milliseconds("lease", timedelta(milliseconds=ms), 10) == ms


@pytest.mark.parametrize("duration", [-0.001, math.nan, math.inf, -math.inf, True, None, "1", timedelta(-1), 10**12])
def test_wrong_durations(duration: Any) -> None:
    """What is no duration is refused by its name."""
    with pytest.raises(ValueError, match="timeout"):
        limits.milliseconds("timeout", duration)


@given(st.text(max_size=400))
def test_texts_are_counted_in_bytes(text: str) -> None:
    """A text is allowed when it has from 1 to so many bytes."""
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        return
    if 1 <= size <= 256:
        assert limits.checked_text("ticket", text, 256) == text
    else:
        with pytest.raises(ValueError, match="ticket"):
            limits.checked_text("ticket", text, 256)


@given(st.integers(0, 2**31), st.text(min_size=1, max_size=20))
def test_messages_about_a_resource(number: int, name: str) -> None:
    """A message about a resource ends with its key, whatever its name is made of."""
    key = Resource("p", name).state_key
    payload = f"c {number} ".encode() + key
    assert replies.read_message(payload) == Message("c", key.decode(), (number,))


@given(
    st.sampled_from("gxmrl"), st.integers(0, 2**53), st.lists(st.integers(0, limits.FENCE_MAX), min_size=4, max_size=4)
)
def test_messages(kind: str, number: int, drawn: list[int]) -> None:
    """A message is its kind, whom it is about, and as many numbers as its kind has."""
    numbers = drawn[: replies.NUMBERS[kind]]
    payload = " ".join([kind, f"{number:x}-1", *map(str, numbers)]).encode()
    assert replies.read_message(payload) == Message(kind, f"{number:x}-1", tuple(numbers))


@pytest.mark.parametrize("payload", [b"g", b"hello", b"g 1 x", b"g 1 2", b"x 1 2", b"c 1", b"\xff 1", b"q 1"])
def test_other_messages(payload: bytes) -> None:
    """What no script of this library writes is a ValueError."""
    with pytest.raises(ValueError, match=r"."):
        replies.read_message(payload)


# What Redis 6.2 (wrapped), Redis 7 and Valkey 9 reply, to commands and to scripts, and what `pcall` returns in 6.2.
WRAPPED = "ERR Error running script (call to f_1f8f4cfba6f3375f8c4ec02b9de4361a5dea5c64): @user_script:34: "
FAULTS = {
    "OOM command not allowed when used memory > 'maxmemory'. script: 2f, on @user_script:34.": "OOM",
    f"{WRAPPED}@user_script: 34: -OOM command not allowed when used memory > 'maxmemory'.": "OOM",
    "@user_script: 12: -OOM command not allowed when used memory > 'maxmemory'.": "OOM",
    "WRONGTYPE Operation against a key holding the wrong kind of value": "WRONGTYPE",
    "WRONGTYPE Operation against a key holding the wrong kind of value script: on @user_script:1.": "WRONGTYPE",
    f"{WRAPPED}WRONGTYPE Operation against a key holding the wrong kind of value": "WRONGTYPE",
    "READONLY You can't write against a read only replica.": "READONLY",
    f"{WRAPPED}@user_script: 1: -READONLY You can't write against a read only replica.": "READONLY",
    "NOSCRIPT No matching script. Please use EVAL.": "NOSCRIPT",
    "NOPERM this user has no permissions to run the 'evalsha' command": "NOPERM",
    "NOREPLICAS Not enough good replicas to write.": "NOREPLICAS",
    f"{WRAPPED}@user_script: 1: -NOREPLICAS Not enough good replicas to write.": "NOREPLICAS",
    "LOADING Redis is loading the dataset in memory": "LOADING",
    "BUSY Valkey is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.": "BUSY",
    "CLUSTERDOWN Hash slot not served": "CLUSTERDOWN",
    "CLUSTERDOWN The cluster is down": "CLUSTERDOWN",
    "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.": "MASTERDOWN",
    "TRYAGAIN Multiple keys request during rehashing of slot": "TRYAGAIN",
    "MOVED 3999 127.0.0.1:6381": "MOVED",
    "ASK 3999 127.0.0.1:6381": "ASK",
    "CROSSSLOT Keys in request don't hash to the same slot": "CROSSSLOT",
    "NOAUTH Authentication required.": "NOAUTH",
    "WRONGPASS invalid username-password pair or user is disabled.": "WRONGPASS",
    "UNKILLABLE Sorry the script already executed write commands against the dataset.": "UNKILLABLE",
    "EXECABORT Transaction discarded because of previous errors.": "EXECABORT",
    f"{WRAPPED}@user_script: 1: -MISCONF Redis is configured to save RDB snapshots": "MISCONF",
    "MISCONF Redis is configured to save RDB snapshots, but it's currently unable to persist to disk.": "MISCONF",
    "ERR value is not an integer or out of range": "ERR",
    "BUSYKEY Target key name already exists.": "BUSYKEY",
    # The server repeats the arguments of a command that it has not, among them the text of a script.
    "ERR unknown command `SCRIPT`, with args beginning with: `LOAD`, `-- acquire: BUSY OOM MOVED 1 a:1`, ": "ERR",
    "ERR unknown command 'EVALSHA', with args beginning with: '0f' '4' 'p:{NOSCRIPT non local key}' 'ASK' ": "ERR",
    f"{WRAPPED}user_script:1: attempt to call field 'BUSY' (a nil value)": "ERR",
    "ERR user_script:1: LOADING READONLY NOPERM script: 2f, on @user_script:1.": "ERR",
    "the server says BUSY": "ERR",
}
AGAIN = {"LOADING", "BUSY", "CLUSTERDOWN", "MASTERDOWN", "TRYAGAIN", "NOSCRIPT"}
FORBIDDEN = {
    f"{WRAPPED}@user_script: 1: The user executing the script can't run this command or subcommand": True,
    "@user_script: 1: The user executing the script can't run this command or subcommand": True,
    "@user_script: 1: The user executing the script can't publish to the channel mentioned in the command": True,
    "ERR The user executing the script can't access at least one of the keys mentioned in the command arguments": True,
    "ERR ACL failure in script: User u has no permissions to run the 'set' command script: on @user_script:1.": True,
    "NOPERM No permissions to access a key": True,
    "ERR unknown command 'SCRIPT', with args beginning with: 'LOAD' '-- NOPERM ACL failure in script: '": False,
}
NON_LOCAL = {
    f"{WRAPPED}@user_script: 1: Lua script attempted to access a non local key in a cluster node": True,
    "ERR Script attempted to access a non local key in a cluster node script: 8a, on @user_script:1.": True,
    "ERR Attempted to access a non local key in a cluster node script: on @user_script:1.": True,
    "ERR unknown command 'EVALSHA', with args beginning with: '0f' '4' 'p:{non local key}:state' ": False,
}


@pytest.mark.parametrize(("text", "code"), FAULTS.items())
def test_error_texts(text: str, code: str) -> None:
    """The code is the word that an error begins with, behind the wrapping of 6.2, and never a word of the rest."""
    fault = ErrorReply(text)
    assert fault.code == code
    assert fault.is_transient == (code in AGAIN)
    assert (fault.not_allowed, fault.partially_executed) == (code == "NOPERM", False)
    error = fault.error("gpu", "t")
    assert (error.resource, error.ticket) == ("gpu", "t")
    assert "'gpu'" in str(error)
    assert text in str(error)
    assert isinstance(error, NotReplicated if code == "NOREPLICAS" else RedleaseError)


@pytest.mark.parametrize(("text", "is_forbidden"), FORBIDDEN.items())
def test_errors_of_missing_rights(text: str, *, is_forbidden: bool) -> None:
    """Each version says it in other words, within a script without a code."""
    assert ErrorReply(text).not_allowed == is_forbidden


@pytest.mark.parametrize(("text", "is_partial"), NON_LOCAL.items())
def test_errors_of_a_slot_that_moves(text: str, *, is_partial: bool) -> None:
    """A script that met a key of another node may be called again; a name that reads like that changes nothing."""
    fault = ErrorReply(text)
    assert (fault.partially_executed, fault.is_transient) == (is_partial, is_partial)


@pytest.mark.parametrize(
    ("version", "too_old"),
    [("2.8.0", True), ("6.0.16", True), ("6.2.0", False), ("6.10.1", False), ("7.0.15", False), ("10.0.0", False)],
)
def test_versions(version: str, *, too_old: bool) -> None:
    """6.2 is the oldest that serves; versions are numbers, not texts."""
    assert ServerInfo(version, "master").too_old == too_old


@given(
    st.lists(
        st.tuples(texts, st.integers(1, 9), st.integers(1, 2**50)), max_size=5, unique_by=(itemgetter(0), itemgetter(2))
    )
)
def test_snapshots(rows: list[tuple[str, int, int]]) -> None:
    """Holders come out in the order of their fences, whatever the order of their deadlines."""
    held: list[Any] = []
    for ticket, weight, fence in rows:
        held += [
            ticket.encode(),
            5000 + fence % 7,
            f"{weight} {fence} 30 10 c|1 r-1 {arguments.label('o', {})}".encode(),
        ]
    reading = Reading("r", 3, 100)
    reading.add([17, 9, 0, 0, 0, held, [], [], []])
    assert reading.args is None
    snapshot = reading.snapshot()
    assert (snapshot.capacity, snapshot.server_time_ms, snapshot.fence, snapshot.waiters) == (3, 17, 9, ())
    assert [permit.fence for permit in snapshot.holders] == sorted(fence for _, _, fence in rows)
    assert {(permit.ticket, permit.weight, permit.fence) for permit in snapshot.holders} == set(rows)
