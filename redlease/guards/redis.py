"""The guard in Redis: one key that holds the highest fence seen, and scripts that run only under a fence as high."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, ClassVar

from redis.crc import key_slot

from redlease._core import limits
from redlease._core.operations import Operations
from redlease._core.protocol.encoding import Resource, bulk, hash_tag, pack
from redlease._core.protocol.scripts import Script, read_lua
from redlease._core.transport.cluster import Cluster
from redlease.errors import RedleaseError, Unavailable

from .errors import stale_fence

STALE, FAILED = 0, -1  # the outcomes in the reply, besides 1 for accepted
SCRIPTS_KEPT = 64  # how many of the users' scripts are cached

# Without its comments, since it is sent with each script of a user.
_GUARD = re.sub(r"^--.*\n", "", read_lua(__package__, "guard"), flags=re.MULTILINE)
CHECK = Script("guard", "fence idle_ttl_ms", f"local theirs\n{_GUARD}", keys=1)

Key = str | bytes
Value = str | bytes | int | float


class GuardKey(Resource):
    """The key of a guard, beside those of the resource of that name."""

    PARTS: ClassVar[tuple[bytes, ...]] = (b"guard",)


class Call(Resource):
    """What one call sends before the tag: the user's keys, the guard's key, the user's arguments, and the guard's."""

    def __init__(self, key: GuardKey, keys: Sequence[Key], args: Sequence[Value]) -> None:
        self.name, self.state_key = key.name, key.state_key
        self.packed_keys = pack(*keys) + key.packed_keys + pack(*args)


class RunScript(Script):
    """A user's script behind the guard, sent as text: the server need not know it before."""

    def __init__(self, lua: str, keys: int, args: int) -> None:
        # It begins on the first line, so that the lines in the server's errors are those of the user's script.
        super().__init__("run", "fence idle_ttl_ms", f"local theirs = function() {lua}\nend\n{_GUARD}", keys=keys + 1)
        text, count = self.text.encode(), 3 + keys + 1 + args + len(self.args)
        self.head = self.text_head = b"*%d\r\n$4\r\nEVAL\r\n%b%b" % (count, bulk(text), pack(keys + 1))


_run_script = lru_cache(maxsize=SCRIPTS_KEPT)(RunScript)


class Guard:
    """Refuses a fence that is lower than the highest it has seen, so that a former holder's late write does no harm.

    Made by `Redlease.guard`. All guards with the same name and prefix, in any process, are the same guard. It orders
    fences, so it fits locks; the fences of a semaphore with more than one unit do not order its holders.

    Example:
        >>> guard = client.guard("ledger")  # doctest: +SKIP
        >>> balance = f"{guard.hash_tag}:balance"  # doctest: +SKIP
        >>> async with client.lock("ledger") as hold:  # doctest: +SKIP
        ...     await guard.run(hold.fence, "return redis.call('SET', KEYS[1], ARGV[1])", [balance], [90])
    """

    def __init__(self, operations: Operations, prefix: str, name: str, idle_ttl_ms: int) -> None:
        self._operations = operations
        self._key = GuardKey(prefix, name)
        self._idle_ttl_ms = idle_ttl_ms
        operations.load_too(CHECK)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}>"

    @property
    def name(self) -> str:
        """The name of the resource."""
        return self._key.name

    @property
    def hash_tag(self) -> str:
        """What the names of keys contain to be in this guard's slot of a cluster, with its braces."""
        return f"{{{hash_tag(self._key.state_key).decode()}}}"

    async def check(self, fence: int) -> None:
        """Records the fence if none higher was seen; the same fence may be checked again.

        A write that follows the check may still come late: pass the fence to the write itself where that is possible,
        with `run` or with a guard in the database that is written (`redlease.guards.sql`).

        Args:
            fence: `hold.fence`, or `permit.fence`.

        Raises:
            StaleFence: A higher fence was seen.
            ValueError: It is no fence.
            Unavailable: The server could not be reached in time. It is safe to check again.
            RedleaseError: The server refused.
        """
        limits.checked_fence(fence)
        answer = await self._operations.run(Call(self._key, (), (fence, self._idle_ttl_ms)), CHECK)
        self._read(fence, answer)

    async def run(
        self, fence: int, lua: str, keys: Sequence[str | bytes] = (), args: Sequence[str | bytes | int | float] = ()
    ) -> Any:
        """Checks the fence and runs a script in one step: nothing of it runs under a stale fence.

        A script that has run is not undone: if it fails half-way, what it has written stays. A script whose reply is
        lost is not sent again.

        Args:
            fence: `hold.fence`, or `permit.fence`.
            lua: A script as for EVAL, without a `#!` line.
            keys: Its `KEYS`. On a cluster they are in the guard's slot: `f"{guard.hash_tag}:balance"`.
            args: Its `ARGV`.

        Returns:
            What the script returns, as EVAL replies it: bytes, int, None or a list of these.

        Raises:
            StaleFence: A higher fence was seen.
            ValueError: A parameter is wrong, or a key is in another slot than the guard.
            Unavailable: The server could not be reached in time. It is not known whether the script has run.
            RedleaseError: The server refused, or the script failed.
        """
        limits.checked_fence(fence)
        self._check_call(lua, keys, args)
        script = _run_script(lua, len(keys), len(args))
        call = Call(self._key, keys, (*args, fence, self._idle_ttl_ms))
        try:
            return self._read(fence, await self._operations.run(call, script, losses_most=0))
        except Unavailable as error:
            raise Unavailable(
                f"resource {self.name!r}: the script's reply did not arrive. It is not known whether the script has "
                "run: look at what it writes before you run it again",
                resource=self.name,
            ) from error

    def _check_call(self, lua: str, keys: Sequence[Key], args: Sequence[Value]) -> None:
        if not isinstance(lua, str) or lua.startswith("#!"):
            raise ValueError(f"the script must be Lua as a string, without a #! line, not {lua!r:.80}")
        for what, kinds, values in (("keys", Key, keys), ("args", Value, args)):
            if isinstance(values, str | bytes) or not all(
                isinstance(value, kinds) and not isinstance(value, bool) for value in values
            ):
                raise ValueError(f"{what} must be a list of {kinds}, not {values!r:.80}")
        if isinstance(self._operations.session.connection, Cluster):
            slot = key_slot(self._key.state_key)
            for key in keys:
                if key_slot(key if isinstance(key, bytes) else key.encode()) != slot:
                    raise ValueError(f"key {key!r} is in another slot than the guard: name it with {self.hash_tag!r}")

    def _read(self, fence: int, answer: list[Any]) -> Any:
        outcome, *rest = answer
        if outcome == STALE:
            seen = int(rest[0])
            raise stale_fence(self.name, fence, f"is stale, since {seen} was seen; nothing was written", seen=seen)
        if outcome == FAILED:
            raise RedleaseError(
                f"resource {self.name!r}: the script failed, and what it had written before stays. Correct the script "
                f"(server: {rest[0].decode(errors='replace')})",
                resource=self.name,
            )
        return rest[0] if rest else None
