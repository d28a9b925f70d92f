"""Tasks that take several resources each: no deadlock, nobody starves, and what a killed process had is free again."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

import pytest

from redlease._core.limits import CAPACITY_MAX

from children import child
from helpers import queue_up, until_waiting

if TYPE_CHECKING:
    from redlease import Hold, Redlease

    from conftest import MakeClient, Servers
    from servers import Server

logger = logging.getLogger(__name__)

TASKS = 300
ROUNDS_LEAST = 30  # so that a task could wait for more than 20
ROUNDS_MOST = 20
RESOURCES = {
    **{f"lock{number}": 1 for number in range(4)},
    **{f"pool{number}": 2 + number for number in range(4)},
    **{f"rwlock{number}": CAPACITY_MAX for number in range(4)},
}


@dataclass
class Rounds:
    """How long tasks wait, in rounds: a round is over when as many sets were served as there are tasks.

    So each task is served once a round on the average, and one that waits for n rounds has seen n times as many sets
    of others served as there are tasks.
    """

    ends_at: float  # by the clock of the event loop, but not before `ROUNDS_LEAST`
    served: int = 0
    longest: int = 0
    turns: Counter[int] = field(default_factory=Counter)
    asked: dict[int, int] = field(default_factory=dict)

    @property
    def are_over(self) -> bool:
        """Whether no task begins anew."""
        return self.served >= ROUNDS_LEAST * TASKS and asyncio.get_running_loop().time() >= self.ends_at

    def ask(self, task: int) -> None:
        """A task asks for a set."""
        self.asked[task] = self.served

    def serve(self, task: int) -> None:
        """A task has its set."""
        self.longest = max(self.longest, self.served - self.asked.pop(task))
        assert self.longest <= ROUNDS_MOST * TASKS, f"task {task} waited for {self.longest / TASKS:.1f} rounds"
        self.served += 1
        self.turns[task] += 1


@dataclass
class Ledger:
    """Who is inside: what is in use of each resource, and the last fence of those that one holds at a time."""

    in_use: Counter[str] = field(default_factory=Counter)
    fences: Counter[str] = field(default_factory=Counter)

    def enter(self, hold: Hold) -> None:
        """Somebody has a permit."""
        permit, capacity = hold.permit, RESOURCES[hold.resource]
        self.in_use[hold.resource] += permit.weight
        assert self.in_use[hold.resource] <= capacity, f"{hold.resource} is held by too many"
        if permit.weight == capacity:
            assert hold.fence > self.fences[hold.resource]
            self.fences[hold.resource] = hold.fence

    def leave(self, hold: Hold) -> None:
        """Somebody is about to release a permit."""
        self.in_use[hold.resource] -= hold.permit.weight


async def take_sets(client: Redlease, task: int, random: Random, rounds: Rounds, ledger: Ledger) -> None:
    """Take random sets of two to five, one after the other, until the rounds are over."""
    while not rounds.are_over:
        parts = []
        for name in random.sample(list(RESOURCES), random.randint(2, 5)):
            if name.startswith("rwlock"):
                catalog = client.rwlock(name)
                parts.append(catalog.write.weighted(1) if random.random() < 0.3 else catalog.read.weighted(1))
            else:
                capacity = RESOURCES[name]
                parts.append(client.semaphore(name, capacity=capacity).weighted(random.randint(1, capacity)))
        rounds.ask(task)
        async with client.all(*parts) as holds:
            rounds.serve(task)
            for hold in holds:
                ledger.enter(hold)
            await asyncio.sleep(0)
            holds.check()
            for hold in holds:
                ledger.leave(hold)


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_nobody_starves(servers: Servers, make_client: MakeClient, seed: int, is_long: bool) -> None:
    """300 tasks of three clients take sets of 12 resources: all end, each is served, and none waits for 20 rounds."""
    rounds, ledger = Rounds(asyncio.get_running_loop().time() + (60 if is_long else 0)), Ledger()
    clients = [await make_client(url=servers["valkey9"].url) for _ in range(3)]
    async with asyncio.timeout(150), asyncio.TaskGroup() as group:
        for task in range(TASKS):
            random = Random(f"{seed} {task}")
            group.create_task(take_sets(clients[task % 3], task, random, rounds, ledger))
    logger.info(
        "%d sets; the longest wait: %.1f rounds; sets for each task: %d to %d",
        *(rounds.served, rounds.longest / TASKS, min(rounds.turns.values()), max(rounds.turns.values())),
    )
    assert len(rounds.turns) == TASKS
    assert not +ledger.in_use
    for name, capacity in RESOURCES.items():
        snapshot = await clients[0].semaphore(name, capacity=capacity).inspect()
        assert not snapshot.holders
        assert not snapshot.waiters


@pytest.mark.slow
async def test_what_a_killed_process_had_of_a_set_is_free(server: Server, make_client: MakeClient, prefix: str) -> None:
    """Killed while it holds three of four and waits for the last, it blocks those for its lease, and not the last."""
    settings = {"prefix": prefix, "lease": 3, "waiter_lease": 1.5}
    client = await make_client(url=server.url)
    pool, catalog, last = client.semaphore("b", capacity=3), client.rwlock("c"), client.lock("d")
    hold = await last.hold()
    async with child("take_all", server.url, client=settings) as killed:
        await until_waiting(last, 1, within=15)
        first = (client.lock("a"), pool, catalog.read)
        tasks = [
            asyncio.create_task(part.acquire(weight=weight)) for part, weight in zip(first, (1, 2, 1), strict=True)
        ]
        for part in first:
            await until_waiting(part, 1)
        killed.kill()
        await killed.process.wait()
        dead = [(await part.inspect()).holders for part in first]
        (behind,) = await queue_up(last, 1)
        permits = await asyncio.wait_for(asyncio.gather(*tasks), 10)
        late_ms = [permit.granted_at_ms - held.expires_at_ms for permit, (held,) in zip(permits, dead, strict=True)]
        assert all(0 <= late < 1000 for late in late_ms), late_ms
        released_at_ms = (await last.inspect()).server_time_ms
        assert await hold.release()
        assert (await asyncio.wait_for(behind, 10)).granted_at_ms - released_at_ms < 1000
