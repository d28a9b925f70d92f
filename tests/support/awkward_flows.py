"""Workflows that use resources in awkward ways: in tasks that are done anew, twice under one ticket, or at the end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from datetime import timedelta
from typing import Any

from backend_flows import On
from temporalio import activity, workflow
from temporalio.exceptions import ApplicationError

from redlease_temporal import LeaseLost, Permit, Unavailable
from redlease_temporal._workflow_side.run import current

PAUSE = timedelta(seconds=10)


class Pausing:
    """How often the activity that takes its time has begun in this process."""

    begun = 0


@activity.defn
async def take_time(seconds: float) -> None:
    """Let time go by in the midst of a workflow task."""
    Pausing.begun += 1
    await asyncio.sleep(seconds)


@workflow.defn
class Anew:
    """Ends with a task that prolongs a permit, gives it back, and takes its time before it is recorded."""

    @workflow.signal
    def nudge(self) -> None:
        """Arrive in the midst of that task, which is then done anew with all that was done locally in it."""

    @workflow.run
    async def run(self, on: On, what: str, permit: Permit | None) -> str:
        """Return what became of the permit."""
        pool = on.pool()
        if permit is None:
            permit = await pool.acquire()
            await workflow.sleep(0.05)  # its grant is recorded
        try:
            if what == "local activity":
                async with await pool.adopt(permit) as hold:
                    await workflow.sleep(0.05)
                    await workflow.execute_local_activity(take_time, 0.0, start_to_close_timeout=PAUSE)
                released = not hold.lost
            elif what == "renew":
                released = await pool.release(await pool.renew(permit, lease=60))
            else:
                hold = await pool.adopt(permit)
                if what == "adopt and renew":
                    await pool.renew(hold.permit, lease=60)
                released = await hold.release()
        except LeaseLost as error:
            return str(error)
        await workflow.execute_local_activity(take_time, 0.5, start_to_close_timeout=PAUSE)
        return f"was held: {released}"


@workflow.defn
class Twice:
    """Holds two units of a resource under one ticket, and gives them back step by step."""

    def __init__(self) -> None:
        self._steps = 0

    @workflow.signal
    def step(self) -> None:
        """Go on."""
        self._steps += 1

    @workflow.run
    async def run(self, on: On) -> list[bool]:
        """Return for each whether it was lost, and was held when it was released."""
        pool = on.pool()
        first = await pool.hold(ticket="t", on_lost="signal")
        second = await pool.hold(ticket="t", on_lost="signal")
        await workflow.wait_condition(lambda: self._steps >= 1)
        seen = [first.lost, await first.release()]
        await workflow.wait_condition(lambda: self._steps >= 2)
        return [*seen, second.lost, await second.release()]


@workflow.defn
class Leaving:
    """Ends as soon as one of two requests that are cancelled together has been given up."""

    @workflow.run
    async def run(self, on: On) -> str:
        """Return how they ended."""
        pool = on.pool()
        try:
            async with asyncio.timeout(0.1):
                await asyncio.gather(pool.acquire(), pool.acquire())
        except TimeoutError:
            return "timed out"
        return "granted"


@workflow.defn
class Quitting:
    """Gives up requests that wait, and ends in that moment, by itself or when it is cancelled."""

    def __init__(self) -> None:
        self._go = False

    @workflow.signal
    def go(self) -> None:
        """Give them up."""
        self._go = True

    @workflow.run
    async def run(self, on: On, how: str, turns: int) -> str:
        """Return after so many turns of the event loop, or end in another way."""
        if how == "as the next run":
            return "left"
        pool = on.pool()
        requests = [asyncio.create_task(pool.acquire()) for _ in range(2)]
        try:
            await workflow.wait_condition(lambda: self._go)
        except asyncio.CancelledError:
            assert how == "cancelled"
        for request in requests:
            request.cancel()
        for _ in range(turns):
            await asyncio.sleep(0)
        if how == "fail":
            raise ApplicationError("left", non_retryable=True)
        if how == "continue as new":
            workflow.continue_as_new(args=[on, "as the next run", 0])
        return "left"


@workflow.defn
class Fleeting:
    """Thinks better of what it has just begun, and ends."""

    @workflow.run
    async def run(self, on: On, what: str, before: int, after: int) -> str:
        """Let it go so many turns of the event loop, and return so many after it has been cancelled."""
        pool = on.pool()
        calls: dict[str, Callable[[], Coroutine[Any, Any, Any]]] = {
            "acquire": pool.acquire,
            "try_acquire": pool.try_acquire,
            "inspect": pool.inspect,
            "release": lambda: pool.release("nobody's"),
        }
        call = asyncio.create_task(calls[what]())
        for _ in range(before):
            await asyncio.sleep(0)
        call.cancel()
        for _ in range(after):
            await asyncio.sleep(0)
        return "left"


@workflow.defn
class Unsettled:
    """Has come to its end, but for something that never does."""

    @workflow.run
    async def run(self) -> None:
        """Return, as far as this code goes."""
        current().track(asyncio.get_running_loop().create_future())


@workflow.defn
class Overtaken:
    """Cancels a timer that has fired while its workflow task was under way."""

    @workflow.run
    async def run(self) -> str:
        """Return when that is past."""
        second = asyncio.create_task(asyncio.sleep(2.1))
        await asyncio.sleep(2)
        await workflow.execute_local_activity(take_time, 0.3, start_to_close_timeout=PAUSE)
        second.cancel()
        await asyncio.sleep(1)
        return "went on"


@workflow.defn
class Told:
    """Waits for a signal, and for nothing else."""

    def __init__(self) -> None:
        self._is_told = False

    @workflow.run
    async def run(self) -> str:
        """Return when it comes."""
        await workflow.wait_condition(lambda: self._is_told)
        return "went on"

    @workflow.signal
    def go_on(self) -> None:
        """End the wait."""
        self._is_told = True


@workflow.defn
class Unanswered:
    """Looks at a resource, and goes on without an answer."""

    @workflow.run
    async def run(self, on: On) -> str:
        """Return how it went."""
        try:
            await on.pool().inspect()
        except Unavailable as error:
            await workflow.sleep(0.05)  # a replay that came to another error would not get here
            return str(error)
        return "answered"
