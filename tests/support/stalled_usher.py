"""A worker whose usher never tells anybody that a slot is free. For a process of its own."""

from __future__ import annotations

import asyncio

from backend_flows import Holder, On
from temporalio import workflow

from redlease_temporal import Permit

with workflow.unsafe.imports_passed_through():
    from redlease_temporal._backends.slots.notifier import SlotNotifier
    from redlease_temporal._payloads.slots import SlotHandover

    from children import say


async def never(self: SlotNotifier, handover: SlotHandover) -> None:
    """Say that there is somebody to be told, and do nothing."""
    del self
    say("asked to tell", waiters=len(handover.waiters))
    await asyncio.Event().wait()


if not workflow.unsafe.in_sandbox():
    SlotNotifier._notify = never  # type: ignore[method-assign]


@workflow.defn(name="Holder")
class HolderHere(Holder):
    """The same, served by this module."""

    @workflow.run
    async def run(self, on: On, how: str, permit: Permit | None) -> str:
        """Hold until told to go on, and end."""
        return await super().run(on, how, permit)
