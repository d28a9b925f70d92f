"""Sequences: items handled one at a time, each once, whoever calls, fails, is cancelled or loses the lock."""

from __future__ import annotations

import asyncio
import contextlib
import math
from typing import TYPE_CHECKING, Any

import pytest

from redlease import AcquireTimeout, Hold, LeaseLost, RedleaseError, Retry, SequenceFailed, SequenceProgress
from redlease._core.primitives.checkpoints import Checkpoints, Plan

from helpers import cancel, eventually, keys_of, left_over, until_waiting

if TYPE_CHECKING:
    import redis.asyncio

    from redlease import Redlease

    from conftest import MakeClient

AT_ONCE = Retry(attempts=3, initial=0)
ONCE = Retry(attempts=1)

on_one_engine = pytest.mark.parametrize("engine", ["fakeredis"], indirect=True)


class Handler:
    """Doubles numbers; remembers what it handled, and fails or stops where a test wants that."""

    def __init__(self, *, fails: dict[int, int] | None = None, stops_at: int | None = None) -> None:
        self.handled: list[int] = []
        self.fences: list[int] = []
        self.stopped = asyncio.Event()
        self._fails = dict(fails or {})
        self._stops_at = stops_at
        self._inside = 0

    async def __call__(self, item: int, hold: Hold) -> int:
        """Handle one item, alone."""
        assert self._inside == 0
        self._inside += 1
        try:
            self.handled.append(item)
            self.fences.append(hold.fence)
            await asyncio.sleep(0)
            if item == self._stops_at:
                self.stopped.set()
                await asyncio.sleep(60)
            if self._fails.get(item, 0) > 0:
                self._fails[item] -= 1
                raise RuntimeError(f"no {item} today")
            return 2 * item
        finally:
            self._inside -= 1


async def stop_early(client: Redlease, count: int, *, id: str = "s") -> None:  # noqa: A002
    """Do that many of ten items."""
    handler = Handler(fails={count: 1})
    with pytest.raises(SequenceFailed):
        await client.sequence("r", range(10), handler, id=id, retry=ONCE)


# What it returns


async def test_results_come_in_order_and_items_are_handled_once(client: Redlease) -> None:
    """Each item is handled alone and under one fence; the same call again returns the results and handles nothing."""
    handler = Handler()
    run = client.sequence("r", range(10), handler, id="s")
    assert await run == [2 * number for number in range(10)]
    assert handler.handled == list(range(10))
    assert len(set(handler.fences)) == 1
    assert not await client.lock("r").locked()
    assert await run == await client.sequence("r", range(10), handler, id="s") == [2 * number for number in range(10)]
    assert handler.handled == list(range(10))


async def test_iterating_yields_each_item_as_it_is_done(client: Redlease) -> None:
    """What earlier runs did comes first; each further item comes while the next one is not done yet."""
    await stop_early(client, 4)
    handler = Handler(stops_at=7)
    seen = []
    async with contextlib.aclosing(aiter(client.sequence("r", range(10), handler, id="s"))) as results:
        async for result in results:
            seen.append(result)
            if result == 12:
                await eventually(handler.stopped)
                break
    assert seen == [2 * number for number in range(7)]
    assert handler.handled == [4, 5, 6, 7]


async def test_leaving_an_iteration_stops_the_handler_and_frees_the_lock(
    client: Redlease, raw: redis.asyncio.Redis, prefix: str
) -> None:
    """A closed iterator leaves no task, no permit, and what was done."""
    handler = Handler(stops_at=2)
    results = aiter(client.sequence("r", range(10), handler, id="s"))
    await anext(results)
    await eventually(handler.stopped)
    await results.aclose()
    await eventually(lambda: left_over_is_none(raw, prefix))
    assert await client.sequence_progress("r", "s") == SequenceProgress("r", "s", 2, 8, None)


async def left_over_is_none(raw: redis.asyncio.Redis, prefix: str) -> bool:
    """Tell whether no permit and no queue entry is left."""
    return await left_over(raw, prefix) == []


async def test_an_iteration_raises_what_the_call_raises(client: Redlease) -> None:
    """A failed item ends the loop with its error, after the results of those before it."""
    seen = []
    with pytest.raises(SequenceFailed, match="no 2 today"):
        async for result in client.sequence("r", range(10), Handler(fails={2: 9}), retry=AT_ONCE):
            seen.append(result)  # noqa: PERF401  the error ends the loop
    assert seen == [0, 2]


async def test_no_items(client: Redlease, raw: redis.asyncio.Redis, prefix: str) -> None:
    """An empty list is done at once, without the server."""
    assert await client.sequence("r", [], Handler()) == []
    assert await keys_of(raw, f"{prefix}:*") == []


async def test_results_are_what_json_makes_of_them(client: Redlease) -> None:
    """A first call returns just what a later one reads: a tuple is a list in both, text of any kind stays as it is."""
    values: list[Any] = [(1, 2), {"b": 1, "a": None}, "é\0 \U0001f600", 1.5, True, ""]

    async def handler(item: int, hold: Hold) -> Any:
        return values[item]

    first = await client.sequence("r", range(6), handler, id="s")
    assert first == [[1, 2], {"b": 1, "a": None}, "é\0 \U0001f600", 1.5, True, ""]
    assert await client.sequence("r", range(6), handler, id="s") == first


async def test_long_results_are_read_in_pages(client: Redlease) -> None:
    """More than one reply may have comes back whole and in order, however long each is."""

    async def handler(item: int, hold: Hold) -> str:
        return f"{item}" + "x" * (60_000 if item % 2 else 0)

    first = await client.sequence("r", range(20), handler, id="s")
    assert await client.sequence("r", range(20), handler, id="s") == first


async def test_many_short_results_are_read_in_pages(client: Redlease, monkeypatch: pytest.MonkeyPatch) -> None:
    """So do many short ones, of which a reply holds a bounded number."""
    monkeypatch.setattr("redlease._core.primitives.checkpoints.PAGE_BYTES", 1000)

    async def handler(item: int, hold: Hold) -> int:
        return item

    first = await client.sequence("r", range(35), handler, id="s")
    assert await client.sequence("r", range(35), handler, id="s") == first == list(range(35))


# The id


async def test_an_id_is_of_one_list(client: Redlease) -> None:
    """Another list under a known id is refused, and nothing of it is begun."""
    handler = Handler()
    await client.sequence("r", [1, 2], handler, id="s")
    with pytest.raises(ValueError, match="other items"):
        await client.sequence("r", [1, 2, 3], handler, id="s")
    assert handler.handled == [1, 2]
    assert await client.sequence("r", [1, 2, 3], handler, id="other") == [2, 4, 6]
    assert not await client.lock("r").locked()


async def test_without_an_id_the_items_are_the_id(client: Redlease) -> None:
    """An equal list is the same sequence, whatever the order of its keys; another list is another one."""
    handled = []

    async def handler(item: dict[str, int], hold: Hold) -> int:
        handled.append(item)
        return len(handled)

    assert await client.sequence("r", [{"a": 1, "b": 2}], handler) == [1]
    assert await client.sequence("r", [{"b": 2, "a": 1}], handler) == [1]
    assert await client.sequence("r", [{"a": 1, "b": 3}], handler) == [2]
    assert await client.sequence("other", [{"a": 1, "b": 2}], handler) == [3]


async def test_ids_with_braces_and_resources_do_not_meet(client: Redlease) -> None:
    """An id may have any characters, and is one of its resource."""
    handler = Handler()
    for resource, name in [("r", "{x}:state"), ("r", "}é{"), ("{r}", "}é{"), ("r:sequence", "x"), ("r", "sequence:x")]:
        assert await client.sequence(resource, [1], handler, id=name) == [2]
    assert handler.handled == [1] * 5


# Failures


async def test_a_failing_item_is_retried_under_the_same_fence(client: Redlease) -> None:
    """The lock is not let go between the attempts, and the others wait."""
    handler = Handler(fails={1: 2})
    assert await client.sequence("r", range(3), handler, id="s", retry=AT_ONCE) == [0, 2, 4]
    assert handler.handled == [0, 1, 1, 1, 2]
    assert len(set(handler.fences)) == 1


async def test_a_call_resumes_at_the_item_that_failed(make_client: MakeClient, engine: str) -> None:
    """With its attempts used up an item ends the call; progress tells why, and any client resumes there."""
    first, second = await make_client(), await make_client()
    handler = Handler(fails={2: 5})
    with pytest.raises(SequenceFailed, match=r"item 2 of 4 .* RuntimeError: no 2 today") as caught:
        await first.sequence("r", range(4), handler, id="s", retry=AT_ONCE)
    assert (caught.value.resource, caught.value.id, caught.value.index) == ("r", "s", 2)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert handler.handled == [0, 1, 2, 2, 2]
    assert await second.sequence_progress("r", "s") == SequenceProgress("r", "s", 2, 2, "RuntimeError: no 2 today")
    assert not await second.lock("r").locked()

    assert await second.sequence("r", range(4), handler, id="s", retry=AT_ONCE) == [0, 2, 4, 6]
    assert handler.handled == [0, 1, 2, 2, 2, 2, 2, 2, 3]
    assert await first.sequence_progress("r", "s") == SequenceProgress("r", "s", 4, 0, None)


@pytest.mark.parametrize("text", ["x" * 5000, "\udcff", ""], ids=["long", "no UTF-8", "empty"])
async def test_an_error_is_told_whatever_its_text(client: Redlease, text: str) -> None:
    """A long text, or one that is not UTF-8, is stored as far as it can be."""

    async def handler(item: int, hold: Hold) -> None:
        raise RuntimeError(text)

    with pytest.raises(SequenceFailed):
        await client.sequence("r", [1], handler, id="s", retry=ONCE)
    progress = await client.sequence_progress("r", "s")
    assert progress is not None
    assert progress.error is not None
    assert progress.error.startswith("RuntimeError: ")
    assert len(progress.error) <= 1000


@pytest.mark.parametrize(
    "result", [object(), math.nan, {1, 2}, "x" * 65_535, "\udcff"], ids=["object", "nan", "set", "long", "no UTF-8"]
)
async def test_a_result_that_cannot_be_stored_ends_the_call(client: Redlease, result: Any) -> None:
    """It is no JSON value or too long: the item is not done again for that, and those before it stay done."""
    handled = []

    async def handler(item: int, hold: Hold) -> Any:
        handled.append(item)
        return result if item else None

    with pytest.raises(SequenceFailed, match="item 1 of 2") as caught:
        await client.sequence("r", range(2), handler, id="s", retry=AT_ONCE)
    assert isinstance(caught.value.__cause__, ValueError)
    assert handled == [0, 1]
    progress = await client.sequence_progress("r", "s")
    assert progress is not None
    assert progress.handled == 1


@on_one_engine
async def test_pauses_grow_to_the_maximum(client: Redlease) -> None:
    """Each pause is the one before it times `backoff`, and there is one less than attempts, or no end of them."""
    assert list(Retry(attempts=6, initial=1, backoff=3, maximum=20).pauses()) == [1, 3, 9, 20, 20]
    assert list(Retry(attempts=1).pauses()) == []
    pauses = Retry(attempts=None, backoff=1000).pauses()
    assert [next(pauses) for _ in range(500)][-1] == 60


@on_one_engine
@pytest.mark.parametrize(
    "wrong",
    [{"attempts": 0}, {"attempts": 1.5}, {"initial": -1}, {"maximum": "1"}, {"backoff": 0.5}, {"backoff": math.nan}],
)
async def test_a_wrong_policy_is_refused(client: Redlease, wrong: dict[str, Any]) -> None:
    """Where it is made, by the name of what is wrong."""
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Retry(**wrong)


@on_one_engine
@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"items": [object()]}, "item 0 must be a JSON value"),
        ({"items": [1, math.inf]}, "item 1 must be a JSON value"),
        ({"items": range(10_001)}, "10,000 items"),
        ({"handler": None}, "handler"),
        ({"retry": 5}, "Retry"),
        ({"id": ""}, "id"),
        ({"id": "x" * 257}, "id"),
        ({"timeout": -1}, "timeout"),
        ({"lease": 0}, "lease"),
        ({"keep": 0}, "keep"),
        ({"resource": ""}, "resource name"),
    ],
)
async def test_misuse_is_refused_before_anything_is_done(
    client: Redlease, raw: redis.asyncio.Redis, prefix: str, wrong: dict[str, Any], match: str
) -> None:
    """It is a ValueError where the sequence is made, and nothing reaches the server."""
    right: dict[str, Any] = {"resource": "r", "items": [1], "handler": Handler()}
    with pytest.raises(ValueError, match=match):
        client.sequence(**(right | wrong))
    assert await keys_of(raw, f"{prefix}:*") == []


# Others


async def test_callers_side_by_side_share_one_run(make_client: MakeClient, engine: str) -> None:
    """Of several callers in several clients each gets all results, and each item is handled once."""
    clients = [await make_client() for _ in range(3)]
    handler = Handler()
    calls = [client.sequence("r", range(10), handler, id="s") for client in clients for _ in range(2)]
    for results in await asyncio.gather(*calls):
        assert results == [2 * number for number in range(10)]
    assert handler.handled == list(range(10))


async def test_the_lock_is_the_resource_s(client: Redlease) -> None:
    """Who holds the lock keeps a sequence waiting, for `timeout` at most; its holder is shown with the id."""
    lock, handler = client.lock("r"), Handler(stops_at=1)
    async with lock:
        with pytest.raises(AcquireTimeout):
            await client.sequence("r", range(3), handler, id="s", timeout=0)
        assert handler.handled == []
        task = asyncio.ensure_future(client.sequence("r", range(3), handler, id="s"))
        await until_waiting(lock, 1)
    await eventually(handler.stopped)
    (holder,) = (await lock.inspect()).holders
    assert holder.metadata == {"sequence": "s"}
    await cancel(task)


async def test_a_cancelled_call_keeps_what_is_done(client: Redlease, raw: redis.asyncio.Redis, prefix: str) -> None:
    """The handler is cancelled, the lock is free, and the next call resumes at the item that was cancelled."""
    handler = Handler(stops_at=3)
    task = asyncio.ensure_future(client.sequence("r", range(5), handler, id="s"))
    await eventually(handler.stopped)
    await cancel(task)
    assert task.cancelled()
    await eventually(lambda: left_over_is_none(raw, prefix))
    other = Handler()
    assert await client.sequence("r", range(5), other, id="s") == [0, 2, 4, 6, 8]
    assert other.handled == [3, 4]


async def test_cancelling_at_any_await_loses_and_repeats_nothing(client: Redlease) -> None:
    """However many turns of the event loop a call gets, what it told as done stays so, and the lock is free again."""
    finished = Handler()
    known = 0
    for turns in range(40):
        handler = Handler()
        seen: list[int] = []

        async def iterate(handler: Handler = handler, seen: list[int] = seen) -> None:
            async with contextlib.aclosing(aiter(client.sequence("r", range(20), handler, id="s"))) as results:
                async for result in results:
                    seen.append(result)  # noqa: PERF401  the loop is cancelled

        task = asyncio.create_task(iterate())
        for _ in range(3 * turns):
            await asyncio.sleep(0)
        await cancel(task)
        assert not handler.handled or handler.handled[0] >= known
        known = max(known, len(seen))
        assert seen == [2 * number for number in range(len(seen))]
    assert await client.sequence("r", range(20), finished, id="s", timeout=5) == [2 * number for number in range(20)]
    assert not set(finished.handled) & set(range(known))


# A lost lock


async def test_a_lost_lock_cancels_the_handler(client: Redlease) -> None:
    """The call ends with LeaseLost, the item is not recorded, and the next call handles it under a newer fence."""
    handler, lock = Handler(stops_at=2), client.lock("r")
    task = asyncio.ensure_future(client.sequence("r", range(4), handler, id="s"))
    await eventually(handler.stopped)
    await lock.release_all()
    with pytest.raises(LeaseLost):
        await task
    later = Handler()
    assert await client.sequence("r", range(4), later, id="s") == [0, 2, 4, 6]
    assert (handler.handled, later.handled) == ([0, 1, 2], [2, 3])
    assert later.fences[0] > handler.fences[0]


async def test_a_lost_lock_does_not_cancel_the_task_that_iterates(client: Redlease) -> None:
    """The loop gets LeaseLost from the iterator, not in the middle of its own work."""
    handler, lock = Handler(stops_at=1), client.lock("r")
    results = aiter(client.sequence("r", range(4), handler, id="s"))
    assert await anext(results) == 0
    await eventually(handler.stopped)
    await lock.release_all()
    with pytest.raises(LeaseLost):
        await anext(results)


@pytest.mark.parametrize("raises", [True, False])
async def test_a_handler_that_survives_the_loss_changes_nothing(client: Redlease, raises: bool) -> None:
    """Whether it returns a result or raises an error of its own then, nothing is recorded and nothing is retried."""
    handled = []

    async def handler(item: int, hold: Hold) -> str:
        handled.append(item)
        with contextlib.suppress(asyncio.CancelledError):
            await client.lock("r").release(hold.ticket)
            await asyncio.sleep(60)
        if raises:
            raise RuntimeError("cancelled")
        return "late"

    with pytest.raises(LeaseLost):
        await client.sequence("r", [7], handler, id="s", retry=AT_ONCE)
    assert handled == [7]
    assert await client.sequence_progress("r", "s") == SequenceProgress("r", "s", 0, 1, None)


@pytest.fixture
def checkpoints(client: Redlease) -> Checkpoints:
    """The checkpoints of one sequence, without its run."""
    return Checkpoints(client._operations, client._operations.resource("r"), "s")


PLAN = Plan("items", 5, 60_000)


async def test_a_stale_holder_writes_no_checkpoint(client: Redlease, checkpoints: Checkpoints) -> None:
    """Released or adopted by another: the server compares ticket and fence, and refuses each kind of checkpoint."""
    lock = client.lock("r")
    stale = []
    async with lock.hold(on_lost="signal") as released:
        assert await checkpoints.begin(released, PLAN) == 0
        await lock.release(released.ticket)
        stale.append(released)
    former = await lock.hold(on_lost="signal")
    current = await lock.adopt(former.detach())
    stale.append(former)
    for hold in stale:
        for call in (
            checkpoints.begin(hold, PLAN),
            checkpoints.record(hold, PLAN, 0, "1"),
            checkpoints.record_error(hold, PLAN, 0, "why"),
        ):
            with pytest.raises(LeaseLost):
                await call
    assert await checkpoints.progress() == SequenceProgress("r", "s", 0, 5, None)
    await checkpoints.record(current, PLAN, 0, "1")
    assert await checkpoints.progress() == SequenceProgress("r", "s", 1, 4, None)
    await current.release()


async def test_a_repeated_checkpoint_is_written_once(client: Redlease, checkpoints: Checkpoints) -> None:
    """A copy of a call, even a late one, finds its result written and changes neither it nor the count."""
    async with client.lock("r") as hold:
        await checkpoints.begin(hold, PLAN)
        await checkpoints.record_error(hold, PLAN, 0, "why")
        for _ in range(2):
            await checkpoints.record(hold, PLAN, 0, "1")
        await checkpoints.record(hold, PLAN, 1, "2")
        await checkpoints.record(hold, PLAN, 0, "9")
        await checkpoints.record_error(hold, PLAN, 0, "late")
        assert await checkpoints.begin(hold, PLAN) == 2
        assert await checkpoints.results(0) == ["1", "2"]
        assert await checkpoints.progress() == SequenceProgress("r", "s", 2, 3, None)


async def test_a_checkpoint_is_of_the_next_item(client: Redlease, checkpoints: Checkpoints) -> None:
    """No item is passed over, and none of another list is recorded."""
    async with client.lock("r") as hold:
        await checkpoints.begin(hold, PLAN)
        with pytest.raises(RedleaseError, match="gone"):
            await checkpoints.record(hold, PLAN, 1, "2")
        with pytest.raises(RedleaseError, match="gone"):
            await checkpoints.record(hold, PLAN._replace(items="others"), 0, "1")
        assert await checkpoints.progress() == SequenceProgress("r", "s", 0, 5, None)


# How long it is kept


async def test_a_forgotten_sequence_begins_anew(client: Redlease, raw: redis.asyncio.Redis, prefix: str) -> None:
    """Forgetting leaves no key of it; one that was never there is no error."""
    handler = Handler()
    await client.sequence("r", [1], handler, id="s")
    assert await client.forget_sequence("r", "s")
    assert not await client.forget_sequence("r", "s")
    assert await client.sequence_progress("r", "s") is None
    assert await keys_of(raw, f"{prefix}:*:sequence:*") == []
    await client.sequence("r", [1, 2], handler, id="s")
    assert handler.handled == [1, 1, 2]


async def test_a_sequence_forgotten_while_it_runs_ends(client: Redlease) -> None:
    """Its next checkpoint fails, so that no half of a sequence is left; the next call begins with the first item."""

    async def handler(item: int, hold: Hold) -> int:
        if item == 1:
            await client.forget_sequence("r", "s")
        return item

    with pytest.raises(RedleaseError, match="gone"):
        await client.sequence("r", range(3), handler, id="s")
    assert await client.sequence_progress("r", "s") is None


async def test_results_are_kept_from_the_last_one_on(
    client: Redlease, checkpoints: Checkpoints, raw: redis.asyncio.Redis, prefix: str
) -> None:
    """Each checkpoint keeps them for `keep` from then on, never shorter than before; reading them does not."""
    key = f"{prefix}:{{r}}:sequence:s"
    async with client.lock("r") as hold:
        await checkpoints.begin(hold, PLAN)
        assert 59_000 < await raw.pttl(key) <= 60_000
        await checkpoints.record(hold, PLAN._replace(keep_ms=90_000), 0, "1")
        assert 89_000 < (longest := await raw.pttl(key)) <= 90_000
        await checkpoints.record(hold, PLAN, 1, "2")
        await checkpoints.record_error(hold, PLAN, 2, "why")
        await checkpoints.begin(hold, PLAN)
        await checkpoints.results(0)
        assert longest - 5_000 < await raw.pttl(key) <= longest
        await checkpoints.record(hold, PLAN._replace(keep_ms=120_000), 2, "3")
        assert 119_000 < await raw.pttl(key) <= 120_000


async def test_a_finished_sequence_expires_however_often_it_is_called(
    client: Redlease, raw: redis.asyncio.Redis, prefix: str
) -> None:
    """A later call of a finished sequence returns its results and does not keep them longer."""
    key, handler = f"{prefix}:{{r}}:sequence:s", Handler()
    await client.sequence("r", [1], handler, id="s", keep=50)
    await client.sequence("r", [1], handler, id="s", keep=100)
    assert 0 < await raw.pttl(key) <= 50_000
    await client.sequence("r", [1], handler, id="t")
    assert await raw.pttl(f"{prefix}:{{r}}:sequence:t") > 80_000_000
