"""Acquiring: who gets a permit at once, what it says, and how a request that is not granted ends."""

from __future__ import annotations

import asyncio
import json
import pickle
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from unittest.mock import ANY

import pytest
from pydantic import TypeAdapter

from redlease import AcquireTimeout, Lock, Permit, QueueFull, Semaphore

from helpers import cancel, left_over, queue_up, until_waiting

if TYPE_CHECKING:
    import redis.asyncio

    from redlease import Redlease

    from conftest import MakeClient

# In what the permits of two grants on one resource differ.
OF_A_GRANT = ("ticket", "fence", "granted_at_ms", "expires_at_ms")


async def test_a_free_resource_is_granted_at_once(client: Redlease) -> None:
    """A permit says what was asked for, what was granted, and until when by the server's clock."""
    lock = client.lock("invoice:42", lease=2.5)
    permit = await lock.acquire(ticket="order-42", owner="svc-a", metadata={"k": "v"})
    assert (permit.resource, permit.ticket, permit.owner, permit.metadata) == (
        "invoice:42",
        "order-42",
        "svc-a",
        {"k": "v"},
    )
    assert (permit.weight, permit.capacity, permit.lease_ms) == (1, 1, 2500)
    assert permit.expires_at_ms - permit.granted_at_ms == 2500
    assert permit.fence >= permit.granted_at_ms * 1000
    assert await lock.is_held(permit)
    assert await lock.release(permit)


@pytest.mark.of_tasks("compares classes and attributes")
async def test_a_lock_is_a_semaphore_of_capacity_1(client: Redlease, make_client: MakeClient) -> None:
    """A lock has nothing of its own but its name, and shares queue and permits with a semaphore of capacity 1.

    What the other tests of this suite show of locks, they therefore show of such semaphores too.
    """
    assert Lock.__bases__ == (Semaphore,)
    assert set(vars(Lock)) <= {"__module__", "__doc__", "__firstlineno__", "__static_attributes__"}
    options: dict[str, Any] = {"lease": 7, "owner": "o", "waiter_lease": 9, "idle_ttl": 60, "max_waiters": 1}
    lock = client.lock("r", **options)
    pool = (await make_client()).semaphore("r", 1, **options)
    assert vars(lock)["_default_spec"] == vars(pool)["_default_spec"]
    permit = await lock.acquire()
    assert await pool.try_acquire() is None
    waiting = await queue_up(pool, 1)
    with pytest.raises(QueueFull):
        await lock.acquire()
    assert await pool.inspect() == replace(await lock.inspect(), server_time_ms=ANY)
    assert await pool.release(permit)
    (again,) = waiting
    assert replace(await again, **dict.fromkeys(OF_A_GRANT, ANY)) == permit
    assert await lock.release(again.result())


async def test_a_lock_is_held_by_one(client: Redlease) -> None:
    """While one holds it nobody else does, and try_acquire says so without queueing."""
    lock = client.lock("r")
    permit = await lock.try_acquire()
    assert permit is not None
    assert await lock.try_acquire() is None
    snapshot = await lock.inspect()
    assert [holder.ticket for holder in snapshot.holders] == [permit.ticket]
    assert snapshot.waiters == ()
    assert await lock.release(permit)
    assert await lock.try_acquire() is not None


async def test_a_semaphore_is_held_by_as_many_as_its_capacity(client: Redlease) -> None:
    """Many tasks use all of the capacity, and never more."""
    pool = client.semaphore("r", capacity=3)
    inside = most = 0

    async def work() -> None:
        nonlocal inside, most
        async with pool.hold():
            inside += 1
            most = max(most, inside)
            await asyncio.sleep(0.002)
            inside -= 1

    await asyncio.gather(*(work() for _ in range(60)))
    assert most == 3


async def test_weights_share_the_capacity(client: Redlease) -> None:
    """The weights of all permits sum to at most the capacity."""
    pool = client.semaphore("r", capacity=5)
    three = await pool.acquire(weight=3)
    assert await pool.try_acquire(weight=3) is None
    two = await pool.try_acquire(weight=2)
    assert two is not None
    assert await pool.try_acquire() is None
    assert await pool.release(three)
    assert await pool.try_acquire(weight=4) is None
    assert await pool.try_acquire(weight=3) is not None


async def test_names_do_not_contend(client: Redlease) -> None:
    """Every name is a resource of its own, whatever characters it is made of."""
    names = ["a", "A", "a:b", "a b", "{a}", "%7Ba%7D", "a}", "{", "ключ", "\N{LOCK}", "a\nb", "a:state", "x" * 512]
    permits = [await client.lock(name).try_acquire() for name in names]
    assert [permit and permit.resource for permit in permits] == names
    assert [await client.lock(name).try_acquire() for name in names] == [None] * len(names)
    for name, permit in zip(names, permits, strict=True):
        assert permit is not None
        assert await client.lock(name).release(permit)


async def test_texts_arrive_as_they_are(client: Redlease) -> None:
    """Operations, owners and metadata may hold any character."""
    odd = "é \N{LOCK} \" ' \\ | ! { } \n %s [] 0"
    lock = client.lock("r")
    permit = await lock.acquire(ticket=odd, owner=odd, metadata={odd: odd, "": ""})
    (held,) = (await lock.inspect()).holders
    assert (held.ticket, held.owner, held.metadata) == (odd, odd, {odd: odd, "": ""})
    assert held == permit
    assert await lock.release(odd)


async def test_clients_contend_and_prefixes_do_not(make_client: MakeClient, engine: str, prefix: str) -> None:
    """Two clients of one prefix share a resource, a client of another prefix does not."""
    one, two, other = await make_client(), await make_client(), await make_client(prefix=f"{prefix}-other")
    assert await one.lock("r").try_acquire() is not None
    assert await two.lock("r").try_acquire() is None
    assert await other.lock("r").try_acquire() is not None


async def test_a_timeout_ends_the_wait(client: Redlease, prefix: str, raw: redis.asyncio.Redis) -> None:
    """AcquireTimeout is a TimeoutError too, names the resource and the ticket, and the request is out of the queue."""
    lock = client.lock("busy")
    permit = await lock.acquire()
    with pytest.raises(AcquireTimeout, match="busy") as caught:
        await lock.acquire(timeout=0.05, ticket="late")
    assert isinstance(caught.value, TimeoutError)
    assert (caught.value.resource, caught.value.ticket) == ("busy", "late")
    with pytest.raises(AcquireTimeout):
        async with lock.hold(timeout=timedelta(milliseconds=30)):
            pytest.fail("it is held by another")
    await until_waiting(lock, 0)
    assert await lock.release(permit)
    assert await left_over(raw, prefix) == []


async def test_a_timeout_of_nothing_never_queues(client: Redlease) -> None:
    """With a timeout of 0 a request is granted at once or fails at once, and stands in no queue meanwhile."""
    lock = client.lock("r")
    permit = await lock.acquire(timeout=0)
    for attempt in (lock.acquire(timeout=0), lock.acquire(timeout=timedelta(0))):
        with pytest.raises(AcquireTimeout):
            await attempt
    with pytest.raises(AcquireTimeout):
        await lock.hold(timeout=0)
    assert (await lock.inspect()).waiters == ()
    assert await lock.release(permit)


async def test_an_error_survives_the_way_to_another_process(client: Redlease) -> None:
    """Errors can be pickled, with resource, ticket and notes."""
    lock = client.lock("r")
    await lock.acquire()
    with pytest.raises(AcquireTimeout) as caught:
        await lock.acquire(timeout=0, ticket="t")
    caught.value.add_note("seen")
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (type(copy), str(copy), copy.resource, copy.ticket) == (AcquireTimeout, str(caught.value), "r", "t")
    assert copy.__notes__ == ["seen"]


async def test_a_full_queue_refuses_at_once(client: Redlease) -> None:
    """With max_waiters in the queue the next one gets QueueFull, and place is made by one who leaves."""
    lock = client.lock("r", max_waiters=2)
    permit = await lock.acquire()
    waiting = await queue_up(lock, 2)
    with pytest.raises(QueueFull, match="r") as caught:
        await lock.acquire(ticket="third")
    assert (caught.value.resource, caught.value.ticket) == ("r", "third")
    await cancel(waiting[0])
    await until_waiting(lock, 1)
    waiting += await queue_up(lock, 1)
    assert await lock.release(permit)
    assert await lock.release(await waiting[1])
    assert await lock.release(await waiting[2])


async def test_a_queue_of_nobody_admits_only_whom_it_can_grant(client: Redlease) -> None:
    """With max_waiters of 0 an acquire is granted or refused at once."""
    lock = client.lock("r", max_waiters=0)
    permit = await lock.acquire()
    with pytest.raises(QueueFull):
        await lock.acquire()
    assert await lock.release(permit)
    assert await lock.acquire()


async def test_one_object_serves_many_tasks(client: Redlease) -> None:
    """A permit acquired in one task is released in another, through the one object that they share."""
    lock = client.lock("r")
    permits: asyncio.Queue[Permit] = asyncio.Queue()

    async def take() -> None:
        await permits.put(await lock.acquire())

    async def give() -> bool:
        return await lock.release(await permits.get())

    assert all((await asyncio.gather(*(take() for _ in range(20)), *(give() for _ in range(20))))[20:])


async def test_a_permit_is_plain_data(client: Redlease, make_client: MakeClient) -> None:
    """A permit goes through JSON, pydantic and pickle, and what comes out releases it in another client."""
    lock = client.lock("r")
    permit = await lock.acquire(metadata={"k": "v"})
    adapter = TypeAdapter(Permit)
    copies = (
        adapter.validate_json(adapter.dump_json(permit)),
        Permit(**json.loads(json.dumps(adapter.dump_python(permit)))),
        pickle.loads(pickle.dumps(permit)),
    )
    assert all(copy == permit for copy in copies)
    assert await (await make_client()).lock("r").release(copies[0])
    assert not await lock.release(permit)


async def test_the_owner_is_shown(make_client: MakeClient, engine: str) -> None:
    """Owner is what the request says, else the primitive, else the client; for holders and waiters alike."""
    client = await make_client(owner="client")
    own, plain = client.semaphore("r", capacity=2, owner="primitive"), client.semaphore("r", capacity=2)
    await own.acquire(owner="request")
    await own.acquire()
    waiting = await queue_up(plain, 1, metadata={"job": "7"})
    snapshot = await plain.inspect()
    assert [holder.owner for holder in snapshot.holders] == ["request", "primitive"]
    assert [(waiter.owner, waiter.metadata) for waiter in snapshot.waiters] == [("client", {"job": "7"})]
    await cancel(*waiting)


async def test_a_closed_client_says_so(make_client: MakeClient, engine: str) -> None:
    """A closed client makes no primitives."""
    client = await make_client()
    await client.close()
    with pytest.raises(Exception, match="closed"):
        client.lock("r")
