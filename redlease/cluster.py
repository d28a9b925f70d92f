"""A cluster: one connection for each master that is used, and each call to the master that serves its resource.

Requests, places, leases and all that is on its way out know nothing of where a resource is: they ask for it before
every call. So when a slot moves, or a replica takes a master's place, they go on with the same request where that is
now, and find their permit or their place there.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import secrets
from collections.abc import Callable

from redis import exceptions

from . import wire
from .addresses import Address, Servers
from .connection import BACKOFF_S, explain, refusal_of
from .errors import RedleaseError
from .node import Asking, Node
from .route import Link, OnReply, Reached, Route, backed_off, everything
from .topology import SLOTS, Topology, ask_node, changed_slots, key_slot, read_moved

logger = logging.getLogger("redlease")

LINKS_MOST = 10_000  # resources of which it is remembered where they are
ASK_S = 1.0  # how long one node may take to tell where the slots are


class Redirected(wire.Fault):
    """An error reply that was heeded: the same call goes elsewhere when it is repeated."""

    passes = True
    is_seen_to = True


class Nowhere:
    """What serves a slot that has no master, as far as is known."""

    ready = False
    refusal: RedleaseError | None = None

    def send(self, resource: wire.Resource, script: wire.Script, tail: bytes, on_reply: OnReply) -> None:  # noqa: ARG002
        raise RuntimeError("only a link that is ready can be called")


class Cluster(Route):
    """The connections to the masters of one cluster.

    Args:
        servers: Some of its nodes, and what all of them have in common.
        prefix: Of the keys and channels.
        on_ready: Called when resources can be called again, or somewhere else, with what tells which.
        on_message: Called with each payload published to this client.
        kept: The state keys of all resources that something is kept of.
    """

    def __init__(
        self,
        servers: Servers,
        prefix: str,
        on_ready: Callable[[Reached], None],
        on_message: Callable[[bytes], None],
        kept: Callable[[], set[bytes]],
    ) -> None:
        super().__init__()
        client = secrets.token_hex(8)
        self.channel = f":{client}"  # beside the keys of each resource
        self.scripts = wire.SCRIPTS
        self.ready = False
        self.trouble = "it has not been reached yet"
        self._servers = servers
        self._prefix = prefix
        self._node_channel = f"{prefix}:client:{client}"
        self._on_ready = on_ready
        self._on_message = on_message
        self._shortest_ms: Callable[[], float] = lambda: math.inf
        self._topology = Topology([None] * SLOTS, frozenset())
        self._nodes: dict[Address, Node] = {}
        # By hash tag: who has the keys already of a slot that is still another's.
        self._asked: dict[bytes, Node] = {}
        self._nowhere = Nowhere()
        # By state key, where the last call went and the next one goes, for as long as nothing has changed.
        self._links: dict[bytes, Node] = {}
        self._kept = kept
        self._listeners: list[tuple[str, Callable[[bytes], None]]] = []
        self._retiring: set[asyncio.Task[None]] = set()
        self._ask_first: Address | None = None
        self._stale = asyncio.Event()
        self._changed = asyncio.Event()

    # Calls

    def of(self, resource: wire.Resource) -> Link:
        return self._links.get(resource.state_key) or self._look_up(resource)

    def _look_up(self, resource: wire.Resource) -> Link:
        node = self._serving(resource)
        if node is None:
            return self._nowhere
        if self._asked and self._asked.get(wire.hash_tag(resource.state_key)) is node:
            return Asking(node)
        if node.ready:
            node.hear(resource.state_key)
            if len(self._links) >= LINKS_MOST:
                self._links.clear()
            self._links[resource.state_key] = node
        return node

    def _serving(self, resource: wire.Resource) -> Node | None:
        key = resource.state_key
        if self._asked and (asked := self._asked.get(wire.hash_tag(key))) is not None:
            return asked
        address = self._topology.owners[key_slot(key)]
        if address is None or self._closed:
            return None
        return self._nodes.get(address) or self._connect(address)

    def _connect(self, address: Address) -> Node:
        """Begins to connect to a node that is used from now on."""
        pool = self._servers.pool(address)
        node = Node(address, pool, self._prefix, owner=self, channel=self._node_channel, on_message=self._on_message)
        self._nodes[address] = node
        node.scripts = self.scripts
        node.be_patient_for(self._shortest_ms)
        for channel, listener in self._listeners:
            node.listen(channel, listener)
        node.start()
        return node

    async def until_ready(self, resource: wire.Resource | None = None) -> None:
        self.start()
        while True:
            ready, refusal = self.ready, self._nowhere.refusal
            if resource is not None:
                link = self.of(resource)
                ready, refusal = link.ready, link.refusal
            if ready:
                return
            if refusal is not None:
                raise refusal
            await self._changed.wait()

    def be_patient_for(self, shortest_ms: Callable[[], float]) -> None:
        self._shortest_ms = shortest_ms

    def look_sooner(self, wait_ms: float) -> None:
        for node in self._nodes.values():
            if node.awaits:
                node.look_sooner(wait_ms)

    # Messages

    async def subscribe(self, channel: str, listener: Callable[[bytes], None]) -> None:
        """Listens to one more ordinary channel, on every node: nodes pass its messages on to each other."""
        self._listeners.append((channel, listener))
        await asyncio.gather(*(node.subscribe(channel, listener) for node in self._nodes.values()))

    def unsubscribe(self, channel: str, listener: Callable[[bytes], None]) -> None:
        self._listeners.remove((channel, listener))
        for node in self._nodes.values():
            node.unsubscribe(channel, listener)

    # What the nodes tell

    def on_node(self, node: Node) -> None:
        """The node can be called, or has refused this client."""
        self._changes()
        self._on_ready(lambda resource: self.serves(node, resource))

    def lost(self, node: Node, why: str) -> None:
        """The node can be called no longer: perhaps another has taken its place."""
        self.trouble = f"{node.address}: {why}"
        self._links.clear()
        self._stale.set()

    def moved(self, node: Node) -> None:
        """The node no longer serves something: it is the first to know where that is now."""
        self._ask_first = node.address
        self._links.clear()
        self._stale.set()

    def kept(self) -> set[bytes]:
        """The state keys of all resources that something is kept of; the others are no longer listened to."""
        self._links.clear()
        return self._kept()

    def serves(self, node: Node, resource: wire.Resource) -> bool:
        """Whether calls on the resource go to this node."""
        key = resource.state_key
        asked = self._asked.get(wire.hash_tag(key)) if self._asked else None
        return asked is node if asked is not None else self._topology.owners[key_slot(key)] == node.address

    def redirected(self, node: Node, tag: bytes, fault: wire.Fault) -> wire.Fault:
        """Heeds an error reply to a call on keys with that hash tag; returns what the caller is told."""
        self._links.clear()
        if self._closed:
            return fault
        if fault.code == "MOVED":
            self._asked.pop(tag, None)
            slot, announced = read_moved(fault.text, node.address)
            self._ask_first = self._servers.reached(announced)
            self._stale.set()
            self._assign(slot, self._ask_first)
        elif fault.code == "ASK":
            _, announced = read_moved(fault.text, node.address)
            address = self._servers.reached(announced)
            self._asked[tag] = self._nodes.get(address) or self._connect(address)
        elif fault.is_half_done:
            return wire.Fault(f"TRYAGAIN {fault.text}")
        else:
            if fault.passes:
                self._asked.pop(tag, None)
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
        self._changed.set()  # whoever waits looks again
        self._changed.clear()

    # Life

    @property
    def refusal(self) -> RedleaseError | None:
        """Why no node would say where the slots are."""
        return self._nowhere.refusal

    async def close(self) -> None:
        """Ends every connection; bounded in time."""
        self._closed = True
        self._links.clear()
        if not self.at_home:
            return  # nothing of it can be ended from here
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        await asyncio.gather(*(node.close() for node in self._nodes.values()), *self._retiring)

    async def _run(self) -> None:
        """Looks where the slots are; again when something hints at a change, and until every slot has its master."""
        attempt = 0
        while True:
            self._stale.clear()
            try:
                self._apply(await self._find())
            except Exception as error:  # noqa: BLE001  whatever it is, somebody waits to be told
                self.trouble, self._nowhere.refusal = explain(error), refusal_of(error)
                self._changes()
                if self._nowhere.refusal is not None:
                    self._on_ready(everything)
                attempt += 1
            else:
                attempt = 0 if self._is_whole else attempt + 1
            first_s, most_s = BACKOFF_S
            await asyncio.sleep(backed_off(first_s, attempt, most_s) * random.uniform(0.5, 1.0))
            if attempt == 0:
                await self._stale.wait()

    @property
    def _is_whole(self) -> bool:
        """Whether every slot has a master, and those that are used can be called as far as is known."""
        return None not in self._topology.owners and not any(node.lost for node in self._nodes.values())

    async def _find(self) -> Topology:
        """The answer of the first node that gives one: those asked last are the ones that were lost."""
        first, self._ask_first = self._ask_first, None
        lost = {address for address, node in self._nodes.items() if node.lost}
        addresses = list(self._topology.nodes | set(self._servers.seeds))
        random.shuffle(addresses)
        addresses.sort(key=lambda address: (address != first, address in lost))
        troubles: list[Exception] = []
        for address in addresses:
            try:
                async with asyncio.timeout(ASK_S):
                    found = await ask_node(self._servers, address)
                if any(found.owners):
                    return found
                troubles.append(exceptions.ConnectionError(f"{address} is a node that knows of no master"))
            except Exception as error:  # noqa: BLE001  the next one may do better
                troubles.append(error)
        raise next((trouble for trouble in troubles if refusal_of(trouble)), troubles[-1])

    def _apply(self, found: Topology) -> None:
        """Goes by it from now on: what is served elsewhere is asked for there."""
        changed = changed_slots(self._topology.owners, found.owners)
        asked = set(self._asked)
        self._topology = found
        self._asked.clear()
        self._nowhere.refusal = None
        self.ready = True
        used = set(found.owners)
        for address in [address for address in self._nodes if address not in used]:
            node = self._nodes.pop(address)
            node.give_up()  # before anything is asked for elsewhere: what it has not answered is asked for again
            task = asyncio.create_task(node.close(), name="redlease leaves a node")
            self._retiring.add(task)
            task.add_done_callback(self._retiring.discard)
        self._changes()
        if changed or asked:
            self._on_ready(
                lambda resource: key_slot(resource.state_key) in changed or wire.hash_tag(resource.state_key) in asked
            )
