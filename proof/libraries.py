"""What the processes do with a lock or a semaphore, by redlease and by two others, and what they record of it."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import redis
import redis.asyncio
import redis_lock

from redlease import Hold, LeaseLost, Permit, Redlease, RedleaseError, Unavailable
from redlease._core.primitives.semaphore import Semaphore
from redlease.events import Event, Reconnected

from records import MS, Recorder, now

STEPS = 4  # requests of a process on a resource
TIMEOUT = 60.0  # of a request, in seconds


class Plan(NamedTuple):
    """One resource of a round, as all processes know it; durations in seconds."""

    name: str
    capacity: int
    lease: float
    waiter_lease: float


class Library:
    """One way to hold, and the life that a process leads with it on one resource."""

    def __init__(self, url: str, recorder: Recorder) -> None:
        self.url, self.recorder = url, recorder

    async def open(self) -> None:
        """Connect."""

    async def live(self, plan: Plan, who: str, draw: random.Random) -> None:
        """Ask, hold and let go a few times."""
        for step in range(STEPS):
            await asyncio.sleep(draw.uniform(0, 0.15))
            await self.step(plan, f"{who}.{step}", draw)

    async def step(self, plan: Plan, ticket: str, draw: random.Random) -> None:
        """Make one request, and use what it gets."""
        raise NotImplementedError

    async def believe(self, plan: Plan, ticket: str, draw: random.Random, held: Callable[[], dict[str, int]]) -> None:
        """Work for a while as a body does, and record at each moment that it believes to hold.

        Args:
            plan: The resource.
            ticket: Of the permit.
            draw: Draws how long.
            held: Returns what is known of the permit; empty if it is lost, which ends the body.
        """
        for _ in range(draw.randint(1, 4)):
            await asyncio.sleep(draw.uniform(0.002, 0.03))
            since = now()
            if not (known := held()):
                return
            self.recorder.write("check", plan.name, ticket=ticket, since=since, at=now(), **known)


class OfRedlease(Library):
    """Holds, permits as data, permits that are left to expire, and attempts that do not wait."""

    async def open(self) -> None:
        self.client = Redlease.from_url(self.url, prefix="proof", call_timeout=TIMEOUT, on_event=self.on_event)
        self._tasks: set[asyncio.Task[None]] = set()

    def on_event(self, event: Event) -> None:
        """Record how long the client was without its connection, which may be longer than the server was away."""
        if isinstance(event, Reconnected):
            task = asyncio.create_task(self.back(since=now() - int(event.after * 1000 * MS)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def back(self, since: int) -> None:
        """Record it when a call is answered: those that extend the client's places went before it."""
        with contextlib.suppress(Unavailable):
            await self.client.lock("back").inspect()
            self.recorder.write("stall", "", since=since, at=now())

    async def step(self, plan: Plan, ticket: str, draw: random.Random) -> None:
        pool = self.client.semaphore(plan.name, plan.capacity, lease=plan.lease, waiter_lease=plan.waiter_lease)
        weight = draw.choice((1, 1, 2)) if plan.capacity > 2 else 1
        way = draw.choices((self.hold, self.permit, self.attempt), (6, 3, 1))[0]
        asking = asyncio.create_task(way(pool, ticket, weight, draw))
        call = self.recorder.call(plan.name, "acquire", ticket, weight=weight)
        await asyncio.sleep(0)  # it has asked, and what is asked next on the same connection comes after it
        if not asking.done() and draw.random() < 0.7:
            await self.look(pool)
        try:
            got = await asking
        except RedleaseError:
            got = None
        if got is None:
            self.recorder.returned(plan.name, call, ok=False)
            return
        permit = got.permit if isinstance(got, Hold) else got
        until = permit.expires_at_ms * MS
        self.recorder.returned(plan.name, call, ok=True, fence=permit.fence, until=until)
        if isinstance(got, Hold):
            await self.use_hold(plan, got, draw)
        else:
            await self.use_permit(pool, plan, got, draw)

    async def hold(self, pool: Semaphore, ticket: str, weight: int, draw: random.Random) -> Hold:
        """Hold; one of six is renewed for a moment only, so that its lease ends in its body."""
        max_hold = 0.01 if draw.random() < 1 / 6 else None
        return await pool.hold(ticket=ticket, weight=weight, timeout=TIMEOUT, on_lost="signal", max_hold=max_hold)

    async def permit(self, pool: Semaphore, ticket: str, weight: int, _: random.Random) -> Permit:
        """Acquire a permit as data."""
        return await pool.acquire(ticket=ticket, weight=weight, timeout=TIMEOUT)

    async def attempt(self, pool: Semaphore, ticket: str, weight: int, _: random.Random) -> Permit | None:
        """Acquire a permit if one is free."""
        return await pool.try_acquire(ticket=ticket, weight=weight)

    async def look(self, pool: Semaphore) -> None:
        """Record who waits."""
        since = now()
        try:
            snapshot = await pool.inspect()
        except Unavailable:
            return
        waiters = [waiter.ticket for waiter in snapshot.waiters]
        self.recorder.write("seen", pool.name, since=since, at=now(), waiters=waiters)

    async def use_hold(self, plan: Plan, hold: Hold, draw: random.Random) -> None:
        """Believe while the hold is not lost, then release it."""

        def known() -> dict[str, int]:
            permit = hold.permit
            return {} if hold.lost else {"fence": hold.fence, "until": permit.expires_at_ms * MS}

        told = asyncio.create_task(self.notify_of_loss(plan, hold))
        await self.believe(plan, hold.ticket, draw, known)
        if draw.random() < 1 / 6:  # the long ones see a stop, and the end of what is not renewed
            for _ in range(12):
                await asyncio.sleep(plan.lease / 8)
                await self.believe(plan, hold.ticket, draw, known)
        call = self.recorder.call(plan.name, "release", hold.ticket, fence=hold.fence)
        released = await hold.release()
        self.recorder.returned(plan.name, call, ok=released)
        await told

    async def notify_of_loss(self, plan: Plan, hold: Hold) -> None:
        """Record when the hold is told that it is lost."""
        if await hold.wait_lost():
            at = now()
            until = hold.permit.expires_at_ms * MS
            self.recorder.write("loss", plan.name, ticket=hold.ticket, at=at, until=until)

    async def use_permit(self, pool: Semaphore, plan: Plan, permit: Permit, draw: random.Random) -> None:
        """Check and renew a permit on the server; one of six is left to expire."""
        for _ in range(draw.randint(1, 3)):
            await asyncio.sleep(draw.uniform(0.002, 0.03))
            since = now()
            try:
                if draw.random() < 0.5:
                    permit = await pool.renew(permit)
                elif not await pool.is_held(permit):
                    return
            except LeaseLost:
                return
            except Unavailable:
                continue
            known = {"fence": permit.fence, "until": permit.expires_at_ms * MS}
            self.recorder.write("check", plan.name, ticket=permit.ticket, since=since, at=now(), **known)
        if draw.random() < 5 / 6:
            call = self.recorder.call(plan.name, "release", permit.ticket, fence=permit.fence)
            try:
                released = await pool.release(permit)
            except Unavailable:
                released = False
            self.recorder.returned(plan.name, call, ok=released)


class OfRedisPy(Library):
    """The lock of redis-py, with a timeout. Its body hears of nothing, and believes to hold until it lets go."""

    async def open(self) -> None:
        self.client = redis.asyncio.Redis.from_url(self.url)

    async def step(self, plan: Plan, ticket: str, draw: random.Random) -> None:
        lock = self.client.lock(plan.name, timeout=plan.lease)
        began = now()
        call = self.recorder.call(plan.name, "acquire", ticket)
        waits = asyncio.create_task(self.look(plan, ticket, began))
        got = await lock.acquire(blocking_timeout=TIMEOUT)
        waits.cancel()
        until = began + int(plan.lease * 1000) * MS
        self.recorder.returned(plan.name, call, ok=got, until=until)
        if not got:
            return
        await self.believe(plan, ticket, draw, lambda: {"until": until})
        call = self.recorder.call(plan.name, "release", ticket)
        try:
            await lock.release()
        except redis.exceptions.LockError:
            self.recorder.returned(plan.name, call, ok=False)
        else:
            self.recorder.returned(plan.name, call, ok=True)

    async def look(self, plan: Plan, ticket: str, began: int) -> None:
        """Record that it waits, once it has waited for so long that it has asked the server."""
        await asyncio.sleep(0.15)
        self.recorder.write("seen", plan.name, since=began, at=now(), waiters=[ticket])


class OfPythonRedisLock(OfRedisPy):
    """python-redis-lock, which renews in a thread of its own for each lock."""

    async def open(self) -> None:
        self.blocking = redis.Redis.from_url(self.url)
        self.threads = ThreadPoolExecutor(64)

    async def step(self, plan: Plan, ticket: str, draw: random.Random) -> None:
        loop = asyncio.get_running_loop()
        lease = round(plan.lease)
        lock = redis_lock.Lock(self.blocking, plan.name, expire=lease, auto_renewal=True)
        began = now()
        call = self.recorder.call(plan.name, "acquire", ticket)
        waits = asyncio.create_task(self.look(plan, ticket, began))
        got = await loop.run_in_executor(self.threads, lock.acquire)
        waits.cancel()
        until = began + lease * 1000 * MS
        self.recorder.returned(plan.name, call, ok=bool(got), until=until)
        if not got:
            return
        await self.believe(plan, ticket, draw, lambda: {"until": until})
        call = self.recorder.call(plan.name, "release", ticket)
        try:
            await loop.run_in_executor(self.threads, lock.release)
        except redis_lock.NotAcquired:
            self.recorder.returned(plan.name, call, ok=False)
        else:
            self.recorder.returned(plan.name, call, ok=True)


LIBRARIES: dict[str, type[Library]] = {
    "redlease": OfRedlease,
    "redis-py": OfRedisPy,
    "python-redis-lock": OfPythonRedisLock,
}
