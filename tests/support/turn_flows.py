"""Workflows that hold with a key, under limits for each key and rates."""

from __future__ import annotations

from dataclasses import dataclass

from temporalio import workflow

from redlease_temporal import Permit, Rate, Semaphore, semaphore


@dataclass
class Use:
    """What a workflow asks for. `rate`, `key_rate`: grants in `per` seconds; `waiters`: of its key."""

    resource: str
    capacity: int = 1
    key: str | None = None
    share: float = 1
    per_key: int | None = None
    rate: int | None = None
    key_rate: int | None = None
    per: float = 1
    waiters: int | None = None
    backend: str = "redis"
    endpoint: str | None = None

    def pool(self) -> Semaphore:
        """Return the primitive."""
        return semaphore(
            self.resource,
            self.capacity,
            per_key=self.per_key,
            rate=None if self.rate is None else Rate(self.rate, per=self.per),
            per_key_rate=None if self.key_rate is None else Rate(self.key_rate, per=self.per),
            backend=self.backend,
            endpoint=self.endpoint,
            max_waiters_per_key=self.waiters,
        )


@workflow.defn
class Turn:
    """A hold that lasts until it is told to go on, and which another run may continue."""

    def __init__(self) -> None:
        self._permit: Permit | None = None
        self._go = False

    @workflow.run
    async def run(self, use: Use, stays: bool, adopted: Permit | None = None) -> Permit:
        """Hold; return the permit."""
        pool = use.pool()
        request = pool.hold(key=use.key, share=use.share)
        async with request if adopted is None else await pool.adopt(adopted) as hold:
            self._permit = hold.permit
            await workflow.wait_condition(lambda: self._go or not stays)
            await workflow.wait_condition(workflow.all_handlers_finished)
            return hold.permit

    @workflow.update
    async def until_held(self) -> Permit:
        """Return the permit as soon as there is one."""
        await workflow.wait_condition(lambda: self._permit is not None)
        assert self._permit is not None
        return self._permit

    @workflow.signal
    def proceed(self) -> None:
        """Go on."""
        self._go = True


@workflow.defn
class Try:
    """One request that does not wait."""

    @workflow.run
    async def run(self, use: Use) -> bool:
        """Return whether it was granted; the permit is kept until its lease ends."""
        return await use.pool().try_acquire(key=use.key) is not None
