"""What the blocking face has of its own: threads, losses, iterators, and the life of its background thread."""

from __future__ import annotations

import contextlib
import gc
import logging
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import redis
import redis.asyncio
from sqlalchemy import create_engine, text

from redlease import AcquireTimeout, LeaseLost, RedleaseError, SequenceFailed, StaleFence, Withdrawn
from redlease.guards.sql import FenceTable
from redlease.sync import Hold, Redlease, Retry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class BodyError(Exception):
    """What a body raises."""


def in_thread(function: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Run a function in a thread of its own; the list gets what it returns or raises."""
    said: list[Any] = []

    def work() -> None:
        try:
            said.append(function())
        except Exception as error:  # noqa: BLE001  the test looks at it
            said.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread, said


def until_waiting(client: Redlease, name: str, count: int = 1) -> None:
    """Return when so many wait."""
    with client.lock(name).watch() as snapshots:
        next(snapshot for snapshot in snapshots if len(snapshot.waiters) == count)


def test_the_thread_ends_with_the_last_client(url: str, prefix: str) -> None:
    """Two clients share one thread, which the last one takes with it; a later client has another."""
    before = threading.active_count()
    for _ in range(2):
        with Redlease.from_url(url, prefix=prefix) as one:
            with Redlease.from_url(url, prefix=prefix) as two, one.lock("a"), two.lock("b"):
                assert threading.active_count() == before + 1
            assert one.lock("a").try_acquire(ticket="t") is not None
            assert one.lock("a").release("t")
            two.close()
        assert threading.active_count() == before


def test_closing_ends_the_waits_of_all_threads(client: Redlease, url: str, prefix: str) -> None:
    """A thread that waits for a permit gets Withdrawn, one that watches ends, and one that waits for a loss is told."""
    with client.lock("r"), Redlease.from_url(url, prefix=prefix) as closing:
        held = closing.lock("held").hold().acquire()
        waiting, waited = in_thread(lambda: closing.lock("r").acquire())
        watching, watched = in_thread(lambda: [len(each.holders) for each in closing.lock("quiet").watch()])
        losing, lost = in_thread(held.wait_lost)
        until_waiting(client, "r")
        until_watched(client, "quiet")
        closing.close()
        for thread in (waiting, watching, losing):
            thread.join(5)
    assert isinstance(waited[0], Withdrawn)
    assert isinstance(watched[0], RedleaseError)
    assert lost == [True]
    assert held.lost
    with pytest.raises(RedleaseError, match="closed"):
        closing.lock("r")


def until_watched(client: Redlease, name: str) -> None:
    """Return when somebody else watches too; the server counts those who listen."""
    twin = client._client.twin
    channel = client.lock(name)._twin._resource.watch_channel
    pool: Any = twin._connection
    with contextlib.closing(redis.Redis(**address_of(pool.pool))) as raw:
        while not dict(raw.pubsub_numsub(channel)).get(channel.encode()):
            pass


def address_of(pool: redis.asyncio.ConnectionPool) -> dict[str, Any]:
    """Return where a pool connects to."""
    return {name: pool.connection_kwargs[name] for name in ("host", "port")}


def test_a_watch_is_closed_by_another_thread(client: Redlease) -> None:
    """It ends the loop of the thread that waits for the next change."""
    watch = client.lock("r").watch()
    first = next(watch)
    thread, seen = in_thread(lambda: list(watch))
    watch.close()
    thread.join(5)
    assert (first.holders, seen) == ((), [[]])


@pytest.mark.parametrize("on_lost", ["exit", "raise"])
def test_a_loss_comes_at_the_exit(client: Redlease, on_lost: Any) -> None:
    """The body goes on, and leaving the block raises LeaseLost; an error of the body comes out with a note."""
    lock = client.lock("r")
    with pytest.raises(LeaseLost) as caught, lock.hold(ticket="t", on_lost=on_lost) as hold:
        assert lock.release("t")
        assert hold.wait_lost(5)
    assert (caught.value.resource, caught.value.ticket) == ("r", "t")
    with pytest.raises(BodyError) as noted, lock.hold(ticket="t", on_lost=on_lost) as hold:
        assert lock.release("t")
        assert hold.wait_lost(5)
        raise BodyError
    assert any("no longer held" in note for note in noted.value.__notes__)


def test_a_loss_is_only_signalled(client: Redlease) -> None:
    """With on_lost="signal" the block ends without an error, and `check` tells."""
    lock = client.lock("r")
    with lock.hold(ticket="t", on_lost="signal") as hold:
        assert not hold.wait_lost(0.01)
        assert lock.release("t")
        assert hold.wait_lost()
        assert not lock.locked()
        with pytest.raises(LeaseLost):
            hold.check()


def test_a_loss_is_raised_at_the_next_call_of_its_thread(client: Redlease) -> None:
    """With on_lost="raise" the thread that entered gets it once, other threads and calls that release do not."""
    lock, other = client.lock("r"), client.lock("other")
    permit = other.acquire()
    with pytest.raises(LeaseLost, match="'r'"), lock.hold(ticket="t", on_lost="raise") as hold:
        thread, said = in_thread(lambda: lock.release("t"))
        thread.join(5)
        assert said == [True]
        assert hold.wait_lost(5)
        thread, said = in_thread(other.locked)
        thread.join(5)
        assert said == [True]
        assert other.release(permit)
        with pytest.raises(LeaseLost, match="'r'"):
            other.acquire()
        assert other.release(other.acquire())
    assert not other.locked()


def test_a_block_belongs_to_its_thread(client: Redlease) -> None:
    """`with pool:` of one object nests in each of many threads, and a thread cannot leave what it has not entered."""
    pool = client.semaphore("r", 4)

    def work() -> list[bool]:
        with pool as outer, pool as inner:
            return [outer.fence < inner.fence, outer.lost, inner.lost]

    threads = [in_thread(work) for _ in range(2)]
    for thread, said in threads:
        thread.join(5)
        assert said == [[True, False, False]]
    with pool:
        thread, said = in_thread(lambda: pool.__exit__(None, None, None))
        thread.join(5)
        assert isinstance(said[0], RuntimeError)
        assert pool.inspect().holders


def test_a_request_that_nobody_enters_asks_for_nothing(client: Redlease) -> None:
    """Calling hold() does nothing yet, and a warning says so."""
    with pytest.warns(RuntimeWarning, match="neither acquired nor entered"):
        client.lock("r").hold()
    assert not client.lock("r").locked()


def test_a_call_in_the_background_thread_is_refused(
    client: Redlease, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handler of logging that calls redlease gets an error there, and nothing hangs."""
    lock = client.lock("r")
    refused: list[Exception] = []

    def emit(_: logging.LogRecord) -> None:
        for call in (lock.locked, client.close):
            try:
                call()
            except RedleaseError as error:
                refused.append(error)

    monkeypatch.setattr(caplog.handler, "emit", emit)
    with contextlib.suppress(LeaseLost), lock.hold(ticket="t") as hold:
        lock.release("t")
        hold.wait_lost(5)
    assert len(refused) == 2
    assert all("own thread" in str(error) for error in refused)
    assert not lock.locked()


def test_guarded_functions(client: Redlease) -> None:
    """A call of a plain function runs under its lock, with a name per key, and gets its hold where it asks for it."""
    lock = client.lock("customer")

    @lock.holding(name_for=lambda order: order.partition("/")[0], timeout=0)
    def ship(order: str, hold: Hold | None = None) -> str:
        assert hold is not None
        assert client.lock(hold.resource).locked()
        return f"{order} under {hold.resource}"

    assert ship("ann/1") == "ann/1 under customer:ann"
    assert not client.lock("customer:ann").locked()

    async def waits() -> None: ...

    for function in (waits, lambda: (yield)):
        with pytest.raises(ValueError, match="done when they return"):
            lock.holding()(function)
    later = waits()
    with contextlib.closing(later), pytest.raises(ValueError, match="without the permit"):
        assert lock.holding()(lambda: later)() is None
    assert not lock.locked()


def test_a_sequence_in_the_calling_thread(client: Redlease) -> None:
    """The handler runs in the thread that asks for results; what is done stays done, and a failure says where."""
    threads = set()

    def handle(item: int, hold: Hold) -> int:
        threads.add(threading.get_ident())
        hold.check()
        if item == 3 and not ready:
            raise BodyError
        return item * 2

    ready: list[bool] = []
    once = Retry(attempts=1)
    with pytest.raises(SequenceFailed) as failed:
        client.sequence("ledger", [1, 2, 3], handle, id="s", retry=once).results()
    assert failed.value.index == 2
    progress = client.sequence_progress("ledger", "s")
    assert progress is not None
    assert (progress.handled, progress.queued) == (2, 1)
    ready.append(True)
    assert list(client.sequence("ledger", [1, 2, 3], handle, id="s", retry=once)) == [2, 4, 6]
    assert threads == {threading.get_ident()}
    assert client.forget_sequence("ledger", "s")


def test_a_sequence_that_loses_its_lock_ends(client: Redlease) -> None:
    """The item under way is not recorded, and the next is not begun."""
    handled = []

    def handle(item: int, hold: Hold) -> None:
        handled.append(item)
        client.lock("ledger").release(hold.ticket)
        hold.wait_lost(5)

    with pytest.raises(LeaseLost):
        client.sequence("ledger", [1, 2], handle, id="s").results()
    assert handled == [1]
    progress = client.sequence_progress("ledger", "s")
    assert progress is None or progress.handled == 0


def test_an_error_goes_with_what_it_refers_to(client: Redlease) -> None:
    """Neither the error of a call nor that of an item keeps anything until the next garbage collection."""
    left: list[weakref.ref[Any]] = []

    def fail(_: int, hold: Hold) -> None:
        left.append(weakref.ref(hold))
        raise BodyError

    gc.collect()
    gc.disable()
    try:
        with client.lock("a"), pytest.raises(AcquireTimeout) as timeout:
            client.lock("a").acquire(timeout=0)
        left.append(weakref.ref(timeout.value))
        with pytest.raises(SequenceFailed) as failed:
            client.sequence("b", [1], fail, retry=Retry(attempts=2, initial=0)).results()
        del timeout, failed
        assert [kept() for kept in left] == [None] * 3
    finally:
        gc.enable()


def test_a_blocking_client_of_redis_py(url: str, prefix: str) -> None:
    """A client of either side of redis-py will do; what is none is refused."""
    for given in (redis.Redis.from_url(url), redis.asyncio.Redis.from_url(url)):
        with Redlease(given, prefix=prefix) as client, client.lock("r").hold() as hold:
            assert hold.fence
    with pytest.raises(ValueError, match="from_url"):
        Redlease(url)  # type: ignore[arg-type]


def test_a_fence_in_a_database(client: Redlease) -> None:
    """`redlease.guards.sql` guards what a blocking SQLAlchemy writes."""
    engine, table = create_engine("sqlite://"), FenceTable("fences")
    with engine.begin() as connection:
        connection.execute(text(table.ddl))
    with client.lock("ledger").hold() as hold:
        fence = hold.fence
    for each, refused in ((fence + 1, False), (fence, True)):
        with pytest.raises(StaleFence) if refused else contextlib.nullcontext(), engine.begin() as connection:
            table.check(connection, "ledger", each)
    engine.dispose()


def test_what_is_collected_in_the_background_thread_is_released(client: Redlease) -> None:
    """Generators that nobody ends any more, which hold, are collected in any thread: what they held is free."""

    def holding(name: str) -> Iterator[None]:
        with client.lock(name).hold():
            yield

    subscribed_keys: list[Any] = [client.leader("a").terms(), holding("b")]
    assert [next(generator) for generator in subscribed_keys]
    client._client.background.post(subscribed_keys.clear)
    for name in "ab":
        with client.lock(name).hold(timeout=10):
            pass


def test_what_an_interruption_left_is_collected(client: Redlease) -> None:
    """A block with `on_lost="raise"` that never comes to its end is released as any other, when nobody has it."""
    lock = client.lock("r")
    hold = lock.hold(on_lost="raise").__enter__()
    assert hold.fence
    del hold
    gc.collect()
    with lock.hold(timeout=10):
        pass


def test_all_threads_may_close_at_once(url: str, prefix: str) -> None:
    """Whoever comes second finds it closed, and nobody gets an error."""
    for _ in range(20):
        client = Redlease.from_url(url, prefix=prefix)
        client.lock("r").locked()
        closing = [in_thread(client.close) for _ in range(4)]
        for thread, said in closing:
            thread.join(10)
            assert said == [None]


def test_an_error_that_ends_the_background_thread_ends_no_program(
    client: Redlease, caplog: pytest.LogCaptureFixture
) -> None:
    """Who waits gets an error that names it, and the next call starts another thread: as where a handler exits."""
    lock = client.lock("r")
    permit = lock.acquire()
    waiting, said = in_thread(lambda: lock.hold().acquire())
    until_waiting(client, "r")
    client._client.background.post(sys.exit)
    waiting.join(10)
    assert "SystemExit" in str(said[0])
    assert "was ended" in caplog.text
    assert lock.release(permit)
    with client.lock("other").hold(timeout=5) as hold:
        assert not hold.lost
