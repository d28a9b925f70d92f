"""`redlease doctor`: what it makes of servers in good health and in bad."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from redlease import Redlease
from redlease._cli.doctor import key_checks
from redlease._cli.doctor.examination import examine
from redlease._cli.doctor.facts import Facts
from redlease._cli.doctor.findings import Finding, Level, lines_of
from redlease._cli.doctor.server_checks import check_server

from clusters import Cluster, Watched
from command_line import HARMLESS, HOSTILE, run_async
from helpers import eventually

if TYPE_CHECKING:
    from collections.abc import Iterable

    from conftest import OwnServer, Servers

HEALTHY = Facts(
    server="redis.example:6379",
    info={
        "redis_version": "7.2.4",
        "role": "master",
        "uptime_in_seconds": "100000",
        "aof_enabled": "1",
        "aof_last_write_status": "ok",
        "rdb_last_bgsave_status": "ok",
        "maxmemory": "1000000000",
        "used_memory": "500000000",
        "maxmemory_policy": "noeviction",
        "connected_slaves": "1",
        "slave0": "ip=10.0.0.2,port=6379,state=online,offset=14,lag=1",
        "cluster_enabled": "0",
    },
    config={"save": "3600 1", "appendfsync": "everysec", "min-replicas-to-write": "1"},
    cluster={},
    missing=[],
    round_trip_ms=0.4,
    clock_ahead_ms=-2.0,
    clock_error_ms=0.2,
)


def found(facts: Facts, check: str, *, as_cluster: bool = False) -> Finding:
    """Return what one check finds."""
    (finding,) = (each for each in check_server(facts, as_cluster=as_cluster) if each.check == check)
    return finding


def by_check(findings: Iterable[Finding]) -> dict[str, Finding]:
    """Return the findings by the name of their check."""
    return {each.check: each for each in findings}


def test_a_healthy_server_has_no_warning() -> None:
    """Every check says what it has seen, and advises nothing."""
    findings = list(check_server(HEALTHY, as_cluster=False))
    assert [each.level for each in findings] == [Level.OK] * 8
    assert all(each.detail and not each.advice for each in findings)
    assert found(HEALTHY, "server").detail == "Redis 7.2.4, master, up for 1 d 3 h"
    assert found(HEALTHY, "memory").detail == "477 of 954 MiB used (50%)"
    assert found(HEALTHY, "replicas").detail == "1 of 1 online, min-replicas-to-write 1"


@pytest.mark.parametrize(
    ("check", "changed", "level", "said"),
    [
        ("server", {"loading": "1"}, Level.ERROR, "loading"),
        ("persistence", {"aof_enabled": "0"}, Level.WARNING, "RDB snapshots only"),
        ("persistence", {"aof_last_write_status": "err"}, Level.ERROR, "aof_last_write_status"),
        ("persistence", {"rdb_last_bgsave_status": "err"}, Level.ERROR, "rdb_last_bgsave_status"),
        ("eviction", {"maxmemory_policy": "allkeys-lru"}, Level.ERROR, "allkeys-lru"),
        ("eviction", {"maxmemory_policy": "volatile-ttl", "maxmemory": "0"}, Level.WARNING, "volatile-ttl"),
        ("memory", {"maxmemory": "0"}, Level.OK, "no maxmemory"),
        ("memory", {"used_memory": "850000000"}, Level.WARNING, "85%"),
        ("memory", {"used_memory": "960000000"}, Level.ERROR, "96%"),
        ("replicas", {"slave0": "ip=10.0.0.2,port=6379,state=online,lag=60"}, Level.ERROR, "0 of 1 online"),
        (
            "replicas",
            {"slave1": "ip=10.0.0.3,port=6379,state=wait_bgsave,lag=0"},
            Level.WARNING,
            "not following: 10.0.0.3:6379",
        ),
    ],
)
def test_what_the_server_says_is_judged(check: str, changed: dict[str, str], level: Level, said: str) -> None:
    """One field of INFO is enough; whatever is not well comes with advice."""
    finding = found(replace(HEALTHY, info=HEALTHY.info | changed), check)
    assert finding.level == level
    assert said in finding.detail
    assert bool(finding.advice) == (level != Level.OK)


@pytest.mark.parametrize(
    ("check", "level"),
    [("server", Level.OK), ("persistence", Level.WARNING), ("eviction", Level.WARNING), ("memory", Level.OK)],
)
def test_what_the_server_does_not_report(check: str, level: Level) -> None:
    """Some servers have an INFO of a few fields: nothing is made of those that it lacks."""
    finding = found(replace(HEALTHY, info={}), check)
    assert finding.level == level
    assert "not reported by the server" in finding.detail


@pytest.mark.parametrize(
    ("facts", "check", "level"),
    [
        (replace(HEALTHY, round_trip_ms=99.0), "round trip", Level.OK),
        (replace(HEALTHY, round_trip_ms=100.0), "round trip", Level.WARNING),
        (replace(HEALTHY, clock_ahead_ms=2000.0), "clock", Level.WARNING),
        (replace(HEALTHY, clock_ahead_ms=-2000.0), "clock", Level.WARNING),
        (replace(HEALTHY, clock_ahead_ms=2000.0, clock_error_ms=1500.0), "clock", Level.OK),
        (replace(HEALTHY, missing=["wait"]), "rights", Level.WARNING),
        (replace(HEALTHY, config={}), "persistence", Level.OK),
        (replace(HEALTHY, config={}, info=HEALTHY.info | {"aof_enabled": "0"}), "persistence", Level.WARNING),
        (replace(HEALTHY, config={}), "replicas", Level.OK),
    ],
)
def test_what_was_measured_is_judged(facts: Facts, check: str, level: Level) -> None:
    """A clock counts as wrong only by more than the measurement may be; what the user may not see is no error."""
    assert found(facts, check).level == level


def test_a_cluster_must_serve_every_slot() -> None:
    """And its nodes are no single servers: a URL of one would fail for most resources."""
    whole = {"cluster_state": "ok", "cluster_slots_ok": "16384", "cluster_slots_assigned": "16384"}
    facts = replace(HEALTHY, info=HEALTHY.info | {"cluster_enabled": "1"}, cluster=whole)
    assert found(facts, "cluster", as_cluster=True).level == Level.OK
    part = replace(facts, cluster=whole | {"cluster_state": "fail", "cluster_slots_ok": "10923"})
    assert found(part, "cluster", as_cluster=True).level == Level.ERROR
    assert "redis+cluster://" in found(facts, "cluster").advice
    assert found(replace(facts, cluster={}), "cluster", as_cluster=True).level == Level.WARNING


# On real servers


async def test_a_server_is_examined(own_server: OwnServer, prefix: str) -> None:
    """All checks, on a server without persistence that has a key of somebody else under the prefix."""
    server = own_server("valkey9")
    server.cli("SET", f"{prefix}:stray", "1")
    server.cli("SET", f"{prefix}x:other", "1")
    async with Redlease.from_url(server.url, prefix=prefix) as client, client.lock("invoice").hold():
        findings = by_check(await examine(server.url, prefix))
    assert list(findings) == [
        *("server", "rights", "round trip", "clock", "persistence", "eviction", "memory", "replicas"),
        *("messages", "keys", "leases", "damage"),
    ]
    warned = {name for name, each in findings.items() if each.level != Level.OK}
    assert warned == {"persistence", "keys"}
    assert "1 without a time to live: " + f"{prefix}:stray" in findings["keys"].detail
    assert findings["leases"].detail == "1 permit on 1 resource, none overdue for renewal"
    assert findings["server"].server == f"127.0.0.1:{server.port}"


async def test_a_permit_that_nobody_renews_is_named(servers: Servers, prefix: str) -> None:
    """Once two renewals are due, with resource, ticket and owner."""
    url = servers["valkey9"].url
    async with Redlease.from_url(url, prefix=prefix, owner="svc-a") as client:
        await client.lock("ok", lease=30).acquire()
        await client.lock("gpu", lease=1.5).acquire(ticket="forgotten")

        async def warned() -> Finding | None:
            leases = by_check(await examine(url, prefix))["leases"]
            return leases if leases.level else None

        leases = await eventually(warned)
        assert leases.detail.startswith("2 permits on 2 resources, 1 not renewed for two thirds of the lease: ")
        assert "forgotten of gpu (svc-a, 0." in leases.detail


async def test_a_large_server_is_examined_in_part(
    servers: Servers, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So many keys and resources are looked at, and no more."""
    monkeypatch.setattr(key_checks, "KEYS_MOST", 1)
    monkeypatch.setattr(key_checks, "RESOURCES_MOST", 2)
    url = servers["valkey9"].url
    async with Redlease.from_url(url, prefix=prefix) as client:
        for number in range(3):
            await client.lock(f"r{number}").acquire()
        findings = by_check(await examine(url, prefix))
    assert findings["keys"].detail.startswith("the first ")
    assert findings["leases"].detail.startswith("2 permits on 2 resources")


def test_what_only_an_administrator_sees_is_said() -> None:
    """Without CONFIG GET nobody is advised to grant it, for it shows passwords too."""
    facts = replace(HEALTHY, config={})
    rights = found(facts, "rights")
    assert "does not see the settings" in rights.detail
    assert "+config" not in rights.advice
    for check in ("persistence", "replicas"):
        assert "not visible to this user" in found(facts, check).detail


async def test_rights_that_are_missing_are_named(own_server: OwnServer, prefix: str) -> None:
    """Those that only some commands need are warned of; what could not be looked at for lack of them is said."""
    server = own_server("valkey9")
    server.cli("ACL", "SETUSER", "plain", "on", ">secret", "~*", "&*", "+@all", "-scan", "-config", "-wait")
    url = server.url.replace("redis://", "redis://plain:secret@")
    findings = by_check(await examine(url, prefix))
    assert findings["rights"].level == Level.WARNING
    assert findings["rights"].advice.endswith("ACL SETUSER <user> +scan +wait")
    assert "refused SCAN" in findings["keys"].detail
    server.cli("ACL", "SETUSER", "plain", "-evalsha")
    findings = by_check(await examine(url, prefix))
    assert list(findings) == ["connection"]
    assert findings["connection"].level == Level.ERROR
    assert "lacks rights" in findings["connection"].detail


@pytest.mark.slow
async def test_each_master_of_a_cluster_is_examined(prefix: str) -> None:
    """One that is dead is an error among the findings on the others."""
    with Cluster("redis7") as cluster:
        healthy = await examine(cluster.url, prefix)
        assert len({each.server for each in healthy if each.check == "cluster"}) == 3
        assert max(each.level for each in healthy) == Level.WARNING
        single = by_check(await examine(cluster.masters[0].url, prefix))
        assert "redis+cluster://" in single["cluster"].advice
        cluster.masters[2].kill()
        broken = await examine(cluster.url, prefix)
        assert [each.server for each in broken if each.check == "connection"] == [
            f"127.0.0.1:{cluster.masters[2].port}"
        ]
        assert len([each for each in broken if each.check == "server"]) == 2


@pytest.mark.slow
async def test_sentinels_lead_to_the_primary(prefix: str) -> None:
    """Its address and its replica are in the findings."""
    with Watched("valkey9") as watched:
        findings = by_check(await examine(watched.url, prefix))
        assert findings["server"].server == f"127.0.0.1:{watched.servers[0].port}"
        assert findings["replicas"].detail == "1 of 1 online, min-replicas-to-write 0"


# What is printed


@pytest.mark.slow
async def test_the_worst_finding_is_the_exit_status(own_server: OwnServer, prefix: str) -> None:
    """0, 1 and 2; JSON has one line for each finding."""
    server = own_server("valkey9", "--appendonly", "yes")
    place = ("--url", server.url, "--prefix", prefix)
    done = await run_async("doctor", *place)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["ok"] * 12
    server.cli("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    done = await run_async("doctor", "--json", *place)
    assert (done.returncode, done.stderr) == (1, "")
    told = {each["check"]: each for each in map(json.loads, done.stdout.splitlines())}
    assert told["eviction"]["level"] == "warning"
    assert told["eviction"]["advice"]
    server.kill()
    done = await run_async("doctor", *place)
    assert done.returncode == 2
    assert done.stdout.startswith("error    connection  ")
    assert (await run_async("doctor", "--url", "nonsense")).returncode == 2


@pytest.mark.parametrize("width", [80, 120])
def test_findings_fit_a_terminal(width: int) -> None:
    """Facts and advice stand in a column of their own, with what a terminal would obey escaped."""
    findings = [Finding("keys", Level.WARNING, f"stray: {HOSTILE}", "word " * 60), Finding("server", Level.OK, "fine")]
    lines = [line.plain for line in lines_of(findings, width)]
    assert max(map(len, lines)) <= width
    assert lines[0].startswith("warning  keys    stray: order")
    assert lines[1].startswith(" " * 17 + "→ word")
    assert lines[-1] == "ok       server  fine"
    assert HARMLESS.split()[-1] in "".join(lines)


def test_without_a_terminal_each_finding_is_a_line() -> None:
    """For grep: level, check, fact and advice; the server is named where there are several."""
    findings = [
        Finding("memory", Level.ERROR, "full", "Add some", server="a:1"),
        Finding("memory", Level.OK, "fine", server="b:2"),
    ]
    assert [line.plain for line in lines_of(findings, None)] == [
        "error    memory  a:1: full. Add some",
        "ok       memory  b:2: fine",
    ]
