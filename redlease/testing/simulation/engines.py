"""What executes the calls of a simulated server: the true scripts on fakeredis, or the model of the protocol."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from redlease._core.protocol import scripts

from .publishing import PublishingModel

Message = tuple[str, str]  # channel and payload
NAMES = {script.sha: script.name for script in scripts.SCRIPTS}
ARE_NUMBERS = {
    "acquire": (5, 6, 7, 8, 9),
    "release": (3, 5),
    "renew": (1, 2, 4),
    "adopt": (1, 4, 5, 6),
    "supersede": (2, 3, 4, 5),
    "beat": (1, 3),
    "reduce": (1, 2, 3),
    "resize": (0, 1),
    "limit": (2, 4),
    "check": (1,),
    "watch": (0,),
}
LABELS = {"acquire": 10, "adopt": 7, "limit": 5}  # where they stand among the arguments: the model keeps none


class Refused(Exception):
    """An error reply."""


class Executed(NamedTuple):
    """What a command replies, and what it publishes."""

    reply: Any
    messages: Sequence[Message] = ()


class Engine(Protocol):
    """The data of a server."""

    def script(self, keys: list[bytes], sha: str, args: list[bytes]) -> Executed:
        """Run a script that was loaded; raises Refused if it replies with an error."""
        ...

    def command(self, command: list[bytes]) -> Executed:
        """Run any other command."""
        ...

    def load(self, text: bytes) -> None:
        """Load a script."""
        ...

    def save(self) -> Any:
        """Return a copy of the data."""
        ...

    def restore(self, saved: Any) -> None:
        """Go back to such a copy; None: to nothing."""
        ...


class ModelEngine:
    """`redlease.testing.Model` answers as the scripts do: fast, and only what the primitives themselves call.

    Args:
        clock_us: The server's time.
    """

    def __init__(self, clock_us: Any) -> None:
        self._clock_us = clock_us
        self._resources: dict[str, PublishingModel] = {}

    def script(self, keys: list[bytes], sha: str, args: list[bytes]) -> Executed:
        """Run a script of redlease."""
        name = NAMES.get(sha)
        if sha == scripts.DELIVER.sha:
            return Executed([args[0], b""], [(args[1].decode(), "")])
        if name is None:  # the probe of rights
            return Executed([args[0]])
        if name not in ARE_NUMBERS and name != "position":
            raise Refused(f"ERR the model does not answer {name!r}: simulate with engine='scripts'")
        key = keys[0].decode()
        model = self._resources.get(key)
        if model is None:
            model = self._resources[key] = PublishingModel(state_key=key)
        model.clock = self._clock_us()
        if 0 < model.kept_until <= model.now:
            model = self._resources[key] = model.forgotten()
        given: list[Any] = [arg.decode() for arg in args[1:]]
        if name in LABELS:
            del given[LABELS[name]]
        for number in ARE_NUMBERS.get(name, ()):
            if given[number].lstrip("-").isdecimal():
                given[number] = int(given[number])
        reply = getattr(model, name)(*given)
        return Executed([args[0], *map(int, reply)], model.published())

    def command(self, command: list[bytes]) -> Executed:
        """Refuse: it has no other data."""
        raise Refused(f"ERR the model has no command {command[0].decode()!r}: simulate with engine='scripts'")

    def load(self, text: bytes) -> None:
        """Do nothing: it is the scripts."""

    def save(self) -> bytes:
        """Return a copy of all resources."""
        return pickle.dumps(self._resources)

    def restore(self, saved: bytes | None) -> None:
        """Go back to a copy, or lose everything but the order of the fences."""
        self._resources = pickle.loads(saved) if saved else {}  # noqa: S301 - what `save` returned


class ScriptEngine:
    """The true scripts, in the Lua of fakeredis.

    Args:
        clock_us: The server's time.
    """

    def __init__(self, clock_us: Any) -> None:
        self._clock_us = clock_us
        import fakeredis  # noqa: PLC0415 - it comes with an extra, which the model needs not

        self._server = fakeredis.FakeServer(version=(6, 2))
        self._client: Any = fakeredis.FakeRedis(server=self._server)
        self._connect()

    def _connect(self) -> None:
        self._heard = self._client.pubsub(ignore_subscribe_messages=True)
        self._heard.psubscribe("*")
        self._published()

    def script(self, keys: list[bytes], sha: str, args: list[bytes]) -> Executed:
        """Run a script."""
        return self._execute("EVALSHA", sha, len(keys), *keys, *args)

    def command(self, command: list[bytes]) -> Executed:
        """Run a command."""
        return self._execute(*command)

    def _execute(self, *command: Any) -> Executed:
        from redis import exceptions  # noqa: PLC0415 - see above

        try:
            reply = self._client.execute_command(*command)
        except exceptions.NoScriptError as error:
            raise Refused(f"NOSCRIPT {error}") from None
        except exceptions.ResponseError as error:
            raise Refused(str(error)) from None
        return Executed(reply, self._published())

    def _published(self) -> list[Message]:
        messages = []
        while (heard := self._heard.get_message()) is not None:
            channel = heard["channel"].decode()
            if not channel.startswith("__key"):  # fakeredis tells of every write, as servers do where they are set to
                messages.append((channel, heard["data"].decode()))
        return messages

    def load(self, text: bytes) -> None:
        """Load a script."""
        self._client.script_load(text)

    def save(self) -> Any:
        """Return a copy of all keys, and when they expire."""
        now_ms = self._clock_us() // 1000
        return [(key, self._client.dump(key), now_ms + self._client.pttl(key)) for key in self._client.scan_iter()]

    def restore(self, saved: Any) -> None:
        """Go back to a copy."""
        self._client.flushall()
        for key, value, expires_ms in saved or ():
            self._client.restore(key, 0, value)
            self._client.pexpireat(key, expires_ms)
