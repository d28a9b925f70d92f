"""Workflows that take each other's place, as `when_full` asks for."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Literal

from temporalio import workflow

from redlease_temporal import LeaseLost, Permit, QueueFull, Superseded, rwlock, semaphore


@dataclass
class Ask:
    """What a workflow asks for, and how it takes a loss. `slow`: it ends its body when it is told to, not before."""

    full: Any = "wait"  # a test may give what is none
    key: str | None = None
    grace: float = 120
    timeout: float | None = None
    on_lost: Literal["cancel", "signal"] = "cancel"
    slow: bool = False
    backend: str = "redis"
    resource: str = "r"
    writes: bool = False


@workflow.defn
class NewestHolder:
    """A hold until it is told to go on; its result says how it ended."""

    def __init__(self) -> None:
        self._permit: Permit | None = None
        self._go = False
        self._is_leaving = False

    @workflow.run
    async def run(self, ask: Ask) -> str:
        """Hold; return what became of that."""
        pool = rwlock(ask.resource).write if ask.writes else semaphore(ask.resource, 1, lease=60, backend=ask.backend)
        request = pool.hold(key=ask.key, when_full=ask.full, grace=ask.grace, timeout=ask.timeout, on_lost=ask.on_lost)
        try:
            async with request as hold:
                self._permit = hold.permit
                await self._body(ask)
        except (LeaseLost, Superseded, QueueFull) as error:
            return str(error)
        return "done"

    async def _body(self, ask: Ask) -> None:
        try:
            await workflow.wait_condition(lambda: self._go)
        except asyncio.CancelledError:
            self._is_leaving = True
            if ask.slow:
                await workflow.wait_condition(lambda: self._go)
            raise

    @workflow.update
    async def until_held(self) -> Permit:
        """Return the permit as soon as there is one."""
        await workflow.wait_condition(lambda: self._permit is not None)
        assert self._permit is not None
        return self._permit

    @workflow.update
    async def until_leaving(self) -> None:
        """Return as soon as the body has been cancelled."""
        await workflow.wait_condition(lambda: self._is_leaving)

    @workflow.signal
    def proceed(self) -> None:
        """Go on."""
        self._go = True
