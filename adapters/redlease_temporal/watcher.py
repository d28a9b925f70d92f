"""One ticket, tended on behalf of a workflow run: queued, handed over once granted, and kept until the run is over.

A watcher is one task that can be stopped at any moment without a trace: what is on the server stays there, and the
relay that has the watch next goes on from what is written of it.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
from collections.abc import Coroutine
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from temporalio.client import AsyncActivityCancelledError
from temporalio.service import RPCError, RPCStatusCode

from redlease import RedleaseError, Withdrawn, clock, wire
from redlease.models import Permit
from redlease.waiting import Waiting

from . import calls
from .calls import LOST_SIGNAL, Lost, Standing
from .errors import failure
from .owners import Fate, Look, Run
from .registry import Watch

if TYPE_CHECKING:
    from .relay import Relay

logger = logging.getLogger("redlease.temporal")

BY_SIGNAL_TOKEN = "signal"  # noqa: S105  stands where a task token would
RENEWALS_A_LEASE = 3
NOTICE_S = 2.0  # a renewal tells whether anybody waits: services that do so say it to no relay
FIRST_LOOK_S = 1.0  # after which a new hold is first looked at: most are over by then, and cost nothing more
RETRY_S = (0.1, 5.0)  # the first and the longest pause after the Temporal server did not answer
GIVING_UP_S = 1.0  # after which a run that has given its wait up has said so to the server
ANSWER_S = 5.0  # how long it may take to answer


class _GoneError(Exception):
    """Another relay has the watch, or it is over."""


class _LapsedError(Exception):
    """The place in the queue is gone."""


class _LostError(Exception):
    """The permit is gone, and its run may have been told before that it has it."""


class Watcher:
    """What tends one watch.

    `at_once`: a local activity waits for the outcome, and its marker is what records a grant.
    """

    def __init__(self, relay: Relay, watch: Watch, *, at_once: bool = False) -> None:
        self.watch = watch
        self._relay = relay
        self.at_once = at_once
        self._resource = wire.Resource(relay.prefix, watch.terms.resource)
        self._standing: asyncio.Future[Standing] = asyncio.get_running_loop().create_future()
        self._stirred = asyncio.Event()
        self.handed_over = asyncio.Event()
        self._run: Run = (watch.workflow_id, watch.run_id)
        self._adopt_until_ms: float | None = None
        self._closed = False
        self._held_ms = 0
        # Whether the run may have heard of the grant: of another relay's it may, unless it asks just now.
        self._told = watch.fence > 0 and not at_once
        self._task: asyncio.Task[None] | None = None

    # Life

    def start(self) -> None:
        """Begins to tend it."""
        self._relay.owners.watch(self._run, self._on_look)
        self._relay.listen(self.watch, self._on_message)
        self._task = self._relay.spawn(self._tend())

    def stop(self) -> None:
        """Ends without a trace."""
        self._relay.owners.unwatch(self._run, self._on_look)
        self._relay.unlisten(self.watch, self._on_message)
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()
        if not self._standing.done():
            self._standing.set_exception(TimeoutError())  # whoever asked asks again
        self._standing.exception()  # seen

    async def standing(self) -> Standing:
        """How the request stands as soon as the server has said so; raises what it was refused for."""
        return await asyncio.shield(self._standing)

    def attach(self, token: bytes) -> None:
        """The activity that waits for it can be completed by this token from now on."""
        self.watch.token = base64.b64encode(token).decode()
        self._stirred.set()

    @property
    def permit(self) -> Permit:
        """The permit as it was granted."""
        watch, lease_ms = self.watch, self.watch.terms.lease_ms
        return Permit(
            *(watch.terms.resource, watch.ticket, watch.fence, watch.weight, watch.capacity, lease_ms),
            *(watch.granted_at_ms, watch.granted_at_ms + lease_ms, watch.owner, watch.metadata),
        )

    # What comes in

    def _on_message(self, _: wire.Message) -> None:
        """Somebody took it out, or changed its lease: look at once."""
        self._stirred.set()

    def stir(self) -> None:
        """Somebody waits for what it holds."""
        self._relay.owners.look_often(self._run, often=True)

    def _on_look(self, look: Look) -> None:
        if look.fate is Fate.OPEN:
            self._adopt_until_ms = None
        elif look.fate is Fate.CLOSED and not self._closed:
            self._closed = True
            self._relay.spawn(self._owner_closed())
        elif look.fate is Fate.CONTINUED and self._adopt_until_ms is None:
            self._adopt_until_ms = clock.now_ms() + self._relay.settings.adopt_window_ms
            if not self.watch.fence:  # the activity that waited ended with its run
                self._closed = True
                self._relay.spawn(self._owner_closed())
        elif look.fate is Fate.RESET:
            self._relay.spawn(self._move_to(look.open_run_id))

    async def _move_to(self, run_id: str) -> None:
        """The run was reset: the new one has the permit if its history says so, and asks anew if it does not."""
        self.watch.run_id, self.watch.recorded, self.watch.token = run_id, False, ""
        if await self._relay.registry.put(self.watch):
            self._relay.tend(Watcher(self._relay, self.watch))

    async def _owner_closed(self) -> None:
        """The run is over: so is its use of the permit, unless it is to end by its lease."""
        self.stop()
        if not self.watch.fence or self.watch.on_close == "release":
            await self._relay.give_back(self._resource, self.watch)
        await self._over()

    async def _over(self) -> None:
        await self._relay.registry.drop(self.watch.id)
        self._relay.forget(self)

    # The task

    async def _tend(self) -> None:
        watch = self.watch
        try:
            if watch.fence and not watch.recorded:  # an earlier copy of the request has got it
                if await self._renew():
                    self._tell(Standing(self.permit))
                else:
                    await self._begin_anew()
            while not await self._granted_and_recorded():
                await self._begin_anew()
                await self._save()
                if self.at_once:
                    await self._over()
                    return
                while not watch.token:  # until the activity that is to wait for it comes, or the run is over
                    await self._pause(None)
            if watch.keep:
                await self._keep()
            await self._over()
        except _LostError:
            await self._signal_loss()
            await self._over()
        except _GoneError:
            self._relay.forget(self)
        except (RedleaseError, ValueError) as error:
            await self._refuse(error)

    async def _begin_anew(self) -> None:
        """The grant lapsed before it was seen in the run's history; raises when the run may think that it holds."""
        if self.at_once and self._standing.done():
            # Its marker may still come, from a workflow task that has other local activities to wait for.
            raise _LostError
        while self._told:
            recorded = await self._answered(self._is_recorded())
            if recorded:
                raise _LostError
            self._told = recorded is None
            if self._told:
                await self._pause(self._renewal_s)
        self.watch.fence = 0

    async def _granted_and_recorded(self) -> bool:
        if not self.watch.fence:
            await self._queue()
        return self.watch.recorded or await self._hand_over()

    async def _queue(self) -> None:
        """Waits in the queue; again, from where it stood, if its place has lapsed and it is still this relay's."""
        watch, granted = self.watch, None
        while granted is None:
            try:
                granted = await self._wait_in_queue()
            except _LapsedError:
                await self._save()
        watch.fence, watch.granted_at_ms, watch.capacity = granted.fence, granted.granted_at_ms, granted.capacity
        watch.recorded = False
        await self._save()
        self._told = False
        self._tell(Standing(self.permit))

    async def _wait_in_queue(self) -> wire.Granted:
        watch = self.watch
        room, terms = self._relay.room, self._relay.terms(watch)
        packed_terms = wire.pack_terms(terms, watch.weight, watch.label)
        ask = wire.Ask(
            *(self._resource, terms, watch.ticket, watch.request, watch.weight, packed_terms),
            arrival=watch.arrival,
        )
        waiting = room.enter(ask, claim=True)
        waiting.on_queued = lambda queued: self._queued(waiting, queued)
        # A process that stood still asks for nothing that others may have seen to meanwhile.
        waiting.on_lapsed = lambda: waiting.fail(_LapsedError())
        try:
            granted = await waiting.future
        finally:
            room.leave(waiting)
            waiting.future.cancel()
        if granted is None:
            raise _GoneError
        return granted

    def _queued(self, waiting: Waiting, queued: wire.Queued) -> None:
        self.at_once = False  # whoever asked goes on to wait for it, and the marker of having asked records no grant
        self.watch.local_id = self.watch.wait_id
        if self._relay.settings.by_signal:
            self.watch.token = BY_SIGNAL_TOKEN
            self._tell(Standing(None, queued.ahead, calls.BY_SIGNAL))
        self._tell(Standing(None, queued.ahead))
        if self.watch.arrival != queued.sequence:
            self.watch.arrival = queued.sequence
            waiting.ask = waiting.ask._replace(arrival=queued.sequence)
            self._relay.spawn(self._relay.registry.put(self.watch))
            self._relay.spawn(self._relay.registry.say(f"look {self.watch.terms.resource}"))

    async def _hand_over(self) -> bool:
        """Sees to it that the run's history has the grant; False when it lapsed before that.

        What no history has is given no more time, but for one lease when there is somebody to be told of it: an orphan
        lapses, however long its run stays open. As long as the Temporal server does not say, it may be no orphan.
        """
        watch = self.watch
        if self.at_once:
            if not watch.keep:
                return True  # nobody renews it
            await self._pause(min(FIRST_LOOK_S, self._renewal_s))
        tried, known_ms = "", clock.now_ms()
        recorded: bool | None = False
        while True:
            token = watch.token
            unknown = recorded is None and clock.now_ms() - known_ms < self._relay.settings.unknown_grace_ms
            if not await (self._renew() if unknown or token != tried else self._check()):
                return False
            tried = token
            recorded = await self._answered(self._is_recorded() if self.at_once else self._complete(token))
            if recorded:
                watch.recorded = True
                self.handed_over.set()
                await self._save()
                return True
            if recorded is not None:
                known_ms = clock.now_ms()
            await self._pause(self._renewal_s if recorded is not None else self._renewal_s / 2)

    async def _answered(self, asking: Coroutine[Any, Any, bool | None]) -> bool | None:
        """What the Temporal server says, None when it does not say it soon enough for the permit to be renewed."""
        try:
            async with asyncio.timeout(min(ANSWER_S, self._renewal_s / 2)):
                return await asking
        except TimeoutError:
            logger.warning("%s: the Temporal server did not answer in time", self)
            return None

    async def _complete(self, token: str) -> bool | None:
        """Completes the activity that waits; whether its completion is in the history, None when that is not known."""
        self._told = True
        try:
            await self._tell_of_grant(token)
        except AsyncActivityCancelledError:
            return False
        except RPCError as error:
            if error.status != RPCStatusCode.NOT_FOUND:
                logger.warning("%s: the grant could not be told to the Temporal server yet: %s", self, error)
                return None
            # Either an earlier completion came through and its reply was lost, or this attempt is over: the history
            # of the run says which, should it be open.
            if self.watch.token == token:
                self.watch.token = ""
            await self._relay.owners.look(self._run)
            return await self._is_recorded()
        return True

    async def _tell_of_grant(self, token: str) -> None:
        temporal, watch = self._relay.temporal, self.watch
        if token == BY_SIGNAL_TOKEN:
            handle = temporal.get_workflow_handle(watch.workflow_id, run_id=watch.run_id)
            await handle.signal(calls.GRANTED_SIGNAL, calls.Granted(self.permit))
        elif token:
            await temporal.get_async_activity_handle(task_token=base64.b64decode(token)).complete(self.permit)
        else:  # the worker that had the attempt may have died with its token: whichever attempt there is will do
            waits = temporal.get_async_activity_handle(
                workflow_id=watch.workflow_id, run_id=watch.run_id, activity_id=watch.wait_id
            )
            await waits.complete(self.permit)

    async def _is_recorded(self) -> bool | None:
        """Whether the run's history has the grant, None when that is not known."""
        watch = self.watch
        if self._relay.settings.by_signal:
            return True
        try:
            return await self._relay.owners.has_recorded(self._run, watch.event_id, watch.local_id, watch.wait_id)
        except RPCError as error:
            logger.warning("%s: the Temporal server did not say whether the run has the grant: %s", self, error)
            return None

    async def _keep(self) -> None:
        """Renews it until it is lost, or nobody is to have it any more."""
        while True:
            held = await (self._renew() if self._may_renew() else self._check())
            if not held:
                await self._save()  # who has released it has dropped the watch first
                if self._adopt_until_ms is None:
                    await self._signal_loss()
                return
            await self._pause(min(self._renewal_s, NOTICE_S))

    def _may_renew(self) -> bool:
        if self.watch.max_hold_ms is not None and self._held_ms >= self.watch.max_hold_ms:
            return False
        if self._adopt_until_ms is not None and clock.now_ms() >= self._adopt_until_ms:
            return False
        return self._relay.owners.unknown_ms(self._run) < self._relay.settings.unknown_grace_ms

    async def _signal_loss(self) -> None:
        """Tells the run, or the one that it was continued as, that it has lost its permit."""
        watch = self.watch
        lost = Lost(watch.terms.resource, watch.ticket, watch.fence, "it lapsed, or was released by its ticket")
        logger.warning("%s: the permit (fence %d) is lost; telling the workflow", self, watch.fence)
        handle = self._relay.temporal.get_workflow_handle(watch.workflow_id)
        pause_s = RETRY_S[0]
        while True:
            try:
                await handle.signal(LOST_SIGNAL, lost, rpc_timeout=timedelta(seconds=ANSWER_S))
            except RPCError as error:
                if error.status == RPCStatusCode.NOT_FOUND:
                    return
                logger.warning("%s: the workflow could not be told yet: %s", self, error)
            else:
                return
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, RETRY_S[1])

    async def _refuse(self, error: RedleaseError | ValueError) -> None:
        """The server would not queue it: whoever waits is told."""
        # What was taken out before this watcher queued it has most likely been given up by its own run, whose workflow
        # task is under way. It cancels the activity; a failure before that would make the server refuse the task.
        given_up = isinstance(error, Withdrawn) and not self._standing.done()
        if not self._standing.done():
            self._standing.set_exception(error)
        if given_up:
            await asyncio.sleep(GIVING_UP_S)
        if self.watch.token and self.watch.token != BY_SIGNAL_TOKEN:
            handle = self._relay.temporal.get_async_activity_handle(task_token=base64.b64decode(self.watch.token))
            with contextlib.suppress(RPCError, AsyncActivityCancelledError):
                await handle.fail(failure(error))
        await self._over()

    # Its parts

    async def _save(self) -> None:
        if not await self._relay.registry.put(self.watch):
            raise _GoneError

    async def _renew(self) -> bool:
        """Gives the permit its full lease again; whether it is still held."""
        watch = self.watch
        settings = (watch.terms.lease_ms, 0, self._relay.terms(watch).idle_ttl_ms)
        answer = await self._relay.call(self._resource, wire.RENEW, watch.ticket, watch.fence, *settings)
        deadline, _, waiting = answer
        if deadline:
            # The server's clock at that moment, by which max_hold is counted whichever relay has the watch.
            self._held_ms = deadline - watch.terms.lease_ms - watch.granted_at_ms
            self._relay.owners.look_often(self._run, often=waiting > 0)
        return bool(deadline)

    async def fill_lease(self) -> None:
        """Renews what is kept one last time, for whoever keeps it next."""
        if self.watch.fence and self.watch.recorded and self._may_renew():
            await self._renew()

    async def _check(self) -> bool:
        """Whether the permit is held, without giving it more time."""
        answer = await self._relay.call(self._resource, wire.CHECK, self.watch.ticket, self.watch.fence)
        return bool(answer[0])

    async def _pause(self, seconds: float | None) -> None:
        """Waits so long, or until something has happened."""
        await clock.pause(self._stirred, seconds)
        self._stirred.clear()

    @property
    def _renewal_s(self) -> float:
        return self.watch.terms.lease_ms / 1000 / RENEWALS_A_LEASE

    def _tell(self, standing: Standing) -> None:
        if not self._standing.done():
            self._standing.set_result(standing)

    def __str__(self) -> str:
        return f"resource {self.watch.terms.resource!r}: workflow {self.watch.workflow_id!r}"
