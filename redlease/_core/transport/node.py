"""The connection to one node of a cluster, and its subscriptions there."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from redis.asyncio import ConnectionPool

from redlease._core.protocol import encoding
from redlease._core.protocol.encoding import Resource
from redlease._core.protocol.error_replies import ErrorReply
from redlease._core.protocol.scripts import Script
from redlease.errors import RedleaseError

from .addresses import Address
from .base import Departs, OnReply, Reply
from .connection import Connection
from .opening.delivery import DeliveryProbe
from .opening.manner import Manner

logger = logging.getLogger("redlease")

# How many channels a connection subscribes to before it unsubscribes from those of resources not in use.
CHANNELS_MIN = 1000
PROBES_MOST = 200  # names tried to find one that the node serves


class Owner(Protocol):
    """The cluster, as its nodes see it."""

    channel: str

    def on_node(self, node: Node) -> None:
        """Called when the node can be called, or has refused this client."""

    def lost(self, node: Node, why: str) -> None:
        """Called when the connection to the node is lost."""

    def on_manner_of_node(self) -> None:
        """Called when it may have changed how the client works with a node."""

    def moved(self, node: Node) -> None:
        """Called when the node no longer serves a slot."""

    def redirected(self, node: Node, tag: bytes, fault: ErrorReply) -> ErrorReply:
        """Handles an error reply to a call on keys with that hash tag; returns the error for the caller."""
        ...

    def serves(self, node: Node, resource: Resource) -> bool:
        """Returns True if calls on the resource go to this node."""
        ...

    def subscribed_keys(self) -> set[bytes]:
        """Returns the state keys of all resources that the client holds or waits for."""
        ...


class Node(Connection):
    """The connection to one node.

    Scripts publish the messages about a resource to a channel in the slot of its keys. The node subscribes to it before
    the first call is sent, so that no message is missed.
    """

    in_cluster = True

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
        super().__init__(pool, prefix, partial(owner.on_node, self), on_message, channel)
        self.address = address
        self.lost = False
        self._owner = owner
        self._on_channel_message = on_message
        self._suffix = owner.channel.encode()
        self._channels: dict[bytes, None] = {}  # by the state key of their resource
        self._leaving: dict[bytes, int] = {}  # by state key: unsubscribe calls without a reply
        self._channels_most = CHANNELS_MIN

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.address}>"

    @property
    def role_may_change(self) -> bool:
        """True: if a node is a replica now, the cluster finds the new master."""
        return True

    # Calls

    @property
    def awaits(self) -> bool:
        """Whether the watchdog runs, since calls are unanswered."""
        return self._watchdog is not None

    def send(
        self, resource: Resource, script: Script, tail: bytes, on_reply: OnReply, departs: Departs | None = None
    ) -> bool:
        return super().send(resource, script, tail, partial(self._answered, resource.state_key, on_reply), departs)

    def _answered(self, key: bytes, on_reply: OnReply, reply: Reply) -> None:
        if type(reply) is ErrorReply:
            reply = self._owner.redirected(self, encoding.hash_tag(key), reply)
        on_reply(reply)

    def send_asking(
        self, resource: Resource, script: Script, tail: bytes, on_reply: OnReply, departs: Departs | None = None
    ) -> bool:
        """Sends a call on keys of a slot that the node is importing, right behind the command that allows it."""

        def asking() -> bool:
            if departs is not None and not departs():
                return False
            self._enqueue(encoding.plain("ASKING"), None, lambda _: None)
            return True

        if self.has_room:
            self._enqueue(encoding.plain("ASKING"), None, lambda _: None)
        return self.send(resource, script, tail, on_reply, asking)

    # Messages

    def subscribe_resource(self, key: bytes) -> None:
        """Subscribes to the messages about the resource with this state key."""
        if key in self._channels or not self.ready:
            return
        if len(self._channels) >= self._channels_most:
            self._leave_channels(self._owner.subscribed_keys())
        self._channels[key] = None
        self._subscription(self._verb(), self._channel_of(key), partial(self._listens, key))

    def _verb(self, un: str = "") -> str:
        return f"S{un}SUBSCRIBE" if self.server.has_sharded_channels else f"{un}SUBSCRIBE"

    def _channel_of(self, key: bytes) -> str:
        return (key + self._suffix).decode()

    def _listens(self, key: bytes, reply: Reply) -> None:
        if isinstance(reply, ErrorReply) and not reply.not_allowed:  # else the delivery probe has warned
            self._channels.pop(key, None)

    def _leave_channels(self, subscribed_keys: set[bytes]) -> None:
        for key in [key for key in self._channels if key not in subscribed_keys]:
            del self._channels[key]
            self._leaving[key] = self._leaving.get(key, 0) + 1
            self._subscription(self._verb("UN"), self._channel_of(key), partial(self._left, key))
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
            self._notify(self._on_channel_message, push[2])
        elif push[0] == b"sunsubscribe" and key not in self._leaving:  # sent by the server: the slot has moved
            del self._channels[key]
            self._owner.moved(self)
        else:
            super().on_push(push)

    # Life

    def release_request(self) -> None:
        """Closes the connection at once, so that unanswered calls get None; call `close` after it."""
        self._closed = True
        self._abort("it serves nothing any more")

    def _listen_for(self, probe: DeliveryProbe, resource: Resource) -> str:
        channel = self._channel_of(resource.state_key)
        self._listeners[channel.encode()] = [probe.arrived]
        self._subscription(self._verb(), channel, partial(_refuse, probe))
        return channel

    def _stop_probing(self) -> None:
        if self._listeners.pop(self._probe_channel.encode(), None) and self._driver is not None:
            self._subscription(self._verb("UN"), self._probe_channel, lambda _: None)
        super()._stop_probing()

    def set_manner(self, manner: Manner) -> None:
        """Records it; the cluster says so for all its nodes."""
        self.manner = manner
        self._owner.on_manner_of_node()

    def _become_ready(self) -> None:
        self.lost = False
        self._channels.clear()
        super()._become_ready()

    def _abort(self, why: str) -> None:
        super()._abort(why)
        if not self._closed:
            self.lost = True
            self._owner.lost(self, self.trouble)

    def _probed_by(self) -> tuple[Resource, str]:
        # If no name of this node is found, the probe gets MOVED, which does not count as a missing permission.
        resource = Resource(self._prefix, f"probe of {self.channel}")
        for number in range(PROBES_MOST):
            if self._owner.serves(self, resource):
                break
            resource = Resource(self._prefix, f"probe {number} of {self.channel}")
        return resource, self._owner.channel


def _refuse(probe: DeliveryProbe, reply: Reply) -> None:
    if isinstance(reply, ErrorReply):
        probe.refused(reply.text)


class ImportingNode:
    """A node that is importing a slot: it accepts a call on its keys only after ASKING."""

    pool = None

    def __init__(self, node: Node) -> None:
        self._node = node

    @property
    def ready(self) -> bool:
        return self._node.ready

    @property
    def refusal(self) -> RedleaseError | None:
        return self._node.refusal

    @property
    def silent_ms(self) -> float:
        return self._node.silent_ms

    def send(self, *call: Any) -> bool:
        return self._node.send_asking(*call)
