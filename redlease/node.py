"""The connection to one node of a cluster, and what it hears there."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from redis.asyncio import ConnectionPool

from . import wire
from .addresses import Address
from .connection import Connection
from .errors import RedleaseError
from .route import OnReply, Reply

logger = logging.getLogger("redlease")

# So many channels are listened to on one connection before those are left of which nothing is kept.
CHANNELS_MIN = 1000
PROBES_MOST = 200  # names that are tried to find one which the node serves


class Owner(Protocol):
    """The cluster, as its nodes see it."""

    channel: str

    def on_node(self, node: Node) -> None:
        """The node can be called, or has refused this client."""

    def lost(self, node: Node, why: str) -> None:
        """The node can be called no longer."""

    def moved(self, node: Node) -> None:
        """The node says that it no longer serves something."""

    def redirected(self, node: Node, tag: bytes, fault: wire.Fault) -> wire.Fault:
        """An error reply of the node to a call on keys with that hash tag; returns what the caller is told."""
        ...

    def serves(self, node: Node, resource: wire.Resource) -> bool:
        """Whether it is this node's."""
        ...

    def kept(self) -> set[bytes]:
        """The state keys of all resources that something is kept of."""
        ...


class Node(Connection):
    """The connection to one node.

    A resource's messages go to a channel beside its keys, so that the script which publishes stays in its slot. It is
    listened to before the first call leaves: no message can come in between.
    """

    def __init__(
        self,
        address: Address,
        pool: ConnectionPool,
        prefix: str,
        *,
        owner: Owner,
        channel: str,
        on_message: Callable[[bytes], None],
    ) -> None:
        super().__init__(pool, prefix, channel, partial(owner.on_node, self), on_message)
        self.address = address
        self.lost = False
        self._owner = owner
        self._hears = on_message
        self._suffix = owner.channel.encode()
        self._channels: dict[bytes, None] = {}  # by the state key of their resource
        self._leaving: dict[bytes, int] = {}  # how many requests to leave one are without an answer
        self._channels_most = CHANNELS_MIN
        self._warned = False

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.address}>"

    @property
    def moves(self) -> bool:
        """A replica is one for now: the cluster knows what took its place."""
        return True

    # Calls

    @property
    def awaits(self) -> bool:
        """Whether a reply is looked out for."""
        return self._watchdog is not None

    def send(self, resource: wire.Resource, script: wire.Script, tail: bytes, on_reply: OnReply) -> None:
        super().send(resource, script, tail, partial(self._answered, resource.state_key, on_reply))

    def _answered(self, key: bytes, on_reply: OnReply, reply: Reply) -> None:
        if type(reply) is wire.Fault:
            reply = self._owner.redirected(self, wire.hash_tag(key), reply)
        on_reply(reply)

    def send_asking(self, resource: wire.Resource, script: wire.Script, tail: bytes, on_reply: OnReply) -> None:
        """Sends a call on keys that the node is only just taking over."""
        self._enqueue(wire.plain("ASKING"), None, lambda _: None)
        self.send(resource, script, tail, on_reply)

    # Messages

    def hear(self, key: bytes) -> None:
        """Listens from now on to what is published about the resource with this state key."""
        if key in self._channels or not self.ready:
            return
        if len(self._channels) >= self._channels_most:
            self._leave_channels(self._owner.kept())
        self._channels[key] = None
        verb = "SSUBSCRIBE" if self.server.has_sharded_channels else "SUBSCRIBE"
        self._subscription(verb, self._channel_of(key), partial(self._listens, key))

    def _channel_of(self, key: bytes) -> str:
        return (key + self._suffix).decode()

    def _listens(self, key: bytes, reply: Reply) -> None:
        if isinstance(reply, wire.Fault):
            if reply.not_allowed:
                self._warn(reply)
            else:
                self._channels.pop(key, None)

    def _warn(self, fault: wire.Fault) -> None:
        """Says once that no messages come; every beat asks after what none told."""
        if not self._warned:
            self._warned = True
            logger.warning("%s: grants are noticed late: %s", self.address, fault.error())

    def _leave_channels(self, kept: set[bytes]) -> None:
        verb = "SUNSUBSCRIBE" if self.server.has_sharded_channels else "UNSUBSCRIBE"
        for key in [key for key in self._channels if key not in kept]:
            del self._channels[key]
            self._leaving[key] = self._leaving.get(key, 0) + 1
            self._subscription(verb, self._channel_of(key), partial(self._left, key))
        self._channels_most = max(CHANNELS_MIN, 2 * len(self._channels))

    def _left(self, key: bytes, _: Reply) -> None:
        self._leaving[key] -= 1
        if not self._leaving[key]:
            del self._leaving[key]

    def on_push(self, push: list[Any]) -> None:
        key = push[1].removesuffix(self._suffix) if isinstance(push[1], bytes) else b""
        if key not in self._channels:
            super().on_push(push)
        elif push[0] in (b"smessage", b"message"):
            self._tell(self._hears, push[2])
        elif push[0] == b"sunsubscribe" and key not in self._leaving:  # nobody asked for it: the slot is another node's
            del self._channels[key]
            self._owner.moved(self)
        else:
            super().on_push(push)

    # Life

    def give_up(self) -> None:
        """Ends it at once, so that every call without a reply is told; `close` is still to follow."""
        self._closed = True
        self._abort("it serves nothing any more")

    def _become_ready(self) -> None:
        self.lost = False
        self._channels.clear()
        super()._become_ready()

    def _abort(self, why: str) -> None:
        super()._abort(why)
        if not self._closed:
            self.lost = True
            self._owner.lost(self, why)

    def _probed_by(self) -> tuple[wire.Resource, str]:
        # One that serves next to nothing is left untried: that the keys are elsewhere is no want of a right.
        resource = wire.Resource(self._prefix, f"probe of {self.channel}")
        for number in range(PROBES_MOST):
            if self._owner.serves(self, resource):
                break
            resource = wire.Resource(self._prefix, f"probe {number} of {self.channel}")
        return resource, self._owner.channel


class Asking:
    """A node that is only just taking over a slot: every call has to say that it was sent there."""

    def __init__(self, node: Node) -> None:
        self._node = node

    @property
    def ready(self) -> bool:
        return self._node.ready

    @property
    def refusal(self) -> RedleaseError | None:
        return self._node.refusal

    def send(self, resource: wire.Resource, script: wire.Script, tail: bytes, on_reply: OnReply) -> None:
        self._node.send_asking(resource, script, tail, on_reply)
