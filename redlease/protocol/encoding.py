"""Encodes commands and keys for the Redis protocol."""

from __future__ import annotations

from typing import ClassVar

from redlease.limits import NAME_BYTES_MAX, checked_text


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


class Resource:
    """A resource name and its keys.

    Attributes:
        name: As the user gave it.
        state_key: The first of the keys.
        packed_keys: All keys, encoded, in the order in which every call declares them.
    """

    __slots__ = ("name", "packed_keys", "state_key")

    PARTS: ClassVar[tuple[bytes, ...]] = (b"state", b"holders", b"queue", b"waiters")

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

    @property
    def watch_channel(self) -> str:
        """The channel to which the scripts publish changes while a client watches."""
        return self.state_key.decode() + ":watch"


def hash_tag(key: bytes) -> bytes:
    """Returns the part of a key between the braces: keys that share it are in one slot."""
    return key[key.index(b"{") + 1 : key.index(b"}")]
