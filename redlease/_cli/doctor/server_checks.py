"""Checks of a master by its facts. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

from redlease._cli.plain import span
from redlease._core.transport.opening.manner import Manner

from .facts import OPTIONAL, Facts
from .findings import Finding, Level

SLOW_MS = 100.0
CLOCK_OFF_MS = 1000.0
LAG_S = 10  # a replica reports once a second
MEMORY_HIGH, MEMORY_FULL = 0.8, 0.95
SLOTS = 16384
UNSEEN = "not visible to this user"
UNREPORTED = "not reported by the server"


def check_server(facts: Facts, *, as_cluster: bool) -> Iterator[Finding]:
    """Yields what the checks of one master find; `as_cluster`: whether the URL is that of a cluster."""
    checks = (_server, _rights, _round_trip, _clock, _persistence, _eviction, _memory, _replicas)
    for check in checks:
        level, detail, advice = check(facts)
        yield Finding(check.__name__.strip("_").replace("_", " "), level, detail, advice, facts.server)
    if facts.info.get("cluster_enabled") == "1":
        level, detail, advice = _cluster(facts, as_cluster=as_cluster)
        yield Finding("cluster", level, detail, advice, facts.server)


def check_manner(manner: Manner) -> Finding:
    """Returns what the client found out about messages, protocol and scripts, while it connected."""
    scripts = "scripts are sent as text, since the server loads none" if manner.sends_texts else "scripts are loaded"
    ways = (manner.route, scripts)
    if manner.silence is None:
        return Finding("messages", Level.OK, "; ".join(["they arrive", *ways]))
    return Finding(
        "messages",
        Level.WARNING,
        "; ".join([f"none arrive ({manner.silence}), so waiting requests poll", *ways]),
        "Allow PUBLISH in scripts and SUBSCRIBE: for the Redis user, on the server, and in a proxy between. Until then "
        "a hand-off takes up to `poll_interval`",
    )


Found = tuple[Level, str, str]


def _server(facts: Facts) -> Found:
    info = facts.info
    names = [name for name in ("valkey", "redis") if f"{name}_version" in info][:1]
    version = " ".join(f"{name.title()} {info[f'{name}_version']}" for name in names) or f"version {UNREPORTED}"
    up = [f"up for {span(facts.number('uptime_in_seconds') * 1000)}"] if "uptime_in_seconds" in info else []
    detail = ", ".join([version, info.get("role", "role unknown"), *up])
    if facts.number("loading"):
        return Level.ERROR, f"{detail}; it is loading its data", "Wait: it refuses all calls until then"
    return Level.OK, detail, ""


def _rights(facts: Facts) -> Found:
    if not facts.missing and facts.config:
        return Level.OK, "the Redis user may do all that redlease does", ""
    if not facts.missing:
        detail = "the Redis user may do all that redlease does, and does not see the settings of the server"
        return Level.OK, detail, "An administrator's URL shows `appendfsync`, `save` and `min-replicas-to-write` too"
    needed = "; ".join(f"+{name} for {OPTIONAL[name][1]}" for name in facts.missing)
    grants = " ".join(f"+{name}" for name in facts.missing)
    detail = f"the Redis user may do what clients need, but lacks {needed}"
    return Level.WARNING, detail, f"Grant it where it is wanted: ACL SETUSER <user> {grants}"


def _round_trip(facts: Facts) -> Found:
    detail = f"{facts.round_trip_ms:.2f} ms in the median"
    if facts.round_trip_ms < SLOW_MS:
        return Level.OK, detail, ""
    return Level.WARNING, detail, "Each acquire takes at least one: put server and services closer to each other"


def _clock(facts: Facts) -> Found:
    ahead_ms, error_ms = facts.clock_ahead_ms, facts.clock_error_ms
    side = "ahead of" if ahead_ms > 0 else "behind"
    detail = f"{abs(ahead_ms) / 1000:.3f} s {side} this machine's, give or take {error_ms / 1000:.3f} s"
    if abs(ahead_ms) - error_ms < CLOCK_OFF_MS:
        return Level.OK, detail, ""
    advice = (
        "Leases run by the server's clock alone, but after a failover or a loss of data fences go on growing only if "
        "that clock is right: run NTP on every server"
    )
    return Level.WARNING, detail, advice


def _persistence(facts: Facts) -> Found:
    info, bounded = facts.info, "Until its lease ends, a former holder may then overlap with a new one"
    failed = [name for name in ("rdb_last_bgsave_status", "aof_last_write_status") if info.get(name, "ok") != "ok"]
    if failed:
        detail = f"the last save to disk has failed ({', '.join(failed)})"
        return Level.ERROR, detail, "The server may refuse writes: look at its disk and its log"
    if info.get("aof_enabled") == "1":
        return Level.OK, f"AOF, appendfsync {facts.config.get('appendfsync', UNSEEN)}", ""
    if "aof_enabled" not in info:
        return Level.WARNING, UNREPORTED, f"{bounded}, if a restart loses data. Look up what the server saves to disk"
    if not facts.config:
        detail = f"no AOF; whether there are RDB snapshots is {UNSEEN}"
    elif facts.config.get("save"):
        detail = "RDB snapshots only: a restart loses what came after the last one"
    else:
        detail = "none: a restart loses all permits and queues"
    return Level.WARNING, detail, f"{bounded}, and fences still grow. For less, turn on AOF: CONFIG SET appendonly yes"


def _eviction(facts: Facts) -> Found:
    policy = facts.info.get("maxmemory_policy")
    if policy is None:
        advice = "Look up its maxmemory-policy: with any but noeviction it drops permits and queues, short of memory"
        return Level.WARNING, UNREPORTED, advice
    if policy == "noeviction":
        return Level.OK, policy, ""
    level = Level.ERROR if facts.number("maxmemory") else Level.WARNING
    detail = f"maxmemory-policy is {policy}: short of memory, the server drops keys, and with them permits and queues"
    return level, detail, "Use a server of its own for locks, with: CONFIG SET maxmemory-policy noeviction"


def _memory(facts: Facts) -> Found:
    if "used_memory" not in facts.info:
        return Level.OK, UNREPORTED, ""
    used, most = facts.number("used_memory"), facts.number("maxmemory")
    if not most:
        return Level.OK, f"{used / 2**20:.0f} MiB used, no maxmemory", ""
    share = used / most
    detail = f"{used / 2**20:.0f} of {most / 2**20:.0f} MiB used ({share:.0%})"
    if share < MEMORY_HIGH:
        return Level.OK, detail, ""
    level = Level.ERROR if share >= MEMORY_FULL else Level.WARNING
    return level, detail, "A full server refuses to grant: raise maxmemory, or move other data away"


def _replicas(facts: Facts) -> Found:
    needed = facts.config.get("min-replicas-to-write", UNSEEN)
    replicas = [dict(_parts(value)) for name, value in facts.info.items() if re.fullmatch(r"slave\d+", name)]
    behind = [each for each in replicas if each.get("state") != "online" or int(each.get("lag", "0")) > LAG_S]
    usable = len(replicas) - len(behind)
    detail = f"{usable} of {len(replicas)} online" if replicas else "none"
    detail = f"{detail}, min-replicas-to-write {needed}"
    if needed.isdecimal() and usable < int(needed):
        advice = "The server refuses every write: bring replicas back, or lower min-replicas-to-write"
        return Level.ERROR, detail, advice
    if behind:
        where = ", ".join(f"{each.get('ip')}:{each.get('port')}" for each in behind)
        return Level.WARNING, f"{detail}; not following: {where}", "Look at the log of these replicas"
    return Level.OK, detail, ""


def _parts(value: str) -> Iterator[tuple[str, str]]:
    """Parses `ip=...,port=...,state=...`."""
    for part in value.split(","):
        name, _, text = part.partition("=")
        yield name, text


def _cluster(facts: Facts, *, as_cluster: bool) -> Found:
    if not as_cluster:
        detail = "the server is a node of a cluster, and the URL is that of a single server"
        return Level.ERROR, detail, "Give the URL as redis+cluster://host:port,host:port"
    detail = ", ".join(
        f"{name.removeprefix('cluster_')} {facts.cluster.get(name, 'unknown')}"
        for name in ("cluster_state", "cluster_slots_assigned", "cluster_slots_pfail", "cluster_slots_fail")
    )
    if not facts.cluster:
        return Level.WARNING, detail, "Grant the Redis user +cluster|info"
    whole = int(facts.cluster.get("cluster_slots_ok", "0")) == SLOTS
    if facts.cluster.get("cluster_state") == "ok" and whole:
        return Level.OK, detail, ""
    return Level.ERROR, detail, "Resources in slots without a master cannot be used: see CLUSTER NODES"
