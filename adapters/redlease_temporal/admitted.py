"""The place of one workflow, looked after by a relay until the last run of that workflow is closed."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from redlease import RedleaseError, clock, wire

from .admission import KEPT_MS
from .owners import UNTOLD, Fate, Look, Run
from .registry import Watch

if TYPE_CHECKING:
    from .relay import Relay

logger = logging.getLogger("redlease.temporal")

NOTICE_S = 5.0  # in which it is noticed that Redis no longer has the place
PROVISIONAL_S = 1.0  # in which it is noticed that a start did not follow


class Admitted:
    """What looks after one place; like a `Watcher` it can be stopped at any moment without a trace."""

    def __init__(self, relay: Relay, watch: Watch) -> None:
        self.watch = watch
        self._relay = relay
        self._resource = wire.Resource(relay.prefix, watch.terms.resource)
        self._run: Run = (watch.workflow_id, "")  # whichever run of it is the latest
        self._stirred = asyncio.Event()
        self._closed = False
        self._written = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to look after it."""
        self._relay.owners.watch(self._run, self._on_look)
        # Nobody waits for a place: who is refused tries again when it likes, and is to find it free then.
        self._relay.owners.look_often(self._run, often=True)
        self._relay.owners.look_soon(self._run)
        self._task = self._relay.spawn(self._tend())

    def stop(self) -> None:
        """Ends without a trace."""
        self._relay.owners.unwatch(self._run, self._on_look)
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()

    def stir(self) -> None:
        """Nothing: it is looked at often anyway."""

    async def fill_lease(self) -> None:
        """Nothing: its lease is long."""

    def _on_look(self, look: Look) -> None:
        watch = self.watch
        same = watch.chain in {"", look.chain, UNTOLD} or look.chain == UNTOLD
        own = same and look.workflow_type == watch.metadata.get("workflow_type")
        if look.fate is Fate.OPEN and own:
            if not watch.chain:
                watch.chain = look.chain
                self._stirred.set()
        elif look.fate is not Fate.UNKNOWN and watch.chain:
            self._closed = True
            self._stirred.set()

    async def _tend(self) -> None:
        over = False
        while not over:
            try:
                over = await self._turn()
            except RedleaseError as error:
                logger.warning("%s: its place could not be looked after, and is soon again: %s", self, error)
            if not over:
                await self._pause(NOTICE_S if self.watch.chain else PROVISIONAL_S)

    async def _turn(self) -> bool:
        """Does what is to be done now; whether that was all."""
        if self._closed:
            if not self.watch.fence:  # whoever took the place may have died before it was written down
                self.watch.fence = await self._relay.admission.take_again(self.watch)
            await self._relay.admission.free(self.watch)
            return await self._forget()
        if not self.watch.chain:  # a start is to follow
            return not await self._is_held() and await self._forget()
        if not self._written:
            self._written = await self._relay.registry.put(self.watch)
            if not self._written:  # another relay has it
                self._relay.forget(self)
                return True
        if self._relay.owners.unknown_ms(self._run) < self._relay.settings.unknown_grace_ms:
            await self._keep()
        return False

    async def _forget(self) -> bool:
        # The next workflow of that ID may have taken the place by now: what is written is its own then.
        await self._relay.registry.drop(self.watch.id, chain=self.watch.chain)
        self._relay.forget(self)
        return True

    async def _keep(self) -> None:
        watch = self.watch
        terms = (KEPT_MS, 0, self._relay.settings.idle_ttl_ms)
        deadline, *_ = await self._relay.call(self._resource, wire.RENEW, watch.ticket, watch.fence, *terms)
        if not deadline:
            watch.fence = await self._relay.admission.take_again(watch)
            if watch.fence:
                await self._relay.registry.put(watch)
            else:
                logger.warning("%s: it runs without a place, which was lost and is not free now", self)

    async def _is_held(self) -> bool:
        answer = await self._relay.call(self._resource, wire.CHECK, self.watch.ticket, self.watch.fence)
        return bool(answer[0])

    async def _pause(self, seconds: float) -> None:
        await clock.pause(self._stirred, seconds)
        self._stirred.clear()

    def __str__(self) -> str:
        return f"resource {self.watch.terms.resource!r}: workflow {self.watch.workflow_id!r}"
