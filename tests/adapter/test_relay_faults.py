"""The loops of a relay and of its run monitor, with exceptions thrown into them at random places; without Temporal."""

from __future__ import annotations

import asyncio
import functools
import logging
import random
import time
from typing import TYPE_CHECKING, Any

import pytest
from fake_temporal import FakeTemporal
from relay_stage import LEASE_MS, POLL_MS, Stage, is_granted, quick, record_of
from thrown import Thrower, Thrown

from redlease import Redlease
from redlease_temporal._admission import redis_tracker
from redlease_temporal._backends.redis.registry import CLAIM, Registry, TicketRecord
from redlease_temporal._backends.redis.relay import Relay
from redlease_temporal._backends.redis.tracker import TicketTracker
from redlease_temporal._common import run_monitor
from redlease_temporal._common.run_monitor import RunMonitor, RunState, RunStatus

from helpers import eventually

__all__ = ["quick"]

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from redlease import Permit

    from conftest import Servers

TIMES = 1000
# What a busy machine may add: to a renewal that was on its way as a look came, and to the interval of looks, each of
# which is begun by a loop that is thrown into every second time. Ten runs or so are looked at in turn.
ALLOWANCE_MS = 500.0
LATE_LOOK_MS = 2000.0
OTHER_LOOKS = 100
RESOURCES = 5
LOOPS = (
    "Relay._beat",
    "Relay._find_untracked",
    "RunMonitor.run",
    "RunMonitor.poll",
    "TicketTracker._track",
    "AdmissionTracker._track",
)
SPAWNED = ("TicketTracker._run_closed", "Relay._verify")


@pytest.fixture
async def stage(servers: Servers, prefix: str) -> AsyncIterator[Stage]:
    """A relay."""
    async with Stage(servers.url("valkey9"), prefix, FakeTemporal()).running() as stage:
        yield stage


class Closed:
    """What is seen of runs that are closed: when a look found that out, and what they hold after it."""

    def __init__(self, temporal: FakeTemporal) -> None:
        self._temporal = temporal
        self._looks = 0
        self._looked: dict[str, int] = {}  # how many looks there were before the last at each
        self._seen_ms: dict[str, float] = {}  # and when that was
        self._known_ms: dict[str, float] = {}
        self._samples = 0
        self.faults: list[str] = []

    def installed(self, monkeypatch: pytest.MonkeyPatch) -> Closed:
        """See all looks from now on."""
        for kind in (TicketTracker, redis_tracker.AdmissionTracker):
            monkeypatch.setattr(kind, "_on_state", self._seeing(kind._on_state))
        return self

    def _seeing(self, told: Any) -> Any:
        def see(tracker: Any, look: RunState) -> None:
            self._see(tracker.record.workflow_id, look)
            told(tracker, look)

        return see

    def _see(self, workflow_id: str, look: RunState) -> None:
        self._looks += 1
        others = self._looks - self._looked.get(workflow_id, self._looks)
        if others > OTHER_LOOKS and workflow_id not in self._known_ms:
            self.faults.append(f"{workflow_id}: none of {others} looks was at it")
        self._looked[workflow_id], self._seen_ms[workflow_id] = self._looks, time.time() * 1000
        if look.status is RunStatus.CLOSED:
            self._known_ms.setdefault(workflow_id, self._seen_ms[workflow_id])

    async def looking(self, stage: Stage) -> None:
        """Look at what is held, again and again."""
        while True:
            places = {one.record.terms.resource for one in stage.relay.trackers.values() if one.record.admission}
            for resource in (*(f"r{number}" for number in range(RESOURCES)), *places):
                snapshot = await stage.relay.client.semaphore(resource, 1000).inspect(max_items=2000)
                for permit in snapshot.holders:
                    if permit.owner in self._temporal.closed_ms:
                        self._hold(permit, snapshot.server_time_ms)
            self._samples += 1
            await asyncio.sleep(0.005)

    def _hold(self, permit: Permit, now_ms: int) -> None:
        # Not known: a look is to come, or nobody cares for the run any more, as what it had was lost before.
        before_ms = max(self._temporal.closed_ms[permit.owner], self._seen_ms.get(permit.owner, 0.0))
        known_ms = self._known_ms.get(permit.owner, before_ms + POLL_MS + LATE_LOOK_MS)
        if permit.lease_ms > LEASE_MS:
            return  # that of a place is a day: it is only given back, as soon as nothing is thrown into that
        if now_ms > known_ms + LEASE_MS + ALLOWANCE_MS:
            self.faults.append(f"{permit.owner}: held {now_ms - known_ms:.0f} ms after it was known to be closed")
        if permit.expires_at_ms > known_ms + LEASE_MS + ALLOWANCE_MS:
            self.faults.append(f"{permit.owner}: until {permit.expires_at_ms - known_ms:.0f} ms after it was known")

    def check(self) -> None:
        """Fail where a look came late, or a permit was renewed after it."""
        assert self._samples > 100
        assert len(self._known_ms) > 0.9 * len(self._temporal.closed_ms)
        assert not self.faults, self.faults


def told_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the thrown exceptions that were logged, one for each record."""
    return [
        str(record.exc_info[1])
        for record in caplog.records
        if record.exc_info and isinstance(record.exc_info[1], Thrown)
    ]


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("seed", [1])
async def test_each_loop_survives_a_thousand_exceptions(
    caplog: pytest.LogCaptureFixture, servers: Servers, prefix: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thrown into at random places, each loop goes on; no closed run holds longer, and each exception is told once.

    The server can say that a run is closed as soon as it is. A look that an exception ends finds nothing out, and the
    next one comes a look's interval later; from the first that comes through on, nothing is renewed any more, so that
    the permit is gone a lease later if it cannot be given back.
    """
    caplog.set_level(logging.WARNING)
    chance = random.Random(seed)
    thrower = Thrower(LOOPS, TIMES, chance, also=SPAWNED)
    closed = Closed(temporal := FakeTemporal()).installed(monkeypatch)
    with thrower.installed():
        async with Stage(servers.url("valkey9"), prefix, temporal).running() as stage:
            looking = asyncio.create_task(closed.looking(stage))
            thrower.throwing = True
            until = asyncio.get_running_loop().time() + 120
            while not thrower.is_done:
                await some_turns(stage, chance)
                assert asyncio.get_running_loop().time() < until, thrower.thrown
            thrower.throwing = False
            for workflow_id in list(stage.temporal.statuses):
                stage.temporal.close(workflow_id)
            for number in range(RESOURCES):
                within_ms = POLL_MS + LATE_LOOK_MS + LEASE_MS + ALLOWANCE_MS
                await eventually(functools.partial(is_free, stage, f"r{number}"), within_ms / 1000)
            await eventually(lambda: no_watches(stage), 10)
            # All loops live: a run is served, and what it had is free when it is closed.
            one, two, place = await stage.ask("r0"), await stage.ask("r0"), await stage.admit()
            for workflow_id in (one, two):
                await eventually(functools.partial(is_granted, stage, workflow_id), 15)
                stage.temporal.close(workflow_id)
            stage.temporal.close(place)
            await eventually(lambda: no_watches(stage), 15)
            looking.cancel()
    closed.check()
    told = told_of(caplog)
    assert len(told) == len(set(told))
    assert len(told) == sum(thrower.thrown.values())


async def some_turns(stage: Stage, chance: random.Random) -> None:
    """Let a while pass in which runs ask, hold and close, and each loop has something to do."""
    running = [one for one in stage.temporal.statuses if stage.temporal.is_open(one)]
    if len(running) < 8:
        await (stage.admit() if chance.random() < 0.2 else stage.ask(f"r{chance.randrange(RESOURCES)}"))
    holding = [one for one in running if one in stage.temporal.granted or chance.random() < 0.02]
    if holding:
        stage.temporal.close(chance.choice(holding))
    for event in (stage.relay._changed, stage.relay._claim_reply_lost, stage.relay.monitor._changed):
        event.set()
    for one in stage.relay.trackers.values():
        one._woken.set()  # type: ignore[attr-defined]  # each tracker has one
    await asyncio.sleep(0.002)


async def is_free(stage: Stage, resource: str) -> bool:
    """Tell whether nobody holds."""
    return not await stage.held(resource)


async def no_watches(stage: Stage) -> bool:
    """Tell whether nothing is watched."""
    return not await stage.watched()


def owners_of(temporal: FakeTemporal) -> RunMonitor:
    """Return a run monitor."""
    return RunMonitor(temporal, 1000)  # type: ignore[arg-type]


async def test_who_cannot_take_in_a_look_keeps_nobody_else_from_it(caplog: pytest.LogCaptureFixture) -> None:
    """One that raises is told of each look, the others are too, and that it raises is logged once."""
    temporal = FakeTemporal()
    for name in ("a", "b"):
        temporal.start(name)
    monitor, seen = owners_of(temporal), list[str]()

    def raising(_: RunState) -> None:
        seen.append("raising")
        raise Thrown("whatever")

    monitor.watch(("a", "run of a"), raising)
    monitor.watch(("a", "run of a"), lambda _: seen.append("a"))
    monitor.watch(("b", "run of b"), lambda look: seen.append(look.status.value))
    looking = asyncio.create_task(monitor.run())
    await eventually(lambda: seen.count("raising") > 3 and seen.count("a") > 3 and seen.count("open") > 3)
    temporal.close("b")
    await eventually(lambda: "closed" in seen)
    looking.cancel()
    assert told_of(caplog) == ["whatever"]


async def test_a_look_is_told_to_those_who_asked_before_it_began(monkeypatch: pytest.MonkeyPatch) -> None:
    """An ID is used again while a look is under way: that its last workflow was closed is not told of the new one."""
    begun, answered = asyncio.Event(), asyncio.Event()

    async def slow(*_: object) -> RunState:
        begun.set()
        await answered.wait()
        return RunState(RunStatus.CLOSED, "chain of the last")

    monkeypatch.setattr(RunMonitor, "_poll_server", slow)
    monitor, run, seen = owners_of(FakeTemporal()), ("a", ""), list[str]()
    of_the_last, of_the_new = lambda _: seen.append("last"), lambda _: seen.append("new")
    monitor.watch(run, of_the_last)
    looking = asyncio.create_task(monitor.poll(run))
    await begun.wait()
    monitor.watch(run, of_the_new)
    answered.set()
    await looking
    assert seen == ["last"]
    await monitor.poll(run)
    assert seen == ["last", "last", "new"]


async def test_a_run_is_looked_at_as_often_as_the_most_eager_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two permits of one run somebody waits for one alone: that nobody waits for the other makes no look late."""
    monkeypatch.setattr(run_monitor, "IDLE_POLL_MS", 60_000.0)
    temporal, run = FakeTemporal(), ("a", "run of a")
    temporal.start("a")
    monitor, seen = owners_of(temporal), list[str]()
    contended, quiet = lambda _: seen.append("contended"), lambda _: seen.append("quiet")
    monitor.watch(run, contended)
    monitor.watch(run, quiet)
    looking = asyncio.create_task(monitor.run())
    monitor.poll_often(run, contended, often=True)
    monitor.poll_often(run, quiet, often=False)
    await eventually(lambda: seen.count("contended") > 3 and seen.count("quiet") > 3)
    monitor.unwatch(run, contended)
    seen.clear()
    await asyncio.sleep(0.2)
    assert len(seen) <= 1
    looking.cancel()


async def test_a_look_that_fails_leaves_a_run_unknown(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What nobody has foreseen is no answer: the run is looked at again, and since when nothing is known is told."""
    temporal = FakeTemporal()
    for name in ("a", "b"):
        temporal.start(name)
    monitor, seen = owners_of(temporal), list[RunStatus]()
    look = RunMonitor._poll_server

    async def failing(monitor: RunMonitor, run: run_monitor.RunKey) -> RunState:
        if run[0] == "a" and broken:
            raise ValueError("8 is not a valid status")
        return await look(monitor, run)

    broken = True
    monkeypatch.setattr(RunMonitor, "_poll_server", failing)
    run = ("a", "run of a")
    monitor.watch(run, lambda look: seen.append(look.status))
    looking = asyncio.create_task(monitor.run())
    await eventually(lambda: len(seen) > 3)
    assert set(seen) == {RunStatus.UNKNOWN}
    assert monitor.unknown_ms(run) > 0
    broken = False
    await eventually(lambda: seen[-1] is RunStatus.OPEN)
    assert monitor.unknown_ms(run) == 0
    looking.cancel()
    assert len([record for record in caplog.records if "not a valid status" in record.getMessage()]) == 1


async def test_a_look_without_an_end_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that has been asked about for long, without a word, is not known to be open."""
    temporal, never = FakeTemporal(), asyncio.Event()
    monkeypatch.setattr(run_monitor, "OVERDUE_MS", 50.0)
    monkeypatch.setattr(RunMonitor, "_poll_server", lambda *_: never.wait())
    monitor, run = owners_of(temporal), ("a", "run of a")
    monitor.watch(run, lambda _: None)
    looking = asyncio.create_task(monitor.run())
    await eventually(lambda: monitor.unknown_ms(run) > 200)
    looking.cancel()


@pytest.mark.parametrize("message", [b"gone", b"gone one", b"contended", b"\xff", b"", b"gone a b c", b"new kind"])
async def test_a_message_that_nobody_can_read(stage: Stage, message: bytes) -> None:
    """A relay takes it for nothing."""
    stage.relay._on_message(message)
    workflow_id = await stage.ask("r0")
    await eventually(lambda: workflow_id in stage.temporal.granted)


async def test_a_relay_that_ends_renews_nothing_of_a_closed_run(
    servers: Servers, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it could not give back before is left to lapse: the next relay would have to look at the run anew."""
    temporal = FakeTemporal()
    stage = Stage(servers.url("valkey9"), prefix, temporal)

    async def failing(*_: Any, **__: Any) -> None:
        raise Thrown("Redis did not take it")

    monkeypatch.setattr(Relay, "try_release", failing)
    async with Redlease.from_url(servers.url("valkey9"), prefix=prefix) as service:
        async with stage.running():
            workflow_id = await stage.ask("r0")
            await eventually(functools.partial(is_granted, stage, workflow_id))
            (tracker,) = stage.relay.trackers.values()
            assert isinstance(tracker, TicketTracker)
            temporal.close(workflow_id)
            await eventually(lambda: tracker._closed)
            await asyncio.sleep(0.1)
            (held,) = (await service.lock("r0").inspect()).holders
        assert [each.expires_at_ms for each in (await service.lock("r0").inspect()).holders] == [held.expires_at_ms]


async def test_what_one_dead_relay_left_keeps_nobody_from_the_rest(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the records of dead relays each is taken over by itself, whatever another one says."""
    registry, read = stage.relay.registry, TicketRecord.read.__func__  # type: ignore[attr-defined]

    def unreadable(text: bytes) -> TicketRecord:
        if b"poison" in text:
            raise ValueError("of another version")
        record: TicketRecord = read(TicketRecord, text)
        return record

    monkeypatch.setattr(TicketRecord, "read", unreadable)
    for number in range(4):
        dead = Registry(registry._operations, stage.relay.prefix, "", f"dead{number}")
        dead._keys = registry._keys
        for name in ("poison", "w", "v"):
            stage.temporal.start(f"{name}{number}")
            text = record_of(f"{name}{number}", f"{name}{number}")
            await dead._call(CLAIM, dead.relay, text.id, text.text(), 1, dead.channel)
    expected = {f"{name}{number}" for name in "vw" for number in range(4)}
    await eventually(lambda: expected == stage.temporal.granted.keys(), 10)
