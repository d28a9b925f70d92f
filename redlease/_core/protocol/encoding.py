"""Encodes commands and keys for the Redis protocol."""

from __future__ import annotations

import re
from typing import ClassVar

from redlease._core.limits import NAME_BYTES_MAX, checked_text


def bulk(data: bytes) -> bytes:
    """Encodes an argument as a bulk string."""
    return b"$%d\r\n%b\r\n" % (len(data), data)


def pack(*args: str | bytes | float) -> bytes:
    """Encodes arguments as bulk strings."""
    return b"".join([bulk(arg if type(arg) is bytes else str(arg).encode()) for arg in args])


def plain(*args: str) -> bytes:
    """Encodes a command that is not a script call and carries no tag."""
    return b"*%d\r\n%b" % (len(args), pack(*args))


def escape(name: str) -> str:
    """Escapes the braces in a name, so that the key has only one hash tag."""
    if "%" in name or "{" in name or "}" in name:
        return name.replace("%", "%25").replace("{", "%7B").replace("}", "%7D")
    return name


def unescape(text: str) -> str:
    """Returns the name that `escape` escaped."""
    return text.replace("%7D", "}").replace("%7B", "{").replace("%25", "%")


def keys_pattern(prefix: str, rest: str = "*") -> str:
    """Returns the glob that matches the keys under a prefix, taken letter for letter, with that `rest`."""
    return re.sub(r"([*?\[\]\\^])", r"\\\1", prefix) + f":{rest}"


class Resource:
    """A resource name and its keys.

    Attributes:
        name: As the user gave it.
        state_key: The first of the keys.
        packed_keys: All keys, encoded, in the order in which every call declares them.
    """

    __slots__ = ("name", "packed_keys", "state_key")

    PARTS: ClassVar[tuple[bytes, ...]] = (b"state", b"holders", b"queue", b"waiters")
    GLOB: ClassVar[str] = "{*}:[shq]*"  # of all but `waiters`, which alone neither holds nor queues anything

    def __init__(self, prefix: str, name: str) -> None:
        checked_text("resource name", name, NAME_BYTES_MAX)
        base = f"{prefix}:{{{escape(name)}}}:".encode()
        size = len(base)
        self.name = name
        self.state_key = base + self.PARTS[0]
        self.packed_keys = b"".join([b"$%d\r\n%b%b\r\n" % (size + len(part), base, part) for part in self.PARTS])

    @property
    def keys(self) -> list[str]:
        """The keys, in the order in which every call declares them."""
        base = self.state_key.removesuffix(self.PARTS[0])
        return [(base + part).decode() for part in self.PARTS]

    @classmethod
    def named_by(cls, prefix: str, key: bytes) -> str | None:
        """Returns the name of the resource with that key; None if no resource has such a key."""
        base, tag, part = key.rpartition(b"}:")
        begin = f"{prefix}:{{".encode()
        if part not in cls.PARTS or not base.startswith(begin):
            return None
        try:
            name = unescape(base[len(begin) :].decode())
            return name if cls(prefix, name).state_key == base + tag + cls.PARTS[0] else None
        except ValueError:  # another program's key: empty, too long, or no UTF-8
            return None

    @property
    def watch_channel(self) -> str:
        """The channel to which the scripts publish changes while a client watches."""
        return self.state_key.decode() + ":watch"


def hash_tag(key: bytes) -> bytes:
    """Returns the part of a key between the braces: keys that share it are in one slot."""
    return key[key.index(b"{") + 1 : key.index(b"}")]
