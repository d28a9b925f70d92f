"""The relay: what a process with a worker does for the locks of workflow runs, its own and those of dead processes.

It queues their requests, completes the activities that wait, renews what they hold, watches the runs, and shares all
of that with the relays of other processes by leases in Redis. There is one relay for each client that workers use.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from temporalio import activity
from temporalio.client import Client

from redlease import Redlease, RedleaseError, Withdrawn, clock, limits, wire
from redlease.hold import lease_lost
from redlease.keeper import Leaving, Released
from redlease.models import Permit, Snapshot
from redlease.semaphore import GONE, Semaphore
from redlease.waiting import Room

from . import calls
from .admission import Admission
from .admitted import Admitted
from .errors import misused
from .limited import Entry, WorkflowConcurrencyLimitExceeded
from .owners import Owners, cluster_of
from .registry import SCRIPTS, Registry, Watch, digest
from .settings import Settings
from .slot_admission import SlotAdmission
from .turns import Turns
from .watcher import Watcher

logger = logging.getLogger("redlease.temporal")

RELAY_LEASE_MS = (300, 3000)  # how long a silent relay is taken to live: the least, and the most
BEATS_A_LEASE = 3
ROUNDING_MS = 2
LEAVE_MS = 1000.0  # the longest that a relay which ends waits for Redis
AT_ONCE_S = 0.7  # how long a local activity waits for Redis: it has a second in all


class Relay:
    """One process's part in keeping the locks of a group of workflow runs.

    Args:
        temporal: The client of the workers that it serves.
        settings: Of the plugin.
    """

    def __init__(self, temporal: Client, settings: Settings) -> None:
        self.temporal = temporal
        self.settings = settings
        self.prefix = settings.prefix
        self.name = secrets.token_hex(8)
        self._users = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._watchers: dict[str, Watcher | Admitted] = {}
        self._changed = asyncio.Event()
        self._unheard = asyncio.Event()
        self.turns = Turns(self.spawn)
        self._around = contextlib.AsyncExitStack()
        # What runs as long as the relay does, the internal worker.
        self.around: Callable[[], contextlib.AbstractAsyncContextManager[None]] = contextlib.nullcontext
        self.client: Redlease
        self.room: Room
        self.registry: Registry
        self.admission: Admission
        self.slots: SlotAdmission
        self.owners: Owners

    # Life

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Runs as long as anybody uses it."""
        async with self._starting:
            if self._users == 0:
                await self._start()
            self._users += 1
        try:
            yield
        finally:
            async with self._starting:
                self._users -= 1
                if self._users == 0:
                    await self._end()

    async def _start(self) -> None:
        self.owners = Owners(self.temporal, self.settings.looks_per_second)
        self.slots = SlotAdmission(self.temporal, self.settings.task_queue_of(self.temporal), self.owners)
        if self.settings.make_client is not None:
            await self._connect(self.settings.make_client())
        await self._around.enter_async_context(self.around())

    async def _connect(self, client: Redlease) -> None:
        self._changed = asyncio.Event()  # of this event loop
        self._loop = asyncio.get_running_loop()
        self.client = client
        self.room = self.client.room
        connection = self.room.connection
        connection.scripts = (*wire.SCRIPTS, *SCRIPTS)
        group = digest(await cluster_of(self.temporal), self.temporal.namespace, self.settings.group_of(self.temporal))
        self.registry = Registry(connection, self.prefix, group, self.name)
        self.admission = Admission(
            *(self.room, self.registry, self.owners),
            prefix=self.prefix,
            namespace=self.temporal.namespace,
            idle_ttl_ms=self.settings.idle_ttl_ms,
        )
        self.room.watchers.add(self._changed)
        await connection.subscribe(self.registry.channel, self._on_message)
        connection.start()
        self.spawn(self._beat())
        self.spawn(self._find_unheard())
        self.spawn(self.owners.run())

    def with_redis(self) -> Relay:
        """This relay, where the plugin was given a Redis; an error that tells of it where not."""
        if self.settings.make_client is None:
            message = (
                "redlease: the plugin was given no Redis, which backend='redis', @exclusive and @concurrency need: "
                "RedleasePlugin('redis://...'), or take backend='coordinator' or 'slots'"
            )
            raise misused(message)
        return self

    async def _end(self) -> None:
        """Leaves everything to the other relays, with as much time as there can be for them to take it."""
        await self._around.aclose()
        if self.settings.make_client is not None:
            await self._leave()

    async def _leave(self) -> None:
        watchers = list(self._watchers.values())
        for watcher in watchers:
            watcher.stop()
        self._watchers.clear()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        try:
            with contextlib.suppress(RedleaseError):
                async with asyncio.timeout(LEAVE_MS / 1000):
                    await asyncio.gather(*(watcher.fill_lease() for watcher in watchers))
                    await self.registry.beat(0, limit_ms=LEAVE_MS)
        except TimeoutError:
            logger.warning("Redis did not answer: the other relays find out by themselves that this one is gone")
        await self.client.abandon()
        self.turns.close()

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Runs something until it is done or the relay ends."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("a task of the relay failed", exc_info=task.exception())

    # Sharing with the other relays

    async def _beat(self) -> None:
        while True:
            self._changed.clear()
            lease_ms = self._lease_ms()
            wait_ms = lease_ms / BEATS_A_LEASE
            try:
                beat = await self.registry.beat(lease_ms)
                if beat.emptied:
                    await asyncio.gather(*(self.registry.claim(each.watch) for each in list(self._watchers.values())))
                elif beat.fresh:
                    await self._forget_lost()
                for lapsed in beat.lapsed:
                    await self._inherit(lapsed)
                if beat.soonest_ms >= 0:
                    wait_ms = min(wait_ms, beat.soonest_ms + ROUNDING_MS)
            except RedleaseError as error:
                logger.warning("the relay could not say that it lives: %s", error)
            except Exception:  # a watch that cannot be read must not end the care for all others
                logger.exception("the relay could not take over what another one had")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_ms / 1000):
                    await self._changed.wait()

    def _lease_ms(self) -> int:
        """Shorter than the leases it keeps, so that others can take them over in time."""
        least, most = RELAY_LEASE_MS
        shortest = min((watcher.watch.terms.lease_ms for watcher in self._watchers.values()), default=most * 3)
        return max(least, min(most, shortest // 3))

    async def _forget_lost(self) -> None:
        """Stops tending what others may have taken over while this relay was silent."""
        before = dict(self._watchers)
        own = await self.registry.own()
        for watch_id, watcher in before.items():
            if watch_id not in own and self._watchers.get(watch_id) is watcher:
                self.forget(watcher)

    async def _inherit(self, lapsed: str) -> None:
        more = True
        while more:
            more, watches = await self.registry.inherit(lapsed)
            for watch in watches:
                self.tend(self._tending(watch))

    def _tending(self, watch: Watch) -> Watcher | Admitted:
        return Admitted(self, watch) if watch.admission else Watcher(self, watch)

    async def _verify(self, watcher: Watcher | Admitted) -> None:
        """Looks whether it is still this relay's: it may have had the same one anew since the message was sent."""
        if not await self.registry.put(watcher.watch):
            self.forget(watcher)

    def _on_message(self, payload: bytes) -> None:
        kind, *rest = payload.decode().split(" ", 1)
        if kind == "left":
            self._changed.set()
        elif kind == "gone":
            owner, watch_id = rest[0].split(" ")
            if owner == self.name and watch_id in self._watchers:
                self.spawn(self._verify(self._watchers[watch_id]))
        elif kind == "look":
            for watcher in self._watchers.values():
                if watcher.watch.terms.resource == rest[0] and watcher.watch.fence:
                    watcher.stir()

    # Watchers

    def tend(self, watcher: Watcher | Admitted) -> None:
        """Tends a watch from now on, in place of whoever did here."""
        before = self._watchers.get(watcher.watch.id)
        if before is not None:
            before.stop()
        short = watcher.watch.terms.lease_ms // 3 < RELAY_LEASE_MS[1]
        if short and self._lease_ms() > watcher.watch.terms.lease_ms // 3:
            self._changed.set()
        self._watchers[watcher.watch.id] = watcher
        watcher.start()

    def forget(self, watcher: Watcher | Admitted) -> None:
        """Tends it no longer."""
        if self._watchers.get(watcher.watch.id) is watcher:
            del self._watchers[watcher.watch.id]
        watcher.stop()

    def listen(self, watch: Watch, told: Callable[[wire.Message], None]) -> None:
        """Tells of the messages about a watch's request."""
        self.room.listeners[watch.request] = told

    def unlisten(self, watch: Watch, told: Callable[[wire.Message], None]) -> None:
        """Ends `listen`, unless another watcher of that request has begun to."""
        if self.room.listeners.get(watch.request) == told:
            del self.room.listeners[watch.request]

    def terms(self, watch: Watch) -> wire.Terms:
        """What is said with each request for a watch."""
        terms, settings = watch.terms, self.settings
        return wire.Terms(
            *(watch.owner, terms.lease_ms, terms.capacity, settings.waiter_lease_ms, terms.max_waiters),
            settings.idle_ttl_ms,
        )

    async def call(self, *command: Any) -> list[Any]:
        """Calls a script on a resource, however long Redis may be away."""
        return (await self.room.connection.call(*command, limit_ms=None)).values

    async def give_back(
        self, resource: wire.Resource, watch: Watch, *, until_ms: float | None = None, patience_ms: float = LEAVE_MS
    ) -> Released:
        """Takes a ticket out, so that no late copy of its request can bring it back."""
        future: asyncio.Future[Released] = asyncio.get_running_loop().create_future()
        ask = wire.Ask(resource, self.terms(watch), watch.ticket, watch.request, watch.weight)
        now_ms = clock.now_ms()
        until_ms = now_ms + watch.terms.lease_ms if until_ms is None else until_ms
        unsure = True
        leaving = Leaving(self.room.keeper, ask, watch.fence or None, until_ms, unsure, future)
        leaving.patience_ms = patience_ms
        leaving.start(now_ms)
        return await future

    # Places

    async def reserve(self, entry: Entry, *, limit_s: float) -> bool:
        """Takes a place for a child that is to be started; whether it may be."""
        try:
            if entry.backend == "slots":
                await self.slots.reserve(entry)
                return True
            async with self._heard_of(), asyncio.timeout(limit_s):
                watch = await self.admission.reserve(entry)
                if watch is not None:
                    await self.registry.claim(watch)
        except WorkflowConcurrencyLimitExceeded:
            return False
        if watch is not None:
            self.tend(Admitted(self, watch))
        return True

    async def forgo(self, entry: Entry) -> bool:
        """The child was not started."""
        if entry.backend == "slots":
            await self.slots.forgo(entry)
            return True
        async with asyncio.timeout(AT_ONCE_S):
            await self.admission.forgo(entry)
        return True

    async def admit(self, entry: Entry, *, limit_s: float) -> bool:
        """Takes the place of a run; whether there is one."""
        if entry.backend == "slots":
            return await self.slots.admit(entry)
        async with self._heard_of(), asyncio.timeout(limit_s):
            watch = await self.admission.admit(entry)
        if watch is not None:
            self.tend(Admitted(self, watch))
        return watch is not None

    @contextlib.asynccontextmanager
    async def _heard_of(self) -> AsyncIterator[None]:
        """What is written down and then left over an error is looked after."""
        try:
            yield
        except WorkflowConcurrencyLimitExceeded:
            raise
        except BaseException:
            self._unheard.set()
            raise

    def closing(self, workflow_id: str) -> None:
        """A run of a workflow is about to close; called from the thread that it runs in."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self.owners.look_soon, (workflow_id, ""))

    # What the activities ask for

    def _watch(self, wish: calls.Wish) -> Watch:
        """The watch that a request of the activity's workflow run begins with."""
        info = activity.info()
        workflow_id, run_id = info.workflow_id or "", info.workflow_run_id or ""
        owner = wish.owner or _shortened(workflow_id, limits.OWNER_BYTES_MAX)
        return Watch(
            wish.terms,
            wish.ticket,
            digest(wish.terms.resource, wish.ticket, run_id, wish.local_id, wish.salt),
            *(workflow_id, run_id, wish.chain, wish.event_id, wish.local_id, wish.wait_id),
            wire.label(owner, wish.metadata),
            owner,
            weight=wish.weight,
            metadata=wish.metadata,
            keep=wish.keep,
            on_close=wish.on_close,
            max_hold_ms=wish.max_hold_ms,
        )

    async def _claim(self, watch: Watch, *, limit_ms: float | None) -> Watch:
        """Makes the watch this relay's, with what is known of an earlier copy of the request."""
        known = await self._known(watch, limit_ms=limit_ms)
        watch.arrival = known.arrival
        if known.request == watch.request and known.fence:
            watch.fence, watch.granted_at_ms, watch.capacity = known.fence, known.granted_at_ms, known.capacity
        return watch

    async def _known(self, watch: Watch, *, limit_ms: float | None = None) -> Watch:
        """Makes the watch this relay's, and returns what was written of it."""
        try:
            return await self.registry.claim(watch, limit_ms=limit_ms)
        except (RedleaseError, asyncio.CancelledError):
            self._unheard.set()
            raise

    async def _find_unheard(self) -> None:
        """Tends what a claim without an answer has made this relay's: nobody else would, as long as this one lives."""
        while True:
            await self._unheard.wait()
            self._unheard.clear()
            try:
                _, watches = await self.registry.inherit(self.name)
            except RedleaseError as error:
                logger.warning("the relay could not read what is its own: %s", error)
                continue
            for watch in watches:
                if watch.id not in self._watchers:
                    self.tend(self._tending(watch))

    async def enqueue(self, wish: calls.Wish) -> calls.Standing:
        """Queues a request; how it stands. Waits for Redis less than a second."""
        if not wish.queue:
            return await self._try(wish)
        async with asyncio.timeout(AT_ONCE_S):
            try:
                return await self._enqueue(wish)
            except Withdrawn:
                # This workflow task was begun once before, came as far as the release, and was not recorded: what that
                # run of it asked for must not come again, and this one asks for another.
                return await self._enqueue(dataclasses.replace(wish, salt=secrets.token_hex(4)))

    async def _enqueue(self, wish: calls.Wish) -> calls.Standing:
        watch = await self._claim(self._watch(wish), limit_ms=None)
        watcher = Watcher(self, watch, at_once=True)
        self.tend(watcher)
        return dataclasses.replace(await watcher.standing(), salt=wish.salt)

    async def _try(self, wish: calls.Wish) -> calls.Standing:
        watch = self._watch(wish)
        permit = await self.semaphore(wish.terms).try_acquire(
            ticket=wish.ticket, weight=wish.weight, owner=watch.owner, metadata=wish.metadata
        )
        return calls.Standing(permit)

    async def wait(self, wish: calls.Wish, token: bytes) -> None:
        """Sees to it that the activity with this token is completed once the request is granted."""
        watch = self._watch(wish)
        # The marker of the local activity says that it queued: only this activity's completion records the grant.
        watch.local_id = watch.wait_id
        await self._claim(watch, limit_ms=LEAVE_MS)
        watcher = Watcher(self, watch)
        watcher.attach(token)
        await self.registry.put(watch)
        self.tend(watcher)

    async def release(self, giving: calls.Giving, *, patience_ms: float = AT_ONCE_S * 1000) -> calls.Released:
        """Takes a ticket out, as holder or as waiter."""
        semaphore = self.semaphore(giving.terms)
        try:
            async with asyncio.timeout(patience_ms / 1000):
                if giving.administrative:
                    return calls.Released(await semaphore.release(giving.ticket))
                leaving = self._leaving(giving)
                known = self._watchers.pop(leaving.id, None)
                if known is not None:
                    known.stop()
                await self.registry.drop(leaving.id, anyones=True)
                released = await self.give_back(
                    wire.Resource(self.prefix, giving.terms.resource), leaving, patience_ms=patience_ms
                )
        except TimeoutError:
            return calls.Released(released=False, pending=True)
        if isinstance(released, RedleaseError):
            raise released
        if self.settings.by_signal:
            await self._tell_holders(semaphore)
        return calls.Released(bool(released), pending=released is None)

    async def _tell_holders(self, semaphore: Semaphore) -> None:
        """Returns when whoever holds it now was told.

        A server that skips time does so as soon as no workflow task is under way, and with all others waiting for a
        signal it would skip to where they time out.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(AT_ONCE_S):
                holders = {permit.ticket for permit in (await semaphore.inspect()).holders}
                for watcher in list(self._watchers.values()):
                    watch = watcher.watch
                    if not isinstance(watcher, Watcher) or not watch.token:
                        continue
                    if watch.ticket in holders and watch.terms.resource == semaphore.name:
                        await watcher.handed_over.wait()

    def _leaving(self, giving: calls.Giving) -> Watch:
        wish = calls.Wish(giving.terms, giving.ticket, "", 0, giving.asked, "", salt=giving.salt)
        watch = self._watch(wish)
        if giving.fence is not None:  # the fence names it, and its own request is the one that must not come again
            watch.fence, watch.request = giving.fence, ""
        return watch

    async def adopt(self, adopting: calls.Adopting) -> Permit:
        """Takes a permit over for a run: with a new fence, unless it comes from the same chain of runs."""
        permit, watch = adopting.permit, self._watch(adopting.wish)
        resource = wire.Resource(self.prefix, permit.resource)
        async with asyncio.timeout(AT_ONCE_S):
            known = await self._known(watch)
            # No ghost of a run is left once the next one of its chain runs. (The same request is a repeated one.)
            before = known if known.request != watch.request else None
            same = before is not None and (before.workflow_id, before.chain) == (watch.workflow_id, watch.chain)
            refence = not same if adopting.refence is None else adopting.refence
            values = await self.call(
                *(resource, wire.ADOPT, permit.ticket, permit.fence, watch.request, self.room.new_name()),
                *(watch.terms.lease_ms, int(refence), self.settings.idle_ttl_ms, watch.label),
            )
            if values[0] == 0:
                await self.registry.drop(watch.id)
                raise lease_lost(permit.resource, permit.ticket, permit.fence, GONE)
            watch.fence, watch.granted_at_ms, _, watch.weight, watch.capacity = values
            await self.registry.put(watch)
        watcher = Watcher(self, watch, at_once=True)
        self.tend(watcher)
        return watcher.permit

    async def renew(self, renewing: calls.Renewing) -> Permit:
        """Gives a permit a lease of that length."""
        return await self.semaphore(renewing.terms).renew(renewing.permit, lease=renewing.lease_ms / 1000)

    async def held(self, resource: str, ticket: str, fence: int) -> bool:
        """Whether a permit is held now, under its fence."""
        answer = await self.room.connection.call(
            wire.Resource(self.prefix, resource), wire.CHECK, ticket, fence, ticket=ticket
        )
        return bool(answer.values[0])

    async def inspect(self, inspecting: calls.Inspecting) -> Snapshot:
        """The resource as it is."""
        return await self.semaphore(inspecting.terms).inspect(limit=inspecting.limit)

    def semaphore(self, terms: calls.Terms) -> Semaphore:
        """The resource, as a service would use it."""
        return self.client.semaphore(
            terms.resource, terms.capacity, lease=terms.lease_ms / 1000, max_waiters=terms.max_waiters
        )


def _shortened(text: str, bytes_max: int) -> str:
    return text.encode()[:bytes_max].decode(errors="ignore")
