"""Random histories of a resource through the public interface, while a real server loses parts of its state.

Tasks of several clients hold, acquire, share tickets, give up, are cancelled and abandon permits; an operator limits,
pauses, resizes and releases; keys, fields and members are deleted at any moment. Then the losses end, and `History.run`
returns what does not hold one lease and one `waiter_lease` later: an empty list, if every request is served again.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

from redlease import LeaseLost, QueueFull, Rate, Superseded, Unavailable, Withdrawn
from redlease._core.limits import CAPACITY_MAX
from redlease._core.primitives.overview import Overview
from redlease.errors import AcquireTimeout, RedleaseError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    import redis.asyncio

    from redlease import Permit, Redlease, RWLock, Semaphore, Snapshot

    from evicting import Pressure

LEASE_S = WAITER_LEASE_S = 0.4
LOCK_DELAY_S = 0.1
ROUNDS = (3, 7)  # how many times something is lost, by chance
ACTORS = 8
# How much later than promised a request may be served, since the machine does other work. What does not heal stays for
# `idle_ttl`, which is a day.
SLACK_S = 30.0
PARTS = ("state", "holders", "queue", "waiters", "history")
# What a request may end with while the state of its resource is being deleted.
ORDINARY = (LeaseLost, AcquireTimeout, Withdrawn, Superseded, QueueFull)


@dataclass(frozen=True, slots=True)
class Settings:
    """What one resource is declared as. `keys`: those of its requests; None stands for a request without one."""

    kind: str
    capacity: int
    keys: tuple[str | None, ...]
    options: dict[str, Any]

    @classmethod
    def drawn(cls, random: Random) -> Settings:
        """Draw a lock, a semaphore or a read-write lock, with any of the settings that it may have."""
        kind = random.choice(("lock", "semaphore", "semaphore", "rwlock"))
        keys = random.choice(((None,), ("a",), ("a", "b", "c"), ("a", "b", None)))
        options: dict[str, Any] = {}
        if random.random() < 0.3:
            options["lock_delay"] = LOCK_DELAY_S
        if random.random() < 0.3:
            options["history"] = 50
        if kind == "semaphore":
            if random.random() < 0.4:
                options["per_key"] = random.randint(1, 2)
            if random.random() < 0.3:
                options["rate"] = Rate(100, burst=random.choice((1, 5)))
            if random.random() < 0.3:
                options["per_key_rate"] = Rate(50, burst=random.choice((1, 5)))
        return cls(kind, random.randint(1, 4) if kind == "semaphore" else 1, keys, options)

    def made(self, client: Redlease, name: str, *, lease_s: float = LEASE_S, waits_s: float = WAITER_LEASE_S) -> Sides:
        """Return the resource as a client uses it."""
        options = self.options | {"lease": lease_s, "waiter_lease": waits_s}
        if self.kind == "rwlock":
            both = client.rwlock(name, **options)
            return Sides(both.read, both.write, both)
        pool = client.semaphore(name, self.capacity, **options)
        return Sides(pool, pool, pool)


@dataclass(frozen=True, slots=True)
class Sides:
    """A resource: what holds one unit of it, what holds all, and what looks at it as a whole."""

    one: Semaphore
    other: Semaphore
    whole: Semaphore | RWLock


@dataclass
class History:
    """One history.

    Attributes:
        pressure: Under which the server evicts keys by itself; None if this history deletes some of its own.
        problems: What was wrong until now.
        losses: What was deleted, and when.
        fences: Of all grants.
        is_calm: Whether the losses have ended.
    """

    seed: int
    clients: Sequence[Redlease]
    raw: redis.asyncio.Redis
    pressure: Pressure | None = None
    problems: list[str] = field(default_factory=list)
    losses: list[str] = field(default_factory=list)
    fences: list[int] = field(default_factory=list)
    is_calm: bool = False

    def __post_init__(self) -> None:
        """Draw the settings."""
        self.random = Random(self.seed)
        self.name = f"r{self.seed}"
        state = self.clients[0]._operations.resource(self.name).state_key.decode()
        self.keys = [state.removesuffix(PARTS[0]) + part for part in PARTS]
        self.settings = Settings.drawn(self.random)
        self.sides = [self.settings.made(client, self.name) for client in self.clients]
        self.began_at = asyncio.get_running_loop().time()

    async def run(self) -> list[str]:
        """Play it and look at what is left; return the problems, with what one needs to know of them."""
        actors = [asyncio.create_task(self._act(number), name=f"actor {number}") for number in range(ACTORS)]
        operator = asyncio.create_task(self._operate(), name="operator")
        try:
            await (self._lose() if self.pressure is None else self.pressure.ends())
            self.is_calm = True
            await self._end_of([operator])
            await self._ordinary(self._lift())
            await self._end_of(actors)
            if not self.problems:
                await asyncio.sleep(LEASE_S + WAITER_LEASE_S + LOCK_DELAY_S)
                await self._watched(self._examine())
        finally:
            for task in (*actors, operator):
                task.cancel()
            await asyncio.gather(*actors, operator, return_exceptions=True)
        if len(set(self.fences)) < len(self.fences):
            self.problems.append("a fence was granted twice")
        await self.raw.delete(*self.keys)
        about = f"seed {self.seed}: {self.settings}; lost: {'; '.join(self.losses)}"
        return [f"{problem}\n    {about}" for problem in self.problems]

    async def _end_of(self, tasks: list[asyncio.Task[None]]) -> None:
        _, pending = await asyncio.wait(tasks, timeout=LEASE_S + WAITER_LEASE_S + LOCK_DELAY_S + SLACK_S)
        for task in pending:
            snapshot = await self._snapshot()
            self.problems.append(f"{task.get_name()} is not served: {snapshot}")

    async def _ordinary(self, call: Awaitable[Any]) -> None:
        """Await a call that losses may fail, but only in the ways that are told to users."""
        with contextlib.suppress(*ORDINARY):
            await self._watched(call)

    async def _watched(self, call: Awaitable[Any]) -> Any:
        try:
            return await call
        except ORDINARY:
            raise
        except Exception as error:  # noqa: BLE001  it is what the history is to find
            if self.is_calm or self.pressure is None or "the server is out of memory" not in str(error):
                self.problems.append(f"{type(error).__name__}: {error}")

    # Those who use it

    async def _act(self, number: int) -> None:
        random = Random(f"{self.seed} {number}")
        sides = self.sides[number % len(self.sides)]
        actions = [self._hold, self._hold, self._use, self._use, self._share, self._try, self._give_up]
        if self.settings.kind != "rwlock":
            actions.append(self._replace)
        while not self.is_calm:
            pool = sides.other if random.random() < 0.3 else sides.one
            request: dict[str, Any] = {"key": random.choice(self.settings.keys)}
            if self.settings.kind == "semaphore" and random.random() < 0.2:
                most = min(self.settings.capacity, self.settings.options.get("per_key", 4) if request["key"] else 4)
                request["weight"] = random.randint(1, most)
            if random.random() < 0.2:
                request["priority"] = random.randint(1, 3)
            await self._ordinary(random.choice(actions)(pool, request, random))
            await self._pause(0)

    async def _hold(self, pool: Semaphore, request: dict[str, Any], random: Random) -> None:
        async with pool.hold(**request) as hold:
            self.fences.append(hold.fence)
            await asyncio.sleep(random.uniform(0, 0.03))

    async def _use(self, pool: Semaphore, request: dict[str, Any], random: Random) -> None:
        permit = await pool.acquire(**request)
        self.fences.append(permit.fence)
        await asyncio.sleep(random.uniform(0, 0.02))
        if random.random() < 0.3:
            permit = await pool.renew(permit)
        if random.random() < 0.2:
            hold = await pool.adopt(permit)
            self.fences.append(hold.fence)
            await hold.release()
        elif random.random() < 0.8:  # else it is abandoned, and its lease ends
            await pool.release(permit)

    async def _share(self, pool: Semaphore, request: dict[str, Any], random: Random) -> None:
        ticket = f"shared-{'all' if pool is not self.sides[0].one else 'one'}-{request['key']}"
        with contextlib.suppress(ValueError):  # the ticket is in use in this client, or of another kind of request
            permit = await pool.acquire(ticket=ticket, key=request["key"])
            await asyncio.sleep(random.uniform(0, 0.02))
            await pool.release(permit)

    async def _try(self, pool: Semaphore, request: dict[str, Any], random: Random) -> None:  # noqa: ARG002
        permit = await pool.try_acquire(key=request["key"])
        if permit is not None:
            self.fences.append(permit.fence)
            await pool.release(permit)

    async def _give_up(self, pool: Semaphore, request: dict[str, Any], random: Random) -> None:
        if random.random() < 0.5:
            with contextlib.suppress(Unavailable):  # it had no time to be asked
                await pool.release(await pool.acquire(timeout=random.uniform(0.001, 0.03), **request))
            return
        task = asyncio.create_task(pool.acquire(**request))
        await asyncio.sleep(random.uniform(0, 0.03))
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await pool.release(await task)

    async def _replace(self, pool: Semaphore, request: dict[str, Any], random: Random) -> None:
        how: Any = random.choice(("replace-waiter", "replace-holder"))
        async with pool.hold(key=request["key"], when_full=how, grace=0.05) as hold:
            self.fences.append(hold.fence)
            await asyncio.sleep(random.uniform(0, 0.02))

    # Who operates it

    async def _operate(self) -> None:
        random = Random(f"{self.seed} operator")
        while not self.is_calm:
            sides = random.choice(self.sides)
            await self._ordinary(self._operation(sides, random))
            await self._pause(random.uniform(0, 0.2))

    async def _pause(self, pause_s: float) -> None:
        await asyncio.sleep(pause_s)
        if self.pressure is not None:
            await self.pressure.let_idle(self.seed)

    async def _operation(self, sides: Sides, random: Random) -> None:
        pool, key = sides.one, random.choice(self.settings.keys)
        brief_s = random.uniform(0.05, 0.2)
        calls: list[Callable[[], Awaitable[Any]]] = [
            pool.inspect,
            pool.locked,
            lambda: pool.position(f"shared-one-{key}"),
            pool.history,
            lambda: pool.release(f"shared-one-{key}"),
            lambda: pool.release_all(queue=random.random() < 0.5),
            lambda: pool.pause(until=brief_s),
            pool.resume,
            lambda: pool.back_off(key, brief_s),
            lambda: pool.clear_limit(key=key),
            lambda: pool.end_back_off(key),
        ]
        if self.settings.kind != "rwlock":
            calls += [
                lambda: pool.set_limit(random.randint(0, 2), until=brief_s),
                lambda: pool.set_limit(per_key=random.randint(0, 2), until=brief_s),
                lambda: pool.set_limit(random.randint(0, 2), key=key, until=brief_s),
            ]
        if self.settings.kind == "semaphore" and self.settings.capacity > 1:
            calls.append(lambda: pool.resize(random.randint(self.settings.capacity, 5)))
        await random.choice(calls)()

    async def _lift(self) -> None:
        pool = self.sides[0].one
        await pool.resume()
        for key in {None, *self.settings.keys}:
            await pool.clear_limit(key=key)
        if self.settings.kind == "semaphore" and self.settings.capacity > 1:
            await pool.resize(self.settings.capacity)

    # What is lost

    async def _lose(self) -> None:
        for _ in range(self.random.randint(*ROUNDS)):
            await asyncio.sleep(self.random.uniform(0, 0.25))
            await self.lose_some()

    async def lose_some(self) -> None:
        """Delete one to three of the keys, fields and members that are there."""
        for _ in range(self.random.choice((1, 1, 1, 2, 3))):
            what = self.random.choice((self._lose_keys, self._lose_fields, self._lose_members))
            if lost := await what():
                at_s = asyncio.get_running_loop().time() - self.began_at
                self.losses.append(f"{at_s:.2f} s {lost}")

    async def _lose_keys(self) -> str:
        keys = self.random.sample(self.keys, self.random.choice((1, 1, 1, 2, 3)))
        await self.raw.delete(*keys)
        return " ".join(["DEL", *(key.rpartition(":")[2] for key in keys)])

    async def _lose_fields(self) -> str:
        fields: Any = sorted(await _sent(self.raw.hkeys(self.keys[0])))
        some = self.random.sample(fields, min(len(fields), self.random.choice((1, 1, 2, 5))))
        if some:
            await _sent(self.raw.hdel(self.keys[0], *some))
        return f"HDEL {some}" if some else ""

    async def _lose_members(self) -> str:
        key = self.random.choice(self.keys[1:4])
        members: list[Any] = await self.raw.zrange(key, 0, -1)
        some = self.random.sample(members, min(len(members), self.random.choice((1, 1, 2))))
        if some:
            await self.raw.zrem(key, *some)
        return f"ZREM {key.rpartition(':')[2]} {some}" if some else ""

    # What must be so afterwards

    async def _snapshot(self) -> Snapshot | str:
        try:
            return await self.sides[0].one.inspect()
        except RedleaseError as error:
            return str(error)

    async def _examine(self) -> None:
        """Find each difference from a resource of which nothing was ever lost."""
        await self._serves_all()
        first, second = (self.settings.made(client, self.name, lease_s=30, waits_s=30) for client in self.clients[:2])
        await self._is_empty(first, "after one lease and one waiter lease")
        await self._has_capacity(first, second)
        await self._has_limits(first)
        await self._is_freed(second)

    async def _granted(self, pool: Semaphore, key: str | None = None, **request: Any) -> Permit | None:
        try:
            return await pool.acquire(key=key, timeout=SLACK_S, **request)
        except AcquireTimeout:
            self.problems.append(f"a request with the key {key} is not granted: {await self._snapshot()}")
            return None

    async def _released(self, pool: Semaphore, permit: Permit | None) -> None:
        if permit is not None and not await pool.release(permit):
            self.problems.append(f"the permit {permit} is not held, though nothing was lost since its grant")

    async def _passes(self, pool: Semaphore, key: str | None) -> None:
        await self._released(pool, await self._granted(pool, key))

    async def _is_empty(self, sides: Sides, when: str) -> None:
        snapshot = await sides.one.inspect()
        left = [limit for limit in snapshot.limits if limit.kind != "rate"]
        if snapshot.in_use or snapshot.waiting or snapshot.holders or snapshot.waiters or snapshot.damaged or left:
            self.problems.append(f"something is left {when}: {snapshot}")
        elif snapshot.capacity != (CAPACITY_MAX if self.settings.kind == "rwlock" else self.settings.capacity):
            self.problems.append(f"the capacity is {snapshot.capacity}")

    async def _has_capacity(self, first: Sides, second: Sides) -> None:
        """So many units are granted and no more; who waits then is granted when they are released."""
        units = 3 if self.settings.kind == "rwlock" else self.settings.capacity
        permits = [await self._granted(first.one) for _ in range(units)]
        snapshot = await first.one.inspect()
        if snapshot.in_use != units or {held.fence for held in snapshot.holders} != {
            each and each.fence for each in permits
        }:
            self.problems.append(f"{units} units are held, but it says {snapshot}")
        if await first.other.try_acquire() is not None or not await first.other.locked():
            self.problems.append(f"a unit more than {units} was granted")
        waiting = asyncio.gather(*(self._passes(second.other, key) for key in self.settings.keys))
        for permit in permits:
            await self._released(first.one, permit)
        await waiting
        await self._is_empty(first, "when all has been released")

    async def _has_limits(self, first: Sides) -> None:
        """A key has its units and no more."""
        most = self.settings.options.get("per_key", 0)
        if not 0 < most < self.settings.capacity:
            return
        for key in filter(None, self.settings.keys):
            permits = [await self._granted(first.one, key) for _ in range(most)]
            if (more := await first.one.try_acquire(key=key)) is not None:
                self.problems.append(f"key {key} has more than {most} units")
            for permit in (*permits, more):
                await self._released(first.one, permit)

    async def _is_freed(self, sides: Sides) -> None:
        """What is lost while it is held ends neither the tools nor an operator's release."""
        units = 1 if self.settings.kind == "rwlock" else self.settings.capacity
        for number in range(units):
            await self._granted(sides.one, self.random.choice(self.settings.keys) if number == 0 else None)
        await self.lose_some()
        listed = [each for each in await Overview(self.clients[0]._operations, self.name).look() if each.error]
        await sides.one.inspect()
        await sides.one.release_all(queue=True)
        snapshot = await sides.one.inspect()
        if listed or snapshot.in_use or snapshot.damaged:
            self.problems.append(f"release_all left {snapshot}, {listed}")
        await self._serves_all()

    async def _serves_all(self) -> None:
        """A request of each key is granted within the leases, with a fence above all before it."""
        usual = self.sides[0].one
        for key in {*self.settings.keys, None}:
            if (permit := await self._granted(usual, key)) is None:
                continue
            if permit.fence <= max(self.fences, default=0):
                self.problems.append(f"fence {permit.fence} is not above those before it")
            self.fences.append(permit.fence)
            if not await usual.release(permit):
                await asyncio.sleep(LOCK_DELAY_S)  # on a busy machine its lease may have ended


async def _sent(command: Any) -> Any:
    """Await a command that redis-py types as one of either face."""
    return await command


async def play(
    seeds: Iterable[int], clients: Sequence[Redlease], raw: redis.asyncio.Redis, *, width: int = 12
) -> list[str]:
    """Play a history for each seed, so many at the same time, and return the problems of all of them."""
    rest, problems = iter(seeds), list[str]()

    async def one_after_the_other() -> None:
        for seed in rest:
            problems.extend(await History(seed, clients, raw).run())

    async with asyncio.TaskGroup() as group:
        for _ in range(width):
            group.create_task(one_after_the_other())
    return problems
