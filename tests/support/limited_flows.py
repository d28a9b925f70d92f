"""Workflows whose number is limited, for the tests of admission."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import timedelta

from temporalio import workflow
from temporalio.common import RetryPolicy
from temporalio.exceptions import ApplicationError

from redlease_temporal import WorkflowConcurrencyLimitExceeded, concurrency


@dataclass
class Job:
    """What a workflow is started with: `how` is how it goes on when it is told to."""

    customer: str = "a"
    how: str = "complete"


class Told:
    """What waits until it is told to go on."""

    def __init__(self) -> None:
        self._proceed = False

    @workflow.signal
    def proceed(self) -> None:
        """Let it go on."""
        self._proceed = True

    @workflow.update
    def look(self) -> str:
        """Return the run."""
        return workflow.info().run_id

    async def told(self) -> None:
        """Wait until it is."""
        await workflow.wait_condition(lambda: self._proceed)


@concurrency(max=2)
@workflow.defn
class Two(Told):
    """Of which two run at once."""

    @workflow.run
    async def run(self, job: Job) -> str:
        """End as asked for, when told to."""
        await self.told()
        if job.how == "fail":
            raise ApplicationError("as was asked for", non_retryable=True)
        if job.how == "retry" and workflow.info().attempt < 3:
            raise ApplicationError("as was asked for")
        if job.how.startswith("continue"):
            workflow.continue_as_new(Job(job.customer, job.how.removeprefix("continue ")))
        return job.how


@concurrency(max=1, key=lambda job: job.customer)
@workflow.defn
class OneEach(Told):
    """Of which one runs for each customer."""

    @workflow.run
    async def run(self, job: Job) -> str:
        """End when told to."""
        await self.told()
        return job.customer


@workflow.defn
class Parent(Told):
    """A workflow that starts limited children."""

    @workflow.run
    async def run(self, count: int) -> list[str]:
        """Return how each start went, and end when told to."""
        outcomes = []
        handles = []
        for number in range(count):
            try:
                handle = await workflow.start_child_workflow(
                    OneEach.run,
                    Job(customer="child"),
                    id=f"{workflow.info().workflow_id}-{number}",
                    run_timeout=timedelta(minutes=1),
                )
            except WorkflowConcurrencyLimitExceeded as error:
                outcomes.append(f"{error.workflow_type} {error.partition_key} {error.limit}")
            else:
                handles.append(handle)
                outcomes.append("started")
        await self.told()
        for handle in handles:
            await handle.signal(OneEach.proceed)
            outcomes.append(await handle)
        return outcomes


@workflow.defn
class Hasty:
    """A workflow that gives the start of a limited child up when it has hardly begun."""

    @workflow.run
    async def run(self, turns: int) -> str:
        """Return how that ended."""
        child_id = f"{workflow.info().workflow_id}-child"
        start = asyncio.create_task(workflow.start_child_workflow(OneEach.run, Job(customer="hasty"), id=child_id))
        for _ in range(turns):
            await asyncio.sleep(0)
        start.cancel()
        try:
            await start
        except asyncio.CancelledError:
            return "given up"
        return "started"


class Replaced(Told):
    """What ends when it is told to, or when it is cancelled: at once, or "slow", when it is told to, or "never"."""

    def __init__(self) -> None:
        super().__init__()
        self._is_cancelled = False
        self._has_begun = False

    @workflow.update
    async def begun(self) -> None:
        """Return when its body runs."""
        await workflow.wait_condition(lambda: self._has_begun)

    @workflow.update
    async def cancelled(self) -> None:
        """Return when it is."""
        await workflow.wait_condition(lambda: self._is_cancelled)

    async def work(self, job: Job) -> str:
        """Go on until then."""
        self._has_begun = True
        try:
            await self.told()
        except asyncio.CancelledError:
            self._is_cancelled = True
            if job.how != "complete":
                await self.told()
            if job.how != "never":
                raise
        return job.how


@concurrency(max=1, key=lambda job: job.customer, when_full="replace", grace=60)
@workflow.defn
class Newest(Replaced):
    """Of which the newest of each customer runs."""

    @workflow.run
    async def run(self, job: Job) -> str:
        """End as asked for."""
        return await self.work(job)


@concurrency(max=1, key=lambda job: job.customer, when_full="replace", grace=60, backend="slots")
@workflow.defn
class NewestBySlots(Replaced):
    """The same without Redis."""

    @workflow.run
    async def run(self, job: Job) -> str:
        """End as asked for."""
        return await self.work(job)


@concurrency(max=2, when_full="replace", grace=2)
@workflow.defn
class NewestTwo(Replaced):
    """Of which the newest two run, if the oldest ends in time."""

    @workflow.run
    async def run(self, job: Job) -> str:
        """End as asked for."""
        return await self.work(job)


@workflow.defn
class ParentOfNewest(Told):
    """A workflow that starts a child in place of another workflow."""

    def __init__(self) -> None:
        super().__init__()
        self._has_child = False

    @workflow.update
    async def child_started(self) -> None:
        """Return when it is."""
        await workflow.wait_condition(lambda: self._has_child)

    @workflow.run
    async def run(self, job: Job) -> str:
        """Return what the child does."""
        child = await workflow.start_child_workflow(Newest.run, job, id=f"{workflow.info().workflow_id}-child")
        self._has_child = True
        return await child


AGAIN = RetryPolicy(initial_interval=timedelta(milliseconds=200), maximum_attempts=3)


@concurrency(max=2, key=lambda job: job.customer, backend="slots")
@workflow.defn
class TwoBySlots(Told):
    """Of which two run at once for each customer, without Redis."""

    @workflow.run
    async def run(self, job: Job) -> str:
        """End as asked for, when told to."""
        await self.told()
        if job.how == "fail":
            raise ApplicationError("as was asked for", non_retryable=True)
        if job.how.startswith("continue"):
            workflow.continue_as_new(Job(job.customer, job.how.removeprefix("continue ")))
        return job.how


@workflow.defn
class ParentBySlots(Told):
    """A workflow that starts limited children, without Redis."""

    @workflow.run
    async def run(self, customer: str, count: int) -> int:
        """Start children until one is refused, and end when told to; return how many were started."""
        for number in range(count):
            try:
                await workflow.start_child_workflow(
                    TwoBySlots.run,
                    Job(customer),
                    id=f"{workflow.info().workflow_id}-{number}",
                    parent_close_policy=workflow.ParentClosePolicy.TERMINATE,
                )
            except WorkflowConcurrencyLimitExceeded:
                await self.told()
                return number
        return count
