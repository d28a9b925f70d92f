"""Counts what a script does in Lua: instructions, and bytes that it allocates, closures among them.

The scripts that a client has sent run once more, in a Lua 5.1 of this process whose `redis.call` asks the server. The
counts are the same on every machine, busy or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import lupa.lua51
import redis

from redlease._core.protocol import scripts

# Each instruction that the script runs counts; what the hook itself runs does not.
COUNTING = b"""
local script = ...
local steps = 0
collectgarbage('collect')
collectgarbage('stop')
local before = collectgarbage('count')
debug.sethook(function() steps = steps + 1 end, '', 1)
script()
debug.sethook()
return steps, (collectgarbage('count') - before) * 1024
"""

# Where a call of EVALSHA has what, and where `release` and `renew` have the ticket's fence behind the keys.
SHA, KEY_COUNT, FIRST_KEY = 1, 2, 3
TICKET = 1
FENCES = {script.sha.encode(): script.args.index("fence") for script in (scripts.RELEASE, scripts.RENEW)}


@dataclass(slots=True)
class Steps:
    """What one call of a script did."""

    instructions: int
    allocated: float  # in bytes
    commands: list[tuple[bytes, ...]]  # that it called


class CountingLua:
    """Runs the library's scripts on a server's data.

    Args:
        url: Of the server; the scripts write to it.
    """

    def __init__(self, url: str) -> None:
        # A connection without the client around it: the replies are wanted as a script sees them.
        self._connection: Any = redis.ConnectionPool.from_url(url, protocol=2).get_connection()
        self._lua = lupa.lua51.LuaRuntime(encoding=None, unpack_returned_tuples=True)
        self._called: list[tuple[bytes, ...]] = []
        self._count = self._lua.compile(COUNTING)
        names = self._lua.globals()
        names[b"redis"] = self._lua.table_from({b"call": self._call, b"pcall": self._call})
        self._names = names
        self._scripts = {script.sha.encode(): self._lua.compile(script.text.encode()) for script in scripts.SCRIPTS}

    def run(self, command: Sequence[bytes]) -> Steps:
        """Runs one EVALSHA as it was sent, and returns what it did."""
        keys_end = FIRST_KEY + int(command[KEY_COUNT])
        keys, arguments = list(command[FIRST_KEY:keys_end]), list(command[keys_end:])
        at = FENCES.get(command[SHA])
        if at is not None and arguments[at]:
            # The fence is time, so this run has granted another one than that which the client had.
            record = self._ask(b"HGET", keys[0], b"t" + arguments[TICKET])
            arguments[at] = record.split()[1]
        self._names[b"KEYS"], self._names[b"ARGV"] = self._lua.table_from(keys), self._lua.table_from(arguments)
        instructions, allocated = self._count(self._scripts[command[SHA]])
        commands, self._called = self._called, []
        return Steps(int(instructions), float(allocated), commands)

    def close(self) -> None:
        """Ends its connection."""
        self._connection.disconnect()

    def _call(self, *words: bytes | float) -> Any:
        command = tuple(word if isinstance(word, bytes) else b"%d" % word for word in words)
        self._called.append(command)
        return self._as_lua(self._ask(*command))

    def _ask(self, *words: bytes) -> Any:
        self._connection.send_command(*words)
        return self._connection.read_response(disable_decoding=True)

    def _as_lua(self, reply: Any) -> Any:
        if reply is None:
            return False
        if isinstance(reply, list):
            return self._lua.table_from([self._as_lua(one) for one in reply])
        return reply
