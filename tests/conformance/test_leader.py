"""A leader: one at a time, terms that are numbered by their fences, and a body that ends with its term."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import pytest

from redlease import LeaseLost, Withdrawn

from helpers import cancel, eventually, until_waiting

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from redlease import Leader, Redlease, Term

    from conftest import MakeClient


async def first_term(leader: Leader) -> Term:
    """Return the first term of a candidate, whose loop is left without being closed."""
    return await anext(leader.terms())


async def test_candidates_lead_in_the_order_of_their_arrival(client: Redlease, make_client: MakeClient) -> None:
    """One leads; when it steps down the next one does, with a greater number, and everybody can see who."""
    ours, theirs = client.leader("l", owner="we"), (await make_client()).leader("l", owner="they")
    assert await theirs.current() is None
    async with contextlib.aclosing(ours.terms(metadata={"zone": "a"})) as terms:
        term = await anext(terms)
        current = await theirs.current()
        assert current is not None
        assert (current.owner, current.fence, current.metadata) == ("we", term.number, {"zone": "a"})
        term.check()
        async with contextlib.aclosing(theirs.terms()) as their_terms:
            succession = asyncio.ensure_future(anext(their_terms))
            await until_waiting(client.lock("l"), 1)
            assert not succession.done()
            assert await term.step_down()
            assert not await term.step_down()
            assert not term.lost
            assert not await term.wait_lost()
            successor = await succession
            assert successor.number > term.number
            current = await ours.current()
            assert current is not None
            assert current.owner == "they"
    assert await ours.current() is None


@pytest.mark.of_tasks("a loss cancels the task of a body, and nothing cancels a thread")
async def test_a_lost_term_cancels_its_body_and_the_next_one_begins(client: Redlease) -> None:
    """The loss of a term is no error: the loop goes on, and leads again with a greater number."""
    leader, lock = client.leader("l"), client.lock("l")
    numbers = []
    async with contextlib.aclosing(leader.terms()) as terms:
        async for term in terms:
            async with term:
                numbers.append(term.number)
                if len(numbers) == 3:
                    break
                await lock.release(term.hold.ticket)
                await asyncio.Event().wait()
            assert term.lost
    assert numbers == sorted(set(numbers))
    assert await leader.current() is None


@pytest.mark.of_tasks("a loss cancels the task of a body, and nothing cancels a thread")
async def test_a_body_that_finds_out_by_itself_ends_its_term(client: Redlease) -> None:
    """What `check` raises of the term's own loss ends the block; that of another hold is an error."""
    leader, lock = client.leader("l"), client.lock("l")
    async with contextlib.aclosing(leader.terms()) as terms:
        async with await anext(terms) as term:
            with contextlib.suppress(asyncio.CancelledError):
                await lock.release(term.hold.ticket)
                await asyncio.Event().wait()
            term.check()
            pytest.fail("the term is over")
        other = await client.lock("another").hold()
        await other.release()
        with pytest.raises(LeaseLost, match="another"):
            async with await anext(terms):
                other.check()


@pytest.mark.of_tasks("a loss cancels the task of a body, and nothing cancels a thread")
async def test_an_async_generator_that_is_closed_in_a_lost_term_ends(client: Redlease) -> None:
    """It is closed and does not go on; whoever closes it gets the loss."""
    leader, lock = client.leader("l"), client.lock("l")

    async def work() -> AsyncGenerator[int, None]:
        async with contextlib.aclosing(leader.terms()) as terms:
            async for term in terms:
                async with term:
                    yield term.number

    generator = work()
    await anext(generator)
    holder = await leader.current()
    assert holder is not None
    with contextlib.suppress(asyncio.CancelledError):
        await lock.release(holder.ticket)
        await asyncio.Event().wait()
    with pytest.raises(LeaseLost):
        await generator.aclose()
    with pytest.raises(StopAsyncIteration):
        await anext(generator)


@pytest.mark.of_tasks("a loss cancels the task of a body, and nothing cancels a thread")
async def test_a_body_that_fails_ends_the_loop(client: Redlease) -> None:
    """What the body raises comes out as it is, and this process no longer leads; a loss that it notices itself too."""
    leader, lock = client.leader("l"), client.lock("l")

    async def lead(error: Exception, *, lost: bool) -> None:
        async with contextlib.aclosing(leader.terms()) as terms:
            async for term in terms:
                async with term:
                    if lost:
                        with contextlib.suppress(asyncio.CancelledError):
                            await lock.release(term.hold.ticket)
                            await asyncio.Event().wait()
                    raise error

    for lost in (False, True):
        with pytest.raises(ZeroDivisionError):
            await lead(ZeroDivisionError(), lost=lost)
        assert await leader.current() is None


@pytest.mark.of_tasks("a loss cancels the task of a body, and nothing cancels a thread")
async def test_a_body_may_ask_instead(client: Redlease) -> None:
    """A body that does not enter its term is not cancelled; it waits for the loss, or checks."""
    leader, lock = client.leader("l"), client.lock("l")
    async with contextlib.aclosing(leader.terms()) as terms:
        term = await anext(terms)
        assert await lock.release(term.hold.ticket)
        assert await term.wait_lost()
        assert term.lost
        with pytest.raises(LeaseLost):
            term.check()
        async with term:
            with pytest.raises(asyncio.CancelledError):
                await asyncio.sleep(0)
            raise asyncio.CancelledError
        async with await anext(terms) as again:
            assert again.number > term.number


async def test_a_cancelled_leader_is_cancelled(client: Redlease) -> None:
    """A cancellation from outside goes through the block and the loop, and ends the term."""
    leader = client.leader("l")
    leads = asyncio.Event()

    async def lead() -> None:
        async with contextlib.aclosing(leader.terms()) as terms:
            async for term in terms:
                async with term:
                    leads.set()
                    await asyncio.Event().wait()

    task = asyncio.create_task(lead())
    await leads.wait()
    await cancel(task)
    assert task.cancelled()

    async def nobody_leads() -> bool:
        return await leader.current() is None

    await eventually(nobody_leads)


async def test_a_candidate_whose_client_closes_hears_of_it(client: Redlease, make_client: MakeClient) -> None:
    """A candidate does not wait for ever."""
    async with contextlib.aclosing(client.leader("l").terms()) as terms:
        await anext(terms)
        other = await make_client()
        candidate = asyncio.create_task(first_term(other.leader("l")))
        await until_waiting(client.lock("l"), 1)
        await other.close()
        with pytest.raises(Withdrawn):
            await candidate


async def test_a_term_that_was_stepped_down_from_is_not_entered(client: Redlease) -> None:
    """A block that could protect nothing does not begin."""
    async with contextlib.aclosing(client.leader("l").terms()) as terms:
        term = await anext(terms)
        await term.step_down()
        with pytest.raises(LeaseLost, match="released"):
            async with term:
                pytest.fail("nobody leads")
