"""The rights of Redis users: the commands under which redlease runs, and no others, as rules of an ACL."""

from __future__ import annotations

from .encoding import keys_pattern

_CONNECT = "evalsha info script|load select subscribe time wait"
_READ = "hget hlen hmget xrevrange zcard zcount zrange zrangebyscore zrank zscore"
_WRITE = "hdel hkeys hset pexpireat publish unsubscribe xadd zadd zrem zremrangebyscore"
_GUARD = "eval get pttl set"
_LOOK = "pttl scan"

CLIENT = tuple(f"{_CONNECT} {_READ} {_WRITE} {_GUARD}".split())  # for services
READER = tuple(f"{_CONNECT} {_READ} {_LOOK}".split())  # for `redlease ls`, `inspect`, `top`, `doctor`, `web`
WORKER = ("hsetnx", "zrangebylex")  # what the relays of workers need besides those of a client
# What a client needs besides in a cluster, on every node. The category has the sharded channels, where the server knows
# them, and PUBSUB, which would list the channels of others.
CLUSTER_RULES = "+@pubsub -pubsub +asking +cluster|slots"
# What the probe tries of the rights to write: a user who has none of them is a reader, and no service that lacks some.
WRITES_PROBED = frozenset(_WRITE.split()) - {"publish", "unsubscribe", "xadd"}


def rules(prefix: str, commands: tuple[str, ...]) -> str:
    """Returns the rules that give a user without rights the keys and channels of a prefix, and these commands."""
    pattern = keys_pattern(prefix)
    return " ".join((f"~{pattern}", f"&{pattern}", *(f"+{command}" for command in commands)))
