"""The relay: what a process with a worker does for the locks of workflow runs, its own and those of dead processes.

It queues their requests, completes the activities that wait, renews what they hold, watches the runs, and shares all
of that with the relays of other processes by leases in Redis. There is one relay for each client that workers use.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from temporalio.client import Client

from redlease import Redlease, RedleaseError, clock, wire
from redlease.keeper import Leaving, Released
from redlease.semaphore import Semaphore
from redlease.waiting import Room

from . import calls
from .admission import Admission
from .admitted import Admitted
from .errors import misused
from .limited import WorkflowConcurrencyLimitExceeded
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
        self._tasks: set[asyncio.Task[Any]] = set()
        self.watchers: dict[str, Watcher | Admitted] = {}
        self._starting: asyncio.Lock
        self._changed: asyncio.Event
        self._unheard: asyncio.Event
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
        loop = asyncio.get_running_loop()
        if self._users == 0 and self._loop is not loop:
            self._loop, self._starting = loop, asyncio.Lock()
            self._changed, self._unheard = asyncio.Event(), asyncio.Event()
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
            client = self.settings.make_client()
            if not isinstance(client, Redlease):
                raise ValueError(f"what RedleasePlugin is given has to make a Redlease client, not {client!r}")
            await self._connect(client)
        await self._around.enter_async_context(self.around())

    async def _connect(self, client: Redlease) -> None:
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
        watchers = list(self.watchers.values())
        for watcher in watchers:
            watcher.stop()
        self.watchers.clear()
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
                    await asyncio.gather(*(self.registry.claim(each.watch) for each in list(self.watchers.values())))
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
            await clock.pause(self._changed, wait_ms / 1000)

    def _lease_ms(self) -> int:
        """Shorter than the leases it keeps, so that others can take them over in time."""
        least, most = RELAY_LEASE_MS
        shortest = min((watcher.watch.terms.lease_ms for watcher in self.watchers.values()), default=most * 3)
        return max(least, min(most, shortest // 3))

    async def _forget_lost(self) -> None:
        """Stops tending what others have taken over while this relay was silent, or have seen to its end."""
        before = dict(self.watchers)
        own = await self.registry.own()
        for watch_id, watcher in before.items():
            if watch_id not in own and self.watchers.get(watch_id) is watcher:
                self.forget(watcher)

    async def _inherit(self, lapsed: str) -> None:
        more = True
        while more:
            more, watches = await self.registry.inherit(lapsed)
            for watch in watches:
                self.tend(self._tending(watch))

    def _tending(self, watch: Watch) -> Watcher | Admitted:
        return Admitted(self, watch) if watch.admission else Watcher(self, watch)

    @contextlib.asynccontextmanager
    async def heard_of(self) -> AsyncIterator[None]:
        """What is written down as this relay's, and then left over an error, is looked after."""
        try:
            yield
        except WorkflowConcurrencyLimitExceeded:
            raise
        except BaseException:
            self._unheard.set()
            raise

    async def claim(self, watch: Watch, *, limit_ms: float | None = None) -> Watch:
        """Makes the watch this relay's, and returns what was written of it."""
        async with self.heard_of():
            return await self.registry.claim(watch, limit_ms=limit_ms)

    async def _find_unheard(self) -> None:
        """Tends what a claim without an answer has made this relay's: nobody else would, as long as this one lives."""
        while True:
            await self._unheard.wait()
            self._unheard.clear()
            try:
                own = await self.registry.own()
            except RedleaseError as error:
                logger.warning("the relay could not read what is its own, and tries again: %s", error)
                self._unheard.set()
                await asyncio.sleep(RELAY_LEASE_MS[1] / 1000)
                continue
            for watch_id, text in own.items():
                try:
                    if watch_id not in self.watchers:
                        self.tend(self._tending(Watch.read(text)))
                except Exception:  # the others are still to be looked after
                    logger.exception("the relay could not read one of its watches")

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
            if owner == self.name and watch_id in self.watchers:
                self.spawn(self._verify(self.watchers[watch_id]))
        elif kind == "look":
            for watcher in self.watchers.values():
                if watcher.watch.terms.resource == rest[0] and watcher.watch.fence:
                    watcher.stir()

    # Watchers

    def tend(self, watcher: Watcher | Admitted) -> None:
        """Tends a watch from now on, in place of whoever did here."""
        before = self.watchers.get(watcher.watch.id)
        if before is not None:
            before.stop()
        short = watcher.watch.terms.lease_ms // 3 < RELAY_LEASE_MS[1]
        if short and self._lease_ms() > watcher.watch.terms.lease_ms // 3:
            self._changed.set()
        self.watchers[watcher.watch.id] = watcher
        watcher.start()

    def forget(self, watcher: Watcher | Admitted) -> None:
        """Tends it no longer."""
        if self.watchers.get(watcher.watch.id) is watcher:
            del self.watchers[watcher.watch.id]
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

    def semaphore(self, terms: calls.Terms) -> Semaphore:
        """The resource, as a service would use it."""
        return self.client.semaphore(
            terms.resource, terms.capacity, lease=terms.lease_ms / 1000, max_waiters=terms.max_waiters
        )

    async def call(self, *command: Any) -> list[Any]:
        """Calls a script on a resource, however long Redis may be away."""
        return (await self.room.connection.call(*command, limit_ms=None)).values

    async def give_back(self, resource: wire.Resource, watch: Watch, *, patience_ms: float = LEAVE_MS) -> Released:
        """Takes a ticket out, so that no late copy of its request can bring it back."""
        future: asyncio.Future[Released] = asyncio.get_running_loop().create_future()
        ask = wire.Ask(resource, self.terms(watch), watch.ticket, watch.request, watch.weight)
        now_ms = clock.now_ms()
        until_ms, unsure = now_ms + watch.terms.lease_ms, True
        leaving = Leaving(self.room.keeper, ask, watch.fence or None, until_ms, unsure, future)
        leaving.patience_ms = patience_ms
        leaving.start(now_ms)
        return await future

    def closing(self, workflow_id: str) -> None:
        """A run of a workflow is about to close; called from the thread that it runs in."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self.owners.look_soon, (workflow_id, ""))
