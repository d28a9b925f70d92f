"""The relay: the part of a worker process that serves the Redis locks of workflow runs.

It queues the runs' requests, completes their waiting activities when a request is granted, renews their permits and
checks whether the runs are still open. Each relay holds a lease in Redis; when that expires, other relays take its
records over. Each Temporal client that workers use has one relay.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Protocol

from temporalio.client import Client

from redlease import Redlease, RedleaseError, Semaphore
from redlease._core import clock
from redlease._core.operations import AcquireRequest, Released, Terms
from redlease_temporal._common.retrying import LogOnce, retry_until_done
from redlease_temporal._common.run_monitor import RunMonitor
from redlease_temporal._common.settings import Settings
from redlease_temporal._payloads import locks

from .canaries import can_read, canary_of
from .registry import SCRIPTS, Registry, TicketRecord, relay_group

logger = logging.getLogger("redlease.temporal")

RELAY_LEASE_MS = (300, 3000)  # the shortest and the longest lease of a relay: other relays take over once it expires
HEARTBEATS_PER_LEASE = 3
ROUNDING_MS = 2
RESTART_PAUSES_S = (0.1, 1.0)  # the first and the longest pause before a failed loop of the relay restarts
FOREIGN_MS = 30_000.0  # how long this relay ignores an expired relay whose records it could not read
PAGE = 100  # records taken over in one call
LEAVE_TIMEOUT_MS = 1000.0  # the longest that a closing relay waits for Redis
NO_LIMIT_MS = 1e12


class Tracker(Protocol):
    """Serves one record. It can be stopped at any moment: all state that matters is in Redis."""

    record: TicketRecord

    def start(self) -> None:
        """Starts its task."""

    def stop(self) -> None:
        """Stops its task and leaves the state in Redis as it is."""

    def wake(self) -> None:
        """A waiter needs the resource: check more often whether the run has ended."""

    def poll_soon(self) -> None:
        """Nobody has looked at the run since another relay was killed: it may have ended."""

    async def fill_lease(self) -> None:
        """Renews the permit, if it may, so that the next relay has a full lease to take it over."""


class PendingRelease(Protocol):
    """A release that waits until the history of its run records it."""

    @property
    def resource(self) -> str:
        """The name of the resource."""

    @property
    def run_id(self) -> str:
        """The run that has released it."""

    async def attempt(self) -> bool | None:
        """Carries it out if it is recorded."""


class Relay:
    """Serves the locks of a group of workflow runs, for one process.

    Args:
        client: The Redis client; only the relay uses it.
        temporal: The client of the workers that the relay serves.
        settings: The plugin's settings.
        monitor: Asks Temporal for the status of runs.
        make_tracker: Makes the tracker of a record.
        group: Names the relays that share their records.
        canary: Lets other relays test whether they can decode this one's payloads.
    """

    def __init__(
        self,
        client: Redlease,
        temporal: Client,
        settings: Settings,
        monitor: RunMonitor,
        make_tracker: Callable[[Relay, TicketRecord], Tracker],
        *,
        group: str,
        canary: str,
    ) -> None:
        self.client = client
        self.temporal = temporal
        self.settings = settings
        self.monitor = monitor
        self.canary = canary
        self.prefix = settings.prefix
        self.name = secrets.token_hex(8)
        self.operations = client._operations
        self.registry = Registry(self.operations, self.prefix, group, self.name)
        self.trackers: dict[str, Tracker] = {}
        self.releases: set[PendingRelease] = set()  # those that wait until a history records them
        self._make_tracker = make_tracker
        self._monitors = {temporal.namespace: monitor}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._log_once = LogOnce()
        self._foreign: dict[str, float] = {}  # expired relays with unreadable records: until when to ignore each
        self._may_have_expired = False  # whether other relays may have taken over records of this one
        self._changed, self._claim_reply_lost = asyncio.Event(), asyncio.Event()

    @classmethod
    async def create(
        cls,
        temporal: Client,
        settings: Settings,
        monitor: RunMonitor,
        make_tracker: Callable[[Relay, TicketRecord], Tracker],
    ) -> Relay:
        """Makes a relay for settings that include a Redis client factory.

        Raises:
            ValueError: The factory makes something else than a Redlease client.
            RPCError: The Temporal server did not return its cluster id.
        """
        assert settings.make_client is not None
        client = settings.make_client()
        if not isinstance(client, Redlease):
            raise ValueError(f"what RedleasePlugin is given has to make a Redlease client, not {client!r}")
        group = await relay_group(temporal, settings)
        canary = await canary_of(temporal.data_converter)
        return cls(client, temporal, settings, monitor, make_tracker, group=group, canary=canary)

    # Lifecycle

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Runs the relay; at the end, leaves its records to the other relays."""
        self.operations.connect(*SCRIPTS)
        self.operations.on_reconnect(self._changed)
        await self.operations.subscribe(self.registry.channel, self._on_message)
        self.spawn(retry_until_done("sending the relay's heartbeat", self._beat, RESTART_PAUSES_S))
        self.spawn(retry_until_done("looking for this relay's records", self._find_untracked, RESTART_PAUSES_S))
        try:
            yield
        finally:
            await self._leave()

    async def _leave(self) -> None:
        """Leaves all records to the other relays, after renewing each permit so that they have time to take it over."""
        trackers = list(self.trackers.values())
        for tracker in trackers:
            tracker.stop()
        self.trackers.clear()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        try:
            with contextlib.suppress(RedleaseError):
                async with asyncio.timeout(LEAVE_TIMEOUT_MS / 1000):
                    await asyncio.gather(*(tracker.fill_lease() for tracker in trackers))
                    await self.registry.beat(0, limit_ms=LEAVE_TIMEOUT_MS)
        except TimeoutError:
            logger.warning("Redis did not answer: the other relays find out by themselves that this one is gone")
        await self.client.abandon()

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Runs a coroutine until it is done or the relay closes."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("a task of the relay failed", exc_info=task.exception())

    def monitor_of(self, namespace: str) -> RunMonitor:
        """What asks for the status of runs in a namespace: those that hold permits may be in others."""
        monitor = self._monitors.get(namespace)
        if monitor is None:
            converter = self.temporal.data_converter  # what the service answers is in its own encoding
            client = Client(self.temporal.service_client, namespace=namespace, data_converter=converter)
            monitor = self._monitors[namespace] = RunMonitor(client, self.settings.polls_per_second)
            self.spawn(monitor.run())
        return monitor

    # Sharing with the other relays

    async def _beat(self) -> None:
        while True:
            self._changed.clear()
            wait_ms = await self._renew_relay_lease()
            await clock.pause(self._changed, wait_ms / 1000)

    async def _renew_relay_lease(self) -> float:
        """Renews this relay's lease and takes over records of expired relays; returns the ms until the next beat."""
        lease_ms = self._lease_ms()
        # If this beat's reply is lost, the next reply does not show whether others took the records over before this
        # beat.
        may_have_expired, self._may_have_expired = self._may_have_expired, True
        now_ms = clock.now_ms()
        self._foreign = {relay: until_ms for relay, until_ms in self._foreign.items() if until_ms > now_ms}
        beat = await self.registry.beat(lease_ms, self._foreign)
        self._may_have_expired = may_have_expired or beat.fresh
        try:
            await self._reclaim_or_forget(beat.generation)
        except Exception as error:  # noqa: BLE001  logged; the next beat retries
            self._log_once.warn("the relay could not make sure of what is its own, and tries again", error)
        for expired in beat.expired:
            try:
                async with self.recover_on_error():
                    await self._inherit(expired)
            except Exception as error:  # noqa: BLE001  logged; the other expired relays come next
                self._log_once.warn(f"taking over what relay {expired} had failed, and is tried again", error)
        wait_ms = lease_ms / HEARTBEATS_PER_LEASE
        return min(wait_ms, beat.next_expiry_ms + ROUNDING_MS) if beat.next_expiry_ms >= 0 else wait_ms

    async def _reclaim_or_forget(self, generation: str) -> None:
        """Claims all records again if Redis lost its data; else drops those that other relays may have taken over."""
        if self.registry.generation not in {"", generation}:
            await asyncio.gather(*(self.registry.claim(each.record) for each in list(self.trackers.values())))
        elif self._may_have_expired:
            await self._forget_lost()
        self.registry.generation, self._may_have_expired = generation, False

    def _lease_ms(self) -> int:
        """The relay's lease: shorter than those of its permits, so that other relays can take them over in time."""
        least, most = RELAY_LEASE_MS
        shortest = min((tracker.record.terms.lease_ms for tracker in self.trackers.values()), default=most * 3)
        return max(least, min(most, shortest // 3))

    async def _forget_lost(self) -> None:
        """Forgets the records that other relays took over or dropped while this one was silent."""
        before = dict(self.trackers)
        owned = await self.registry.list_owned()
        for record_id, tracker in before.items():
            if record_id not in owned and self.trackers.get(record_id) is tracker:
                self.forget(tracker)

    async def _inherit(self, expired: str) -> None:
        """Takes over those records of an expired relay that this one can decode; relays that can take the others."""
        left = await self.registry.list_owned(expired)
        canaries: dict[str, bool] = {}
        readable = [record_id for record_id, text in left.items() if await self._can_read(text, canaries)]
        if len(readable) < len(left):
            self._foreign[expired] = clock.now_ms() + FOREIGN_MS
        for start in range(0, len(readable) or 1, PAGE):
            for record in await self.registry.inherit(expired, readable[start : start + PAGE]):
                self.track_record(record).poll_soon()

    async def _can_read(self, text: bytes, readable: dict[str, bool]) -> bool:
        try:
            canary = TicketRecord.read(text).canary
        except Exception as error:  # noqa: BLE001  written by another version, perhaps
            self._log_once.warn("the relay could not read a record, and leaves it to others", error)
            return False
        if canary not in readable:
            readable[canary] = await can_read(self.temporal.data_converter, canary)
        return readable[canary]

    @contextlib.asynccontextmanager
    async def recover_on_error(self) -> AsyncIterator[None]:
        """After an error in the block, finds and tracks the records that Redis may have assigned to this relay."""
        try:
            yield
        except BaseException:
            self._claim_reply_lost.set()
            raise

    async def claim(self, record: TicketRecord, *, limit_ms: float | None = None) -> TicketRecord:
        """Makes this relay the owner of the record; returns the stored record, which may be an earlier one."""
        record.canary = self.canary
        async with self.recover_on_error():
            return await self.registry.claim(record, limit_ms=limit_ms)

    async def _find_untracked(self) -> None:
        """Tracks records whose `claim` reply was lost: Redis may already name this relay as their owner."""
        while True:
            await self._claim_reply_lost.wait()
            self._claim_reply_lost.clear()
            try:
                owned = await self.registry.list_owned()
            except Exception:
                self._claim_reply_lost.set()
                raise
            failed = False
            for record_id, text in owned.items():
                try:
                    if record_id not in self.trackers:
                        self.track_record(TicketRecord.read(text))
                except Exception as error:  # noqa: BLE001  logged; the other records come next
                    failed = True
                    self._log_once.warn(
                        f"the relay could not begin to look after record {record_id}, and tries again", error
                    )
            if failed:
                self._claim_reply_lost.set()
                await asyncio.sleep(RELAY_LEASE_MS[1] / 1000)

    async def _verify(self, tracker: Tracker) -> None:
        """Forgets the record if it has another owner; the relay may have claimed it again since the message."""
        if self.trackers.get(tracker.record.id) is tracker and not await self.registry.save(tracker.record):
            self.forget(tracker)

    def _on_message(self, payload: bytes) -> None:
        try:
            self._handle_message(payload.decode())
        except Exception as error:  # noqa: BLE001  anybody may publish anything
            self._log_once.warn("a message to the relays could not be read", error)

    def _handle_message(self, message: str) -> None:
        kind, *rest = message.split(" ", 1)
        if kind == "left":
            self._changed.set()
        elif kind == "gone":
            owner, record_id = rest[0].split(" ")
            if owner == self.name and record_id in self.trackers:
                tracker = self.trackers[record_id]
                self.spawn(retry_until_done(f"{tracker}: checking who owns its record", lambda: self._verify(tracker)))
        elif kind == "contended":
            for tracker in self.trackers.values():
                if tracker.record.terms.resource == rest[0] and tracker.record.fence:
                    tracker.wake()

    # Trackers

    def track_record(self, record: TicketRecord) -> Tracker:
        """Makes the tracker of a record as it is stored, and runs it."""
        tracker = self._make_tracker(self, record)
        self.track(tracker)
        return tracker

    def track(self, tracker: Tracker) -> None:
        """Runs this tracker for its record, in place of any earlier one."""
        before = self.trackers.get(tracker.record.id)
        if before is not None:
            before.stop()
        short = tracker.record.terms.lease_ms // 3 < RELAY_LEASE_MS[1]
        if short and self._lease_ms() > tracker.record.terms.lease_ms // 3:
            self._changed.set()
        self.trackers[tracker.record.id] = tracker
        tracker.start()

    def forget(self, tracker: Tracker) -> None:
        """Stops the tracker and removes it."""
        if self.trackers.get(tracker.record.id) is tracker:
            del self.trackers[tracker.record.id]
        tracker.stop()

    def terms(self, record: TicketRecord) -> Terms:
        """The terms that this relay sends with each request for a record."""
        terms, settings = record.terms, self.settings
        return Terms(
            *(record.owner, terms.lease_ms, terms.capacity, settings.waiter_lease_ms, terms.max_waiters),
            settings.idle_ttl_ms,
            per_key=terms.per_key,
            rate=_pack_rate(terms.rate),
            per_key_rate=_pack_rate(terms.per_key_rate),
            max_waiters_per_key=terms.max_waiters_per_key,
        )

    def semaphore(self, terms: locks.ResourceTerms) -> Semaphore:
        """The resource as a public `Semaphore`."""
        return self.client.semaphore(
            terms.resource,
            terms.capacity,
            lease=terms.lease_ms / 1000,
            max_waiters=terms.max_waiters,
            per_key=terms.per_key,
            rate=None if terms.rate is None else terms.rate.rate,
            per_key_rate=None if terms.per_key_rate is None else terms.per_key_rate.rate,
            max_waiters_per_key=terms.max_waiters_per_key,
        )

    async def is_reduced(self, record: TicketRecord) -> bool:
        """Whether its permit is held with less weight than was granted: its run has downgraded it."""
        if not record.fence or record.weight == 1:
            return False
        # The reply to an adoption without a new fence is the permit as it is.
        held = await self.operations.adopt(
            *(self.operations.resource(record.terms.resource), record.ticket, record.fence, record.request),
            record.terms.lease_ms,
            label=record.label,
            idle_ttl_ms=self.settings.idle_ttl_ms,
            refence=False,
            limit_ms=None,
        )
        return held is not None and held.weight < record.weight

    async def release(self, record: TicketRecord) -> None:
        """Releases or withdraws a ticket, however long Redis is away.

        Raises:
            RedleaseError: Redis refuses it.
        """
        released = await self.try_release(record, answer_within_ms=NO_LIMIT_MS)
        if isinstance(released, RedleaseError):
            raise released

    async def try_release(self, record: TicketRecord, *, answer_within_ms: float = LEAVE_TIMEOUT_MS) -> Released:
        """Releases or withdraws a ticket, so that no late copy of its request can be granted."""
        resource = self.operations.resource(record.terms.resource)
        ask = AcquireRequest(resource, self.terms(record), record.ticket, record.request, record.weight)
        return await self.operations.release(
            ask,
            record.fence or None,
            lasts_ms=record.terms.lease_ms,
            may_be_duplicated=True,
            answer_within_ms=answer_within_ms,
        )


def _pack_rate(rate: locks.RateLimit | None) -> str | None:
    """A rate as the protocol has it."""
    if rate is None:
        return None
    return rate.rate.packed if rate.rate else "0"
