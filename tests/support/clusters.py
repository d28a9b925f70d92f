"""Clusters, and a primary that Sentinels watch, of real servers on loopback."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any, Self

import redis
from redis.crc import key_slot

from ports import free_port
from servers import Server, find_binary

if TYPE_CHECKING:
    from collections.abc import Callable

SLOTS = 16384
WITHIN = 20.0
NODE_TIMEOUT_MS = 1000


def until(condition: Callable[[], Any], within: float = WITHIN) -> Any:
    """Return what the condition returns once that is true; errors of a server that is not there yet mean "not yet"."""
    deadline = time.monotonic() + within
    while True:
        answer = None
        with contextlib.suppress(redis.RedisError):
            answer = condition()
        if answer:
            return answer
        assert time.monotonic() < deadline, "the servers did not come to terms"
        time.sleep(0.01)


class Cluster:
    """Masters with a third of the slots each, and replicas of theirs; ``arguments`` are for all of them."""

    def __init__(self, engine: str, *arguments: str, masters: int = 3, replicas: int = 0) -> None:
        """Choose ports; nothing runs before ``start``."""
        self.engine = engine
        self.masters = [self._node(arguments) for _ in range(masters)]
        self.replicas = [self._node(arguments) for _ in range(replicas)]

    def _node(self, arguments: tuple[str, ...]) -> Server:
        settings = {
            "cluster-enabled": "yes",
            "cluster-node-timeout": str(NODE_TIMEOUT_MS),
            "cluster-replica-validity-factor": "0",
            "repl-diskless-sync-delay": "0",
        }
        words = [word for name, value in settings.items() for word in (f"--{name}", value)]
        return Server(self.engine, *words, *arguments, port=free_port())

    def __enter__(self) -> Self:
        """Start."""
        return self.start()

    def __exit__(self, *_: object) -> None:
        """Stop."""
        self.stop()

    @property
    def nodes(self) -> list[Server]:
        """All of them, masters first."""
        return self.masters + self.replicas

    @property
    def url(self) -> str:
        """The first two nodes: a client finds the others."""
        return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes[:2])

    def start(self) -> Self:
        """Start the nodes, share out the slots, and wait until every node serves."""
        try:
            for number, node in enumerate(self.nodes):
                node.start()
                node.cli("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            share = -(-SLOTS // len(self.masters))
            for number, node in enumerate(self.masters):
                slots = range(number * share, min(SLOTS, (number + 1) * share))
                node.cli("CLUSTER", "ADDSLOTS", *slots)
                node.cli("CLUSTER", "MEET", "127.0.0.1", self.nodes[0].port)
            for node in self.replicas:
                node.cli("CLUSTER", "MEET", "127.0.0.1", self.nodes[0].port)
            until(lambda: all(self._knows_all(node) for node in self.nodes))
            for number, node in enumerate(self.replicas):
                node.cli("CLUSTER", "REPLICATE", self.id_of(self.masters[number % len(self.masters)]))
            until(lambda: all(is_replicating(node) for node in self.replicas))
            until(lambda: all(self._sees_whole(node) for node in self.nodes))
        except BaseException:
            self.stop()
            raise
        return self

    def rest(self) -> Self:
        """Let the nodes, none of which is to fail, look after themselves and each other once a second."""
        for node in self.nodes:
            node.cli("CONFIG", "SET", "cluster-node-timeout", 10 * NODE_TIMEOUT_MS)
            node.cli("CONFIG", "SET", "dynamic-hz", "no")
            node.cli("CONFIG", "SET", "hz", 1)
        return self

    def stop(self) -> None:
        """End all nodes."""
        for node in self.nodes:
            node.stop()

    def id_of(self, node: Server) -> str:
        """Return the name by which nodes call a node."""
        return str(node.cli("CLUSTER", "MYID"))

    def master_of(self, key: str) -> Server:
        """Return the node that serves a key now; between two masters a node may name none, so it is asked again."""
        slot = key_slot(key.encode())

        def named() -> list[int]:
            shares = _slots(next(node for node in self.nodes if node.is_running))
            return [serving[0][1] for first, last, *serving in shares if first <= slot <= last]

        (port,) = until(named)
        return next(node for node in self.nodes if node.port == port)

    def move_slot(self, slot: int, source: Server, target: Server) -> None:
        """Move a slot with its keys, in the steps of `redis-cli --cluster reshard`."""
        self.begin_move(slot, source, target)
        self.move_keys(slot, source, target)
        self.end_move(slot, target)

    def begin_move(self, slot: int, source: Server, target: Server) -> None:
        """Let the source give a slot away, and the target take it, key by key.

        The nodes agree first: one that takes a slot over before it has heard of the last move may give its claim a
        number that is taken, and in the end each of two nodes says that the slot is the other's.
        """
        until(lambda: len({self._view_of(node) for node in self.masters}) == 1)
        target.cli("CLUSTER", "SETSLOT", slot, "IMPORTING", self.id_of(source))
        source.cli("CLUSTER", "SETSLOT", slot, "MIGRATING", self.id_of(target))

    @staticmethod
    def move_keys(slot: int, source: Server, target: Server) -> None:
        """Move the keys that are in a slot now."""
        while keys := source.cli("CLUSTER", "GETKEYSINSLOT", slot, 100):
            source.cli("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *keys)

    def end_move(self, slot: int, target: Server) -> None:
        """Let the slot be the target's."""
        owner = self.id_of(target)
        for node in (target, *(node for node in self.masters if node is not target)):
            node.cli("CLUSTER", "SETSLOT", slot, "NODE", owner)

    @staticmethod
    def _view_of(node: Server) -> frozenset[tuple[str, ...]]:
        """Return, for each node that it knows, the name, the number of its claim, and the slots."""
        lines = [line.split() for line in str(raw_reply(node, "CLUSTER", "NODES")).splitlines()]
        return frozenset((words[0], words[6], *(word for word in words[8:] if "[" not in word)) for words in lines)

    def _knows_all(self, node: Server) -> bool:
        return told(node, "CLUSTER", "INFO")["cluster_known_nodes"] == str(len(self.nodes))

    def _sees_whole(self, node: Server) -> bool:
        shares = _slots(node)
        replicas = sum(len(serving) - 1 for _, _, *serving in shares)
        whole = sum(last - first + 1 for first, last, *_ in shares) == SLOTS and replicas == len(self.replicas)
        return whole and told(node, "CLUSTER", "INFO")["cluster_state"] == "ok"


def told(node: Server, *words: str) -> dict[str, str]:
    """Return what a node says in lines of `name:value`."""
    text = raw_reply(node, *words)
    return dict(line.split(":", 1) for line in str(text).splitlines() if ":" in line)


def is_replicating(node: Server) -> bool:
    """Tell whether a replica is connected to its master and has its data."""
    return told(node, "INFO", "replication").get("master_link_status") == "up"


def raw_reply(node: Server, *words: str) -> Any:
    """Return a reply as the server wrote it."""
    with redis.Redis.from_url(node.unix_url, decode_responses=True, protocol=2) as client:
        client.response_callbacks.clear()
        return client.execute_command(*words)


def _slots(node: Server) -> list[Any]:
    return list(raw_reply(node, "CLUSTER", "SLOTS"))


class Watched:
    """A primary with a replica, and Sentinels that put the replica in its place when it dies."""

    service = "mymaster"

    def __init__(self, engine: str, *, sentinels: int = 3, down_after_ms: int = 500) -> None:
        """Choose ports; nothing runs before ``start``."""
        at_once = ("--repl-diskless-sync-delay", "0")
        self.primary = Server(engine, *at_once, port=free_port())
        following = ("--replicaof", "127.0.0.1", str(self.primary.port))
        self.replica = Server(engine, *at_once, *following, port=free_port())
        self.sentinels = [Server(engine, sentinel=True, port=free_port()) for _ in range(sentinels)]
        self._down_after_ms = down_after_ms
        self._engine = engine

    def __enter__(self) -> Self:
        """Start."""
        return self.start()

    def __exit__(self, *_: object) -> None:
        """Stop."""
        self.stop()

    @property
    def servers(self) -> list[Server]:
        """All of them."""
        return [self.primary, self.replica, *self.sentinels]

    @property
    def url(self) -> str:
        """The Sentinels, and the name of what they watch."""
        addresses = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in self.sentinels)
        return f"redis+sentinel://{addresses}/{self.service}/0"

    def start(self) -> Self:
        """Start them all, and wait until the replica follows and every Sentinel knows it and the others."""
        assert find_binary(self._engine)
        try:
            for server in self.servers:
                server.start()
            for sentinel in self.sentinels:
                sentinel.cli("SENTINEL", "MONITOR", self.service, "127.0.0.1", self.primary.port, 2)
                for name, value in {"down-after-milliseconds": self._down_after_ms, "failover-timeout": 5000}.items():
                    sentinel.cli("SENTINEL", "SET", self.service, name, value)
            until(lambda: all(self._knows_all(sentinel) for sentinel in self.sentinels))
            until(lambda: is_replicating(self.replica))
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """End them all."""
        for server in self.servers:
            server.stop()

    def _knows_all(self, sentinel: Server) -> bool:
        words = raw_reply(sentinel, "SENTINEL", "MASTER", self.service)
        known = dict(zip(words[::2], words[1::2], strict=True))
        others, replicas = int(known["num-other-sentinels"]), int(known["num-slaves"])
        return (others, replicas) == (len(self.sentinels) - 1, 1)
