"""Reads from a node which master serves which slots of a cluster."""

from __future__ import annotations

from typing import Any, NamedTuple

from redis import exceptions
from redis.crc import REDIS_CLUSTER_HASH_SLOTS as SLOTS
from redis.crc import key_slot

from redlease.errors import RedleaseError

from .addresses import Address, Servers
from .opening.driver import open_connection

__all__ = ["SLOTS", "Topology", "changed_slots", "key_slot", "query_node", "read_moved", "read_slots"]


class Topology(NamedTuple):
    """The master of every slot, None for a slot without one; and all nodes, replicas included."""

    owners: list[Address | None]
    nodes: frozenset[Address]


def _host(text: Any, queried: Address) -> str:
    # A node that does not know its own address announces an empty host: then the host that was asked is used.
    text = text.decode() if isinstance(text, bytes) else str(text or "")
    return queried.host if text in ("", "?") else text


def read_slots(reply: list[Any], queried: Address) -> Topology:
    """Parses CLUSTER SLOTS, a list of `[first, last slot, [host, port, ...] of the master, ... of a replica, ...]`."""
    owners: list[Address | None] = [None] * SLOTS
    nodes = set()
    for first, last, *serving in reply:
        addresses = [Address(_host(host, queried), port) for host, port, *_ in serving]
        nodes.update(addresses)
        if addresses:
            owners[first : last + 1] = [addresses[0]] * (last + 1 - first)
    return Topology(owners, frozenset(nodes))


def read_moved(text: str, queried: Address) -> tuple[int, Address]:
    """Parses slot and address of `MOVED 3999 host:port` or `ASK 3999 host:port`, a reply of the node `queried`."""
    _, slot, where = text.split(" ")[:3]
    host, _, port = where.rpartition(":")
    return int(slot), Address(_host(host, queried), int(port))


async def query_node(servers: Servers, address: Address) -> Topology:
    """Asks one node for the topology, on a temporary connection; the addresses are those to connect to.

    Raises:
        RedleaseError: The server is not part of a cluster.
        redis.RedisError, OSError: The node was not reached, or refused.
    """
    connection = await open_connection(servers.pool(address), 2)
    try:
        await connection.send_command("CLUSTER", "SLOTS")
        reply = await connection.read_response(disable_decoding=True)
    except exceptions.ResponseError as error:
        if not str(error).startswith("This instance has cluster support disabled"):
            raise
        raise RedleaseError(f"the server at {address} is no part of a cluster. Give it as redis://{address}") from None
    finally:
        await connection.disconnect(nowait=True)
    found = read_slots(reply, address)
    reached = {node: servers.reached(node) for node in found.nodes}
    return Topology([owner and reached[owner] for owner in found.owners], frozenset(reached.values()))


def changed_slots(old: list[Address | None], new: list[Address | None]) -> frozenset[int]:
    """Returns the slots whose master has changed."""
    return frozenset(slot for slot in range(SLOTS) if old[slot] != new[slot])
