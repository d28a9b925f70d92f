"""How much work a connection leaves unanswered at the server.

A server runs what it has read of one connection in one go, and all other clients wait for that. So the window is what
it answers within about half a millisecond, besides the time of a round trip: enough for it to work on one half while
the other half is under way. Answers that take longer shrink the window, quick ones widen it. What a round trip takes is
looked at now and then, with a window so small that the server's work hardly counts.

Calls over that wait in the client. Those go first that keep alive or give back what the client has, so no flood of its
own requests and looks costs it a permit. What nobody waits for any more is not sent at all.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from time import monotonic

from redlease._core.protocol import scripts
from redlease._core.protocol.encoding import Resource
from redlease._core.protocol.scripts import Script

from .base import Departs, OnReply

WORK_MS = 0.3  # for which the server may work on the calls of one connection
UNIT_MS = 0.021  # for a usual call, and for what the client does with its answer: that never shrinks the window
UNITS_FIRST, UNITS_LEAST, UNITS_OF_LOOK = 48, 8, 2
SHRINKS_TO, GROWS_TO = 0.25, 1.5  # at most, by each measurement
LOOKS_EVERY = (8, 1000)  # measurements: at first, and at most, since the first ones may be disturbed


class Window:
    """How much may be unanswered; it changes by how long answers take, while calls wait for room.

    Attributes:
        size: How much may be unanswered, in units of usual calls.
        half: Half of it.
        change: By how much the last measurement changed the size.
    """

    def __init__(self) -> None:
        self.size, self.half, self.change = UNITS_FIRST, UNITS_FIRST // 2, 0
        self._since = 0.0  # when the measurement began, by `monotonic`
        self._awaited = 0  # units that were unanswered then, and still are
        self._round_trip_ms, self._seen_ms = 0.0, math.inf  # the shorter of the last two; the last one
        self._until_look = 1  # measurements; 0: the window was made small; -1: no more than that is unanswered
        self._every = LOOKS_EVERY[0]
        self._usual_units = UNITS_FIRST  # the size before the look

    def begin(self, unanswered: int) -> None:
        """Begins a measurement, which ends when all of that is answered."""
        self._since, self._awaited = monotonic(), unanswered

    def answered(self, units: int) -> bool:
        """Returns whether that ends the measurement; then it has changed the size, and the next is to be begun."""
        self._awaited -= units
        if self._awaited > 0:
            return False
        before = self.size
        self.size = self._adapted((monotonic() - self._since) * 1000)
        self.half, self.change = self.size // 2, self.size - before
        return True

    def _adapted(self, took_ms: float) -> int:
        """Returns the size after a measurement."""
        self._until_look -= 1
        if self._until_look == 0:
            self._usual_units = self.size
            return UNITS_OF_LOOK
        if self._until_look == -1:
            return UNITS_OF_LOOK
        if self._until_look < 0:
            self._round_trip_ms, self._seen_ms = min(took_ms, self._seen_ms), took_ms
            self._until_look, self._every = self._every, min(2 * self._every, LOOKS_EVERY[1])
            return self._usual_units
        fair_ms = self._round_trip_ms + max(WORK_MS, self.size * UNIT_MS)
        if took_ms > fair_ms:
            return max(UNITS_LEAST, int(self.size * max(SHRINKS_TO, fair_ms / took_ms)))
        return min(UNITS_FIRST + int(self._round_trip_ms / UNIT_MS), int(self.size * GROWS_TO))


# What `Connection.send` was called with. A plain tuple, for speed.
UnsentCall = tuple[Resource, Script, bytes, OnReply, Departs | None]


class Unsent:
    """The calls of one connection that wait, in the order in which they are sent."""

    def __init__(self) -> None:
        self._first: deque[UnsentCall] = deque()
        self._others: deque[UnsentCall] = deque()

    def __bool__(self) -> bool:
        return bool(self._first or self._others)

    def add(self, call: UnsentCall) -> None:
        """Adds a call, behind those of its kind."""
        (self._first if call[1].goes_first else self._others).append(call)

    def next(self) -> UnsentCall | None:
        """Takes out the next call that is still wanted."""
        while queue := self._first or self._others:
            call = queue.popleft()
            if (departs := call[-1]) is None or departs():
                return call
        return None

    def clear(self) -> list[OnReply]:
        """Takes all calls out; returns their callbacks."""
        callbacks = [call[3] for call in (*self._first, *self._others)]
        self._first.clear()
        self._others.clear()
        return callbacks


class Windowed(ABC):
    """A connection's calls of scripts, as many at a time as its window allows."""

    def __init__(self) -> None:
        super().__init__()
        self._unsent = Unsent()
        self._tag = 0
        self._sends_texts = False  # whether the server loads no scripts, so that it gets the text of each with a call
        self._known: set[str] = set()  # the scripts of which it has got the text
        self._reset_window()

    def _reset_window(self) -> list[OnReply]:
        """Makes a new window, as the next connection may lead elsewhere; returns the callbacks of unsent calls."""
        self._window = Window()
        self._room, self._room_left = self._window.size, 0  # for units more; as it was after the last write while full
        self._is_full = False  # whether calls wait in `_unsent`
        self._known.clear()
        self._enough: float = 1  # how many calls make the next write in this iteration of the loop
        return self._unsent.clear()

    def send(
        self, resource: Resource, script: Script, tail: bytes, on_reply: OnReply, departs: Departs | None = None
    ) -> bool:
        if self._is_full or self._room <= 0:  # not `has_room`, for speed
            if not self._is_full:
                self._is_full, self._room_left = True, self._room
                self._window.begin(self._window.size - self._room)
            self._unsent.add((resource, script, tail, on_reply, departs))
            return False
        self._tag = number = (self._tag + 1) % scripts.TAGS
        tag = b"%04x" % number
        head = self._head_of(script) if self._sends_texts else script.head
        command = b"%b%b$4\r\n%b\r\n%b" % (head, resource.packed_keys, tag, tail)
        self._room -= script.units
        self._enqueue(command, tag, on_reply, script.deliver_after_pushes, script.units)
        return True

    def _head_of(self, script: Script) -> bytes:
        if script.sha in self._known:
            return script.head
        self._known.add(script.sha)
        return script.text_head

    def _forget_scripts(self) -> None:
        """Sends the texts again: a server that is new to this connection does not know them."""
        self._known.clear()

    @property
    def has_room(self) -> bool:
        """Whether a call is sent at once."""
        return not self._is_full and self._room > 0

    def _send_waiting(self) -> None:
        """Sends the calls that waited, as many as there is room for, in one write."""
        window = self._window
        is_measured = window.answered(self._room - self._room_left)
        self._room += window.change if is_measured else 0
        self._is_full, self._enough = False, math.inf
        while self._room > 0 and (call := self._unsent.next()) is not None:
            Windowed.send(self, *call)  # not a subclass's, through which it has been
        self._is_full, self._room_left = bool(self._unsent), self._room
        if is_measured:
            window.begin(window.size - self._room)
        self._end_batch()

    def _send_all(self) -> None:
        """Sends all that waits, as nobody waits for answers any more."""
        self._room = scripts.TAGS
        self._send_waiting()

    @abstractmethod
    def _enqueue(
        self, data: bytes, tag: bytes | None, on_reply: OnReply, deliver_after_pushes: bool = False, units: int = 0
    ) -> None:
        """Adds a call to the current batch."""

    def _end_batch(self) -> None:
        self._enough = 1
        self._write()

    @abstractmethod
    def _write(self) -> None:
        """Writes the current batch."""
