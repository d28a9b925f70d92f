"""A cluster: one connection to each master in use; each call goes to the master that serves its resource.

Requests, places, leases and pending releases do not store where a resource is: they look up its endpoint before every
call. So after a slot has moved or a failover, they repeat the same request at the new master, and find their permit or
place there.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Callable, Iterable
from time import monotonic
from typing import Any

from redis import exceptions
from redis.asyncio import ConnectionPool

from redlease._core.log import report
from redlease._core.protocol import encoding, scripts
from redlease._core.protocol.encoding import Resource
from redlease._core.protocol.error_replies import ErrorReply
from redlease._core.protocol.scripts import Script
from redlease.errors import RedleaseError
from redlease.events import Disconnected, Reconnected

from .addresses import Address, Servers
from .base import Endpoint, GrowingTimeout, Reached, Transport, all_resources, backed_off, end
from .connection import BACKOFF_S
from .node import ImportingNode, Node
from .opening.handshake import explain, is_mistake, refusal_of
from .topology import SLOTS, Topology, changed_slots, key_slot, query_node, read_moved

logger = logging.getLogger("redlease")

LINKS_MOST = 10_000  # resources whose node is cached
ASK_S = (1.0, 5.0)  # the time limit for one node to answer CLUSTER SLOTS: at first, and at most after late answers


class Redirected(ErrorReply):
    """A redirection that the cluster has followed: the repeated call goes to the other node."""

    is_transient = True
    is_handled = True


class NoMaster:
    """The endpoint of a slot without a known master."""

    pool = None
    ready = False
    refusal: RedleaseError | None = None
    silent_ms = 0.0

    def send(self, *_: Any) -> bool:
        raise RuntimeError("only a link that is ready can be called")


class Cluster(Transport):
    """The connections to the masters of one cluster.

    Args:
        servers: Some of its nodes, and the settings that all of them share.
        prefix: The prefix of the keys and channels.
        on_ready: Called when resources can be called again or have moved, with a predicate that tells which.
        on_message: Called with each payload published to this client.
        kept: Returns the state keys of all resources that this client holds or waits for.
    """

    def __init__(
        self,
        servers: Servers,
        prefix: str,
        on_ready: Callable[[Reached], None],
        on_message: Callable[[bytes], None],
        subscribed_keys: Callable[[], set[bytes]],
    ) -> None:
        super().__init__()
        self.scripts = scripts.SCRIPTS
        self.ready = False
        self.trouble = "it has not been reached yet"
        self._servers = servers
        self._prefix = prefix
        self._on_ready = on_ready
        self._on_message = on_message
        self._shortest_ms: Callable[[], float] = lambda: math.inf
        self._topology = Topology([None] * SLOTS, frozenset())
        self._nodes: dict[Address, Node] = {}
        # By hash tag: the node that has imported these keys, of a slot that another node still owns (ASK).
        self._importing: dict[bytes, Node] = {}
        self._no_master = NoMaster()
        # By state key: the node of the last call, cached until the topology changes.
        self._links: dict[bytes, Node] = {}
        self._subscribed_keys = subscribed_keys
        self._listeners: list[tuple[str, Callable[[bytes], None]]] = []
        self._retiring: set[asyncio.Task[None]] = set()
        self._ask_first: Address | None = None
        self._lost_at: float | None = None  # when the first of the nodes out of reach was lost; by `monotonic`
        self._connect_timeout = GrowingTimeout(ASK_S[1])
        self._stale = asyncio.Event()
        self._changed = asyncio.Event()

    # Calls

    def endpoint_for(self, resource: Resource) -> Endpoint:
        return self._links.get(resource.state_key) or self._look_up(resource)

    def _look_up(self, resource: Resource) -> Endpoint:
        node = self._serving(resource)
        if node is None:
            return self._no_master
        if self._importing and self._importing.get(encoding.hash_tag(resource.state_key)) is node:
            return ImportingNode(node)
        if node.ready:
            node.subscribe_resource(resource.state_key)
            if len(self._links) >= LINKS_MOST:
                self._links.clear()
            self._links[resource.state_key] = node
        return node

    def _serving(self, resource: Resource) -> Node | None:
        key = resource.state_key
        if self._importing and (importing := self._importing.get(encoding.hash_tag(key))) is not None:
            return importing
        address = self._topology.owners[key_slot(key)]
        if address is None or self._closed:
            return None
        return self._nodes.get(address) or self._connect(address)

    def _connect(self, address: Address) -> Node:
        """Starts to connect to a node."""
        pool = self._servers.pool(address)
        node = Node(address, pool, self._prefix, owner=self, channel=self._node_channel, on_message=self._on_message)
        self._nodes[address] = node
        node.load_too(self.scripts)
        node.protocol = self.protocol
        node.set_silence_limit(self._shortest_ms)
        for channel, listener in self._listeners:
            node.listen(channel, listener)
        node.start()
        return node

    async def until_ready(self, resource: Resource | None = None) -> None:
        self.start()
        while True:
            ready, refusal = self.ready, self._no_master.refusal
            if resource is not None:
                link = self.endpoint_for(resource)
                ready, refusal = link.ready, link.refusal
            if ready:
                return
            if refusal is not None:
                raise refusal
            await self._changed.wait()

    def master_pools(self) -> list[ConnectionPool]:
        return [self._servers.pool(address) for address in sorted({each for each in self._topology.owners if each})]

    def load_too(self, more: Iterable[Script]) -> None:
        super().load_too(more := tuple(more))
        for node in list(self._nodes.values()):  # a blocking client's thread may make a guard
            node.load_too(more)

    def set_silence_limit(self, shortest_ms: Callable[[], float]) -> None:
        self._shortest_ms = shortest_ms

    def check_silence_by(self, wait_ms: float) -> None:
        for node in self._nodes.values():
            if node.awaits:
                node.check_silence_by(wait_ms)

    # Messages

    async def subscribe(self, channel: str, listener: Callable[[bytes], None]) -> None:
        """Subscribes to an ordinary channel on every node; nodes forward its messages to each other."""
        self._listeners.append((channel, listener))
        await asyncio.gather(*(node.subscribe(channel, listener) for node in self._nodes.values()))

    def unsubscribe(self, channel: str, listener: Callable[[bytes], None]) -> None:
        self._listeners.remove((channel, listener))
        for node in self._nodes.values():
            node.unsubscribe(channel, listener)

    # Called by the nodes

    def on_node(self, node: Node) -> None:
        """Handles a node that can be called now, or has refused this client."""
        self._changes()
        self._report_whole()
        self._on_ready(lambda resource: self.serves(node, resource))

    def on_manner_of_node(self) -> None:
        """Records how the client works with the nodes: as with the one that can do least."""
        known = [node.manner for node in self._nodes.values() if node.manner is not None]
        self.set_manner(
            max(known, key=lambda manner: (manner.silence is not None, manner.connections, manner.sends_texts))
        )

    def lost(self, node: Node, why: str) -> None:
        """Handles a lost node: asks for the slots again, since a replica may have replaced it."""
        self.trouble = f"{node.address}: {why}"
        self._links.clear()
        self._stale.set()
        if self._lost_at is None:
            self._lost_at = monotonic()
            if self.emit is not None:
                self.emit(Disconnected(self.trouble))

    def _report_whole(self) -> None:
        """Tells that every node in use is in reach again, if one of them was not."""
        if self._lost_at is not None and self._is_whole:
            lost_s, self._lost_at = monotonic() - self._lost_at, None
            if self.emit is not None:
                self.emit(Reconnected(lost_s))

    def moved(self, node: Node) -> None:
        """Handles a node that no longer serves a slot: asks it first where the slots are."""
        self._ask_first = node.address
        self._links.clear()
        self._stale.set()

    def subscribed_keys(self) -> set[bytes]:
        """Returns the state keys of all resources in use; nodes unsubscribe from the others."""
        self._links.clear()
        return self._subscribed_keys()

    def serves(self, node: Node, resource: Resource) -> bool:
        """Returns True if calls on the resource go to this node."""
        key = resource.state_key
        importing = self._importing.get(encoding.hash_tag(key)) if self._importing else None
        return importing is node if importing is not None else self._topology.owners[key_slot(key)] == node.address

    def redirected(self, node: Node, tag: bytes, fault: ErrorReply) -> ErrorReply:
        """Handles an error reply to a call on keys with that hash tag; returns the error for the caller."""
        self._links.clear()
        if self._closed:
            return fault
        if fault.code == "MOVED":
            self._importing.pop(tag, None)
            slot, announced = read_moved(fault.text, node.address)
            self._ask_first = self._servers.reached(announced)
            self._stale.set()
            self._assign(slot, self._ask_first)
        elif fault.code == "ASK":
            _, announced = read_moved(fault.text, node.address)
            address = self._servers.reached(announced)
            self._importing[tag] = self._nodes.get(address) or self._connect(address)
        elif fault.partially_executed:
            return fault
        else:
            if fault.is_transient:
                self._importing.pop(tag, None)
            if fault.code in {"CLUSTERDOWN", "MASTERDOWN"}:
                self._stale.set()
            return fault
        return Redirected(fault.text)

    def _assign(self, slot: int, address: Address) -> None:
        if self._topology.owners[slot] != address:
            self._topology.owners[slot] = address
            self._on_ready(lambda resource: key_slot(resource.state_key) == slot)

    def _changes(self) -> None:
        self._links.clear()
        self._changed.set()  # waiting callers check again
        self._changed.clear()

    # Life

    def _take_channel(self) -> None:
        self.channel = f":{self.client_id}"  # the suffix of one channel per resource
        self._node_channel = f"{self._prefix}:client:{self.client_id}"

    @property
    def refusal(self) -> RedleaseError | None:
        """The error if no node answers where the slots are because they refuse this client; None otherwise."""
        return self._no_master.refusal

    async def close(self) -> None:
        """Closes every connection, in bounded time."""
        self._closed = True
        self._links.clear()
        if not self.in_own_loop:
            return  # its tasks belong to another loop or process
        if self._task is not None:
            await end(self._task)
        await asyncio.gather(*(node.close() for node in self._nodes.values()), *self._retiring)

    async def _run(self) -> None:
        """Reads the slots; again on any sign of a change, and until every slot has a master."""
        attempt = 0
        while not self._closed:  # a cancellation may be swallowed, see `end`
            self._stale.clear()
            attempt += 1
            try:
                self._apply(await self._find())
                attempt = 0 if self._is_whole else attempt
            except Exception as error:  # noqa: BLE001  waiting callers must learn of any error
                try:
                    self._failed(error)
                except Exception as mistake:  # noqa: BLE001  the loop must go on
                    report(mistake)
            first_s, most_s = BACKOFF_S
            await asyncio.sleep(backed_off(first_s, attempt, most_s) * random.uniform(0.5, 1.0))
            if attempt == 0:
                await self._stale.wait()

    def _failed(self, error: Exception) -> None:
        """Wakes the waiting callers after a failed attempt to read the slots, with an error if the nodes refused."""
        mistake = self.ready and is_mistake(error)  # after a success, an unexpected error is a bug, not a wrong setting
        if mistake:
            report(error)
        self.trouble, self._no_master.refusal = explain(error), None if mistake else self._refused(error)
        self._changes()
        if self._no_master.refusal is not None:
            self._on_ready(all_resources)

    def _refused(self, error: Exception) -> RedleaseError | None:
        return refusal_of(error, self._prefix, cluster=True)

    @property
    def _is_whole(self) -> bool:
        """Whether every slot has a master, and no node in use is lost."""
        return None not in self._topology.owners and not any(node.lost for node in self._nodes.values())

    async def _find(self) -> Topology:
        """Returns the answer of the first node that gives one; lost nodes are asked last."""
        first, self._ask_first = self._ask_first, None
        lost = {address for address, node in self._nodes.items() if node.lost}
        addresses = list(self._topology.nodes | set(self._servers.seeds))
        random.shuffle(addresses)
        addresses.sort(key=lambda address: (address != first, address in lost))
        troubles: list[Exception] = []
        for address in addresses:
            try:
                async with self._connect_timeout.attempt(ASK_S[0]):
                    found = await query_node(self._servers, address)
                if any(found.owners):
                    return found
                troubles.append(exceptions.ConnectionError(f"{address} knows no master"))
            except Exception as error:  # noqa: BLE001  another node may answer
                if self.ready and is_mistake(error):
                    report(error)
                    error = exceptions.ConnectionError(f"{address}: {error!r}")
                troubles.append(error)
        raise next((trouble for trouble in troubles if self._refused(trouble)), troubles[-1])

    def _apply(self, found: Topology) -> None:
        """Applies a topology: closes nodes out of use, and repeats requests of resources that have moved."""
        changed = changed_slots(self._topology.owners, found.owners)
        importing = set(self._importing)
        self._topology = found
        self._importing.clear()
        self._no_master.refusal = None
        self.ready = True
        used = set(found.owners)
        for address in [address for address in self._nodes if address not in used]:
            node = self._nodes.pop(address)
            node.release_request()  # first, so that its unanswered calls are repeated at the new node
            task = asyncio.create_task(node.close(), name="redlease leaves a node")
            self._retiring.add(task)
            task.add_done_callback(self._retiring.discard)
        self._changes()
        self._report_whole()
        if changed or importing:
            self._on_ready(
                lambda resource: (
                    key_slot(resource.state_key) in changed or encoding.hash_tag(resource.state_key) in importing
                )
            )
