"""Slots for services: the same resource that workflows use, held from asyncio code through a Temporal client.

Such a holder has no run to look at: signals renew its permit, and its lease frees the permit if its process dies. It
does not queue in a line; it waits until one of the slots ends, and then competes with the head of that line.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from temporalio.client import Client
from temporalio.common import WorkflowIDConflictPolicy
from temporalio.exceptions import WorkflowAlreadyStartedError
from temporalio.service import RPCError, RPCStatusCode

from redlease import AcquireTimeout, LeaseLost, Unavailable
from redlease._core import clock, limits
from redlease._core.block_task import BlockTask
from redlease._core.limits import Duration
from redlease.models import Permit, Snapshot

from ._backends.slots.activities import SLOTS, SlotActivities
from ._backends.slots.completion import end_of
from ._backends.slots.workflow import Slot
from ._common.resource_workflows import UNSURE, permit_gone
from ._payloads import slots
from ._payloads.coordinator import Release, Renewal, Requester
from ._payloads.locks import CheckCall, InspectCall, ResourceTerms
from .worker import RedleasePlugin

logger = logging.getLogger("redlease.temporal")

RENEWALS_PER_LEASE = 3
RETRY_S = 0.5  # the pause after a failed renewal
WATCHED_MAX = 8  # slots whose end one waiter awaits
RETRY_BUSY_S = 3.0  # how often a waiter tries all slots again if there are more
# After an error with one of these, the server may or may not have done what it was asked.
UNREACHABLE = (UNSURE | {RPCStatusCode.RESOURCE_EXHAUSTED}) - {RPCStatusCode.DATA_LOSS}


def semaphore(
    client: Client, name: str, capacity: int, *, lease: Duration = 30.0, backend: str = "slots"
) -> SlotSemaphore:
    """The semaphore of that name, as workflows of the client's namespace use it with `backend="slots"`.

    Args:
        client: A client that was connected with `RedleasePlugin`; a worker with it must run somewhere.
        name: Of the resource.
        capacity: Units that may be held at once.
        lease: How long a permit stays valid without renewal, in seconds or as a timedelta; each renewal costs about ten
            events in its slot.
        backend: "slots": no other backend has holders that are neither workflows nor clients of Redis.

    Raises:
        ValueError: A parameter is wrong, or the client has no plugin.

    Example:
        >>> pool = semaphore(client, "gpu", capacity=3)  # doctest: +SKIP
        >>> async with pool.hold(timeout=10) as hold:  # doctest: +SKIP
        ...     await work(fence=hold.fence)
    """
    if backend != "slots":
        raise ValueError(
            f"backend {backend!r} has no holders outside workflows: take 'slots', or redlease itself with Redis"
        )
    plugins = [plugin for plugin in client.config().get("plugins", ()) if isinstance(plugin, RedleasePlugin)]
    if not plugins:
        raise ValueError("connect the client with plugins=[RedleasePlugin(...)], which knows where slots run")
    terms = ResourceTerms.checked(name, capacity, lease)
    if capacity > slots.CAPACITY_MAX:
        raise ValueError(f"capacity is at most {slots.CAPACITY_MAX} on slots, of which each is a workflow")
    return SlotSemaphore(client, plugins[0].internal_queue(client), terms)


def lock(client: Client, name: str, *, lease: Duration = 30.0, backend: str = "slots") -> SlotSemaphore:
    """The lock of that name: a semaphore of capacity 1. Takes and raises what `semaphore` does."""
    return semaphore(client, name, 1, lease=lease, backend=backend)


class SlotSemaphore:
    """At most `capacity` units of a resource are held at once. Made by `semaphore`."""

    def __init__(self, client: Client, task_queue: str, terms: ResourceTerms) -> None:
        self._client = client
        self._task_queue = task_queue
        self._terms = terms
        self._slots = SlotActivities(client)
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def name(self) -> str:
        """The name of the resource."""
        return self._terms.resource

    @contextlib.asynccontextmanager
    async def hold(
        self, *, timeout: Duration | None = None, owner: str | None = None, metadata: dict[str, str] | None = None
    ) -> AsyncIterator[SlotHold]:
        """Acquires a permit, renews it in the background while the block runs, and releases it at the end.

        Args:
            timeout: Seconds or a timedelta to wait for the grant, outages included; None waits without limit, 0 not at
                all.
            owner: Who is shown as holder.
            metadata: Shown by `inspect()`.

        Raises:
            AcquireTimeout: Others held it for all of `timeout`.
            Unavailable: When `timeout` was over, the Temporal server or the slots' worker had not answered.
            LeaseLost: The permit was lost while the block ran; the task in it was cancelled.
        """
        permit, sent_ms = await self._acquire(timeout, None, owner, metadata)
        hold = SlotHold(self, permit, sent_ms + permit.lease_ms)
        async with hold.renewed():
            yield hold

    async def acquire(
        self,
        *,
        timeout: Duration | None = None,
        ticket: str | None = None,
        owner: str | None = None,
        metadata: dict[str, str] | None = None,
    ) -> Permit:
        """Acquires a permit as data: nobody renews it, and the caller must release it.

        Raises:
            AcquireTimeout: Others held it for all of `timeout`.
            Unavailable: When `timeout` was over, the Temporal server or the slots' worker had not answered.
        """
        return (await self._acquire(timeout, ticket, owner, metadata))[0]

    async def renew(self, permit: Permit, *, lease: Duration | None = None) -> Permit:
        """Renews a permit for a full lease.

        Raises:
            LeaseLost: It is no longer held with its fence.
            Unavailable: The Temporal server, or the slot's worker, did not answer in time.
        """
        limits.checked_permit(permit, self.name)
        lease_ms = permit.lease_ms if lease is None else limits.milliseconds("lease", lease, limits.LEASE_MS_MIN)
        renewal = Renewal(permit.ticket, permit.fence, lease_ms)
        return await self._slots.renew(slots.SlotCall(self._terms, slots.slot_of(permit), renewal=renewal))

    async def release(self, permit: Permit) -> bool:
        """Releases a permit; returns whether it was still held. May be repeated."""
        limits.checked_permit(permit, self.name)
        release = Release(permit.ticket, permit.fence, call=secrets.token_hex(8))
        return await self._slots.release(slots.SlotCall(self._terms, slots.slot_of(permit), release=release, wait=True))

    async def is_held(self, permit: Permit) -> bool:
        """Whether the permit is held now, with its fence."""
        limits.checked_permit(permit, self.name)
        return await self._slots.check(CheckCall(self._terms, permit.ticket, permit.fence))

    async def inspect(self, *, max_items: int = 100) -> Snapshot:
        """The resource, with at most `max_items` holders and as many waiters."""
        return await self._slots.inspect(InspectCall(self._terms, limits.checked_count("max_items", max_items)))

    # Implementation

    async def _acquire(
        self, timeout: Duration | None, ticket: str | None, owner: str | None, metadata: dict[str, str] | None
    ) -> tuple[Permit, float]:
        """The permit, and the local time at which it was requested."""
        seconds = None if timeout is None else limits.milliseconds("timeout", timeout) / 1000
        if ticket is None:
            ticket = secrets.token_hex(16)
        limits.checked_text("ticket", ticket, limits.TICKET_BYTES_MAX)
        owner = "" if owner is None else limits.checked_text("owner", owner, limits.OWNER_BYTES_MAX)
        memo = slots.SlotMemo(self._terms, 0, ticket, 0, owner, limits.checked_metadata(metadata))
        # The error of the last slot that did not answer, empty once one did; at first, that none has answered yet.
        outages: list[Unavailable] = [SLOTS.unavailable(self.name, TimeoutError("not in time"))]
        try:
            async with asyncio.timeout(seconds or None):
                while True:
                    got = await self._try_all(memo, outages)
                    if isinstance(got, tuple) and clock.now_ms() < got[1] + got[0].lease_ms:
                        return got
                    if isinstance(got, tuple):
                        continue  # it expired while the event loop was blocked
                    if seconds == 0:
                        raise TimeoutError
                    await self._until_one_ends(got)
        except TimeoutError:
            if outages:
                raise outages[0] from None
            message = f"resource {self.name!r}: no permit within {seconds:g} s: others hold it; `inspect()` shows them"
            raise AcquireTimeout(message, resource=self.name, ticket=ticket) from None

    async def _try_all(
        self, memo: slots.SlotMemo, outages: list[Unavailable]
    ) -> tuple[Permit, float] | list[tuple[int, str]]:
        """The permit of a free slot and when it was requested; or the slots, each with the run that holds it."""
        busy: list[tuple[int, str]] = []
        for slot in random.sample(range(self._terms.capacity), self._terms.capacity):
            sent_ms = clock.now_ms()
            try:
                got = await self._take(memo, slot)
            except Unavailable as error:
                logger.warning("%s", error)
                outages[:] = [error]
                await asyncio.sleep(RETRY_S)
                continue
            outages.clear()
            if isinstance(got, Permit):
                return got, sent_ms
            busy.append((slot, got))
        return busy

    async def _take(self, memo: slots.SlotMemo, slot: int) -> Permit | str:
        """The permit of a slot, or the run that holds it."""
        memo = slots.SlotMemo(memo.terms, slot, memo.ticket, memo.floor, memo.owner, memo.metadata)
        slot_input = slots.SlotInput(memo, Requester("", "", "", memo.ticket), renewed=False)
        starting = asyncio.ensure_future(self._start(slot_input))
        try:
            run_id, is_mine = await asyncio.shield(starting)
            if not is_mine:
                return run_id
            return await self._slots.claim(slots.StartedSlot(self.name, slot, run_id, memo))
        except BaseException:
            self.spawn(self._undo(starting, slot_input))
            raise

    async def _start(self, slot_input: slots.SlotInput) -> tuple[str, bool]:
        """The run of a slot, and whether this call started it."""
        try:
            handle = await self._client.start_workflow(
                Slot.run,
                slot_input,
                id=slots.slot_id(self.name, slot_input.memo.slot),
                task_queue=self._task_queue,
                id_conflict_policy=WorkflowIDConflictPolicy.FAIL,
                run_timeout=slot_input.run_timeout(),
                memo={slots.MEMO: slot_input.memo},
                static_summary=f"held by {slot_input.memo.owner or 'a service'}",
            )
        except WorkflowAlreadyStartedError as error:
            return error.run_id or "", False
        except RPCError as error:
            if error.status not in UNREACHABLE:
                raise
            raise SLOTS.unavailable(self.name, error) from error
        return handle.first_execution_run_id or "", True

    async def _undo(self, starting: asyncio.Task[tuple[str, bool]], slot_input: slots.SlotInput) -> None:
        """Releases a slot that was being started when the caller gave up; if that fails, its lease expires."""
        with contextlib.suppress(Exception):
            _, is_mine = await starting
            if is_mine:
                release = Release(slot_input.memo.ticket, None, slot_input.requester.request)
                await self._slots.release(slots.SlotCall(self._terms, slot_input.memo.slot, release=release))

    async def _until_one_ends(self, busy: list[tuple[int, str]]) -> None:
        """Waits until one of these slots' runs has ended, by a long poll of the server."""
        if not busy:
            return  # the server was away
        watched = random.sample(busy, min(WATCHED_MAX, len(busy)))
        waits = [asyncio.ensure_future(self._end_of(slot, run_id)) for slot, run_id in watched]
        try:
            look_again_s = random.uniform(0.5, 1.0) * RETRY_BUSY_S if len(busy) > len(watched) else None
            await asyncio.wait(waits, timeout=look_again_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def _end_of(self, slot: int, run_id: str) -> None:
        with contextlib.suppress(RPCError):
            await end_of(self._client, self.name, slot, run_id, follow=True)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs a coroutine to its end, even if its caller is cancelled."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


class SlotHold:
    """A permit held here: renewed in the background; `lost` shows when it is lost."""

    def __init__(self, pool: SlotSemaphore, permit: Permit, deadline_ms: float) -> None:
        self.permit = permit
        self._pool = pool
        self._lost = self._ended = False  # as far as the event loop has noticed; `lost` goes by the clock
        self._deadline_ms = deadline_ms

    @property
    def fence(self) -> int:
        """The fencing token."""
        return self.permit.fence

    @property
    def lost(self) -> bool:
        """Whether it was held and no longer is; by the clock, true from the end of its lease."""
        return self._lost or (not self._ended and clock.now_ms() >= self._deadline_ms)

    def remaining(self) -> float:
        """Seconds until the lease ends unless it is renewed; 0.0 when it is lost or released."""
        return 0.0 if self._lost or self._ended else max(0.0, (self._deadline_ms - clock.now_ms()) / 1000)

    def check(self) -> None:
        """Raises `LeaseLost` if the permit is no longer held. No I/O, no await, and in any thread."""
        if self.remaining() == 0.0:
            raise self._loss()

    @contextlib.asynccontextmanager
    async def renewed(self) -> AsyncIterator[None]:
        """Renews the permit while the block runs, cancels the block's task on a loss, and releases it at the end."""
        block = BlockTask()
        block.enter(asyncio.current_task())
        renewing = asyncio.create_task(self._renew(block))
        try:
            yield
        except asyncio.CancelledError as error:
            if not block.leave():
                raise
            raise self._loss() from error
        except Exception as error:
            block.leave()
            if self.lost and not isinstance(error, LeaseLost):
                error.add_note(f"redlease: {self._loss()}")
            raise
        else:
            block.leave()
            if self.lost:
                raise self._loss()
        finally:
            self._lost, self._ended = self.lost, True
            renewing.cancel()
            await asyncio.shield(self._pool.spawn(self._end(renewing)))

    def _loss(self) -> LeaseLost:
        return permit_gone(self.permit.resource, self.permit.ticket, self.permit.fence)

    async def _end(self, renewing: asyncio.Task[None]) -> None:
        """Releases the permit; a cancelled task need not wait for that."""
        await asyncio.gather(renewing, return_exceptions=True)
        if not self._lost:
            with contextlib.suppress(Unavailable):  # it expires with its lease
                await self._pool.release(self.permit)

    async def _renew(self, block: BlockTask) -> None:
        """Renews the permit; retries failed renewals until the lease ends."""
        pause_s = self.permit.lease_ms / 1000 / RENEWALS_PER_LEASE
        while self.remaining() > 0:
            await asyncio.sleep(min(pause_s, self.remaining()))
            try:
                async with asyncio.timeout(self.remaining()):
                    sent_ms = clock.now_ms()
                    permit = await self._pool.renew(self.permit)
                    if self.remaining() == 0.0:
                        break  # `lost` was true already, and must stay so
                    self.permit = permit
                    self._deadline_ms = sent_ms + self.permit.lease_ms
                    pause_s = self.permit.lease_ms / 1000 / RENEWALS_PER_LEASE
            except LeaseLost:
                break
            except Exception as error:  # noqa: BLE001  whatever it is, the lease runs on and ends
                logger.warning("resource %r: not renewed yet: %r", self.permit.resource, error)
                pause_s = min(pause_s, RETRY_S)
        self._lost = True
        block.cancel("the lease is lost")
