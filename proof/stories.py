"""What simulated processes do in a history: drawn from a seed, plain data, so that it can be shrunk and printed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from redlease import AcquireTimeout, LeaseLost, Redlease, Semaphore, Unavailable
from redlease.testing import Fault, Report, Simulation, draw_faults

LEASE, WAITER_LEASE = 2.0, 1.5
BEGIN_WITHIN, FAULTS_WITHIN = 0.5, 6.0
LIMIT = 120.0  # within which everybody must have been served, long after the last fault
SETTLES = 10.0  # after the last fault: until then everything has lapsed that nobody keeps
# After these, what a client gives up is gone as soon as it has reached the server, before it would lapse by itself.
GENTLE = {"cut", "lose_reply", "double_reply", "lose_message", "double_message", "delay_message"}
GENTLY_SETTLES = 0.5
EXPECTED = (AcquireTimeout, LeaseLost, Unavailable)


@dataclass(frozen=True)
class Step:
    """One thing that a task does: what, for how many seconds, and how many units it takes."""

    what: str
    seconds: float
    weight: int = 1
    priority: int = 0


@dataclass(frozen=True)
class Actor:
    """A task of a process."""

    process: str
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Story:
    """One history, all that is drawn from its seed."""

    seed: str
    capacity: int
    latency: float
    actors: tuple[Actor, ...]
    faults: tuple[Fault, ...]

    @property
    def processes(self) -> list[str]:
        """The processes that have something to do, or that something befalls."""
        named = [actor.process for actor in self.actors] + [fault.process for fault in self.faults if fault.process]
        return sorted(set(named))

    @property
    def calm_at(self) -> float:
        """When nothing is left of what faults have left behind; 0 if they leave nothing behind."""
        rough = [fault.at + abs(fault.seconds) for fault in self.faults if fault.kind not in GENTLE]
        return max(rough) + SETTLES if rough else 0.0


def draw(seed: str) -> Story:
    """Return the story of a seed."""
    random = Random(seed)
    capacity = random.choice([1, 1, 1, 2, 3])
    processes = "abcd"[: random.randint(2, 4)]
    actors = tuple(
        Actor(process, tuple(draw_step(random, capacity) for _ in range(random.randint(1, 4))))
        for process in processes
        for _ in range(random.randint(1, 3))
    )
    faults = draw_faults(random, processes, FAULTS_WITHIN, most=5, lease=LEASE)
    return Story(seed, capacity, random.choice([0.001, 0.005, 0.05]), actors, tuple(faults))


def draw_step(random: Random, capacity: int) -> Step:
    """Draw what a task does next; most of it is over soon, and some lasts for longer than a lease."""
    (what,) = random.choices(list(STEPS), [10, 4, 2, 3, 2, 2])
    seconds = round(random.choice([0.0, 0.05, 0.3, 0.3, 1.0, 3.0]) * random.uniform(0.5, 1.5), 3)
    return Step(what, seconds, random.randint(1, capacity), random.choice([0] * 9 + [1]))


async def hold(pool: Semaphore, step: Step) -> None:
    """Hold, and look whether it still does."""
    async with pool.hold(weight=step.weight, priority=step.priority) as held:
        for _ in range(4):
            await asyncio.sleep(step.seconds / 4)
            held.check()


async def data(pool: Semaphore, step: Step) -> None:
    """Acquire a permit as data, renew and release it."""
    permit = await pool.acquire(weight=step.weight, priority=step.priority)
    await asyncio.sleep(step.seconds / 2)
    permit = await pool.renew(permit)
    await asyncio.sleep(step.seconds / 2)
    await pool.release(permit)


async def attempt(pool: Semaphore, step: Step) -> None:
    """Take what is free at once."""
    permit = await pool.try_acquire(weight=step.weight)
    if permit is not None:
        await asyncio.sleep(step.seconds)
        await pool.release(permit)


async def give_up(pool: Semaphore, step: Step) -> None:
    """Be cancelled while it waits, or as it is granted, or while it holds."""
    task = asyncio.create_task(hold(pool, replace(step, seconds=0.5)))
    await asyncio.sleep(step.seconds)
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled() and (error := task.exception()):
        raise error


async def adopt(pool: Semaphore, step: Step) -> None:
    """Acquire a permit, and adopt it, as another process would."""
    permit = await pool.acquire(weight=step.weight)
    async with await pool.adopt(permit) as held:
        await asyncio.sleep(step.seconds)
        held.check()


async def hurry(pool: Semaphore, step: Step) -> None:
    """Wait for no longer than so many seconds."""
    async with pool.hold(timeout=step.seconds, weight=step.weight):
        await asyncio.sleep(0.1)


STEPS: dict[str, Callable[[Semaphore, Step], Any]] = {
    each.__name__: each for each in (hold, data, attempt, give_up, adopt, hurry)
}


def simulate(story: Story, engine: Any = "model") -> Report:
    """Simulate a story; raises SimulationFailed if a promise is broken."""
    simulation = Simulation(story.seed, faults=story.faults, engine=engine, latency=story.latency, limit=LIMIT)

    def living(actors: list[Actor]) -> Callable[[Redlease], Any]:
        async def main(client: Redlease) -> None:
            pool = client.semaphore("gpu", capacity=story.capacity)
            async with asyncio.TaskGroup() as group:
                for actor in actors:
                    group.create_task(act(pool, actor.steps))
            await asyncio.sleep(max(GENTLY_SETTLES, story.calm_at - simulation.now))

        return main

    starts = Random(f"{story.seed} starts")
    for process in story.processes:
        actors = [actor for actor in story.actors if actor.process == process]
        # Patient: a client that cannot connect when it is entered raises, which is no violation and ends the process.
        settings = {"lease": LEASE, "waiter_lease": WAITER_LEASE, "call_timeout": 30.0}
        simulation.process(process, living(actors), start=starts.uniform(0, BEGIN_WITHIN), **settings)
    report = simulation.run()
    killed = {fault.process for fault in story.faults if fault.kind == "kill"}
    if killed < set(story.processes):  # else it was over before what they had could lapse
        assert not report.left, f"leak (P6): {report.left} is left when everybody has ended"
    assert not report.losses or story.faults, "notice (P7): a hold was lost without a fault"
    return report


async def act(pool: Semaphore, steps: Iterable[Step]) -> None:
    """Do one step after the other; what a fault may cause is no violation."""
    for step in steps:
        try:
            await STEPS[step.what](pool, step)
        except EXPECTED:
            await asyncio.sleep(0.01)
