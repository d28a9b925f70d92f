"""Where the library meets users' workflows and activities.

Workflow side: the state of a run is set at each entry, the signal of a lost permit is taken before any handler of the
user's, and the permits that a call is made under go into its headers. Activity side: an activity that was begun under
a permit does not run unless that is still held.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from temporalio import activity, workflow
from temporalio.exceptions import ApplicationError
from temporalio.worker import (
    ActivityInboundInterceptor,
    ExecuteActivityInput,
    ExecuteWorkflowInput,
    HandleSignalInput,
    HandleUpdateInput,
    Interceptor,
    StartActivityInput,
    StartChildWorkflowInput,
    StartLocalActivityInput,
    WorkflowInboundInterceptor,
    WorkflowInterceptorClassInput,
    WorkflowOutboundInterceptor,
)

from redlease import RedleaseError

from . import calls
from .errors import LeaseLost, failure
from .exclusive import relay_here
from .keepers import keeper_has
from .limited import admit, rule_of, start_within, wanted
from .relay import Relay
from .requests import Requests
from .run import Run, current, enter, guards_here, read_guards, with_guards
from .slot_calls import Free

T = TypeVar("T")

OWN = "redlease."  # what the names of the library's own activities begin with


class RelayInterceptor(Interceptor):
    """The interceptor of a worker. `relay` is None where only histories are replayed."""

    def __init__(self, relay: Relay | None, task_queue: str, wait_attempt_s: float) -> None:
        self._relay = relay
        new_run = functools.partial(Run, task_queue, wait_attempt_s)
        # The SDK makes one of these for each workflow, with no other arguments than its own.
        members = {
            "new_run": staticmethod(new_run),
            "closing": staticmethod(_nobody if relay is None else relay.closing),
        }
        self._workflow_class = type("LockedWorkflow", (_LockedWorkflow,), members)

    def intercept_activity(self, next: ActivityInboundInterceptor) -> ActivityInboundInterceptor:  # noqa: A002
        return next if self._relay is None else _GuardedActivities(next, self._relay)

    def workflow_interceptor_class(self, _: WorkflowInterceptorClassInput) -> type[WorkflowInboundInterceptor]:
        return self._workflow_class


def _nobody(_: str) -> None:
    """Where histories are replayed, nobody is told."""


class _LockedWorkflow(WorkflowInboundInterceptor):
    new_run: Callable[[], Run]
    closing: Callable[[str], None]

    def init(self, outbound: WorkflowOutboundInterceptor) -> None:
        self._run = self.new_run()
        super().init(_Guarding(outbound))

    async def execute_workflow(self, input: ExecuteWorkflowInput) -> Any:  # noqa: A002
        self._run.inherited = read_guards(input.headers)
        enter(self._run)
        for name, (_, handle) in self._signals().items():
            workflow.set_signal_handler(name, handle)
        info = workflow.info()
        rule = rule_of(info.workflow_type)
        if rule is None:
            return await self._execute(input)
        await admit(rule, input.args)
        try:
            result = await self._execute(input)
        except (Exception, asyncio.CancelledError):
            self._close(info.workflow_id)
            raise
        self._close(info.workflow_id)
        return result

    async def _execute(self, input: ExecuteWorkflowInput) -> Any:  # noqa: A002
        try:
            result = await super().execute_workflow(input)
        except (Exception, asyncio.CancelledError, workflow.ContinueAsNewError):
            await self._run.settle()
            raise
        await self._run.settle()
        return result

    def _close(self, workflow_id: str) -> None:
        if not workflow.unsafe.is_replaying():  # the relay hears of it, and no history does
            self.closing(workflow_id)

    async def handle_signal(self, input: HandleSignalInput) -> None:  # noqa: A002
        enter(self._run)
        # Before the handlers above stand, a dynamic one of the user's would get these signals.
        if input.signal in (own := self._signals()):
            kind, handle = own[input.signal]
            handle(_said(input.args, kind))
        else:
            await super().handle_signal(input)

    def _signals(self) -> dict[str, tuple[type, Callable[[Any], None]]]:
        run = self._run
        return {
            calls.LOST_SIGNAL: (calls.Lost, run.on_lost),
            calls.GRANTED_SIGNAL: (calls.Granted, run.on_granted),
            calls.REFUSED_SIGNAL: (calls.Refused, run.post.on_refused),
            calls.CONFIRM_SIGNAL: (calls.Confirm, run.post.on_confirm),
            calls.FREE_SIGNAL: (Free, run.post.on_free),
        }

    async def handle_update_handler(self, input: HandleUpdateInput) -> Any:  # noqa: A002
        enter(self._run)
        return await super().handle_update_handler(input)


def _said(args: Sequence[Any], kind: type[T]) -> T:
    """What a signal of the library says, as the kind of handler that is set has got it."""
    if isinstance(args[0], kind):
        return args[0]
    # A dynamic handler gets the name first, and then raw values, or in the old style the values.
    value = args[1]
    payload = value[0].payload if isinstance(value, list) else workflow.payload_converter().to_payload(value)
    return workflow.payload_converter().from_payload(payload, kind)


class _Guarding(WorkflowOutboundInterceptor):
    def start_activity(self, input: StartActivityInput) -> workflow.ActivityHandle[Any]:  # noqa: A002
        if not input.activity.startswith(OWN):
            input.headers = with_guards(input.headers)
        return super().start_activity(input)

    def start_local_activity(self, input: StartLocalActivityInput) -> workflow.ActivityHandle[Any]:  # noqa: A002
        if input.activity.startswith(OWN):
            handle = super().start_local_activity(input)
            current().see_through(handle)
            return handle
        input.headers = with_guards(input.headers)
        handle = super().start_local_activity(input)
        run, guards = current(), guards_here()

        def used(_: object) -> None:
            for guard in guards:
                run.on_used(guard.resource, guard.ticket)

        used(handle)
        handle.add_done_callback(used)
        return handle

    async def start_child_workflow(self, input: StartChildWorkflowInput) -> workflow.ChildWorkflowHandle[Any, Any]:  # noqa: A002
        # A child that is to outlive its parent's run is not meant to end with its parent's permit.
        own = input.workflow.startswith(OWN)
        if not own and input.parent_close_policy != workflow.ParentClosePolicy.ABANDON:
            input.headers = with_guards(input.headers)
        rule = rule_of(input.workflow)
        start = functools.partial(super().start_child_workflow, input)
        if rule is None:
            return await start()
        handle: workflow.ChildWorkflowHandle[Any, Any] = await start_within(wanted(rule, input.id, input.args), start)
        return handle


class _GuardedActivities(ActivityInboundInterceptor):
    def __init__(self, next: ActivityInboundInterceptor, relay: Relay) -> None:  # noqa: A002
        super().__init__(next)
        self._relay = relay

    async def execute_activity(self, input: ExecuteActivityInput) -> Any:  # noqa: A002
        relay_here.set(self._relay)
        guards = read_guards(input.headers)
        if guards:
            await asyncio.gather(*(self._check(guard) for guard in guards))
        return await self.next.execute_activity(input)

    async def _check(self, guard: calls.Guard) -> None:
        try:
            held = await self._held(guard)
        except RedleaseError as error:
            raise failure(error, retryable=True) from error
        if not held:
            raise ApplicationError(
                f"resource {guard.resource!r}: the permit (fence {guard.fence}) that activity "
                f"{activity.info().activity_type!r} was begun under is no longer held, so it did not run",
                *(guard.resource, guard.ticket),
                type=LeaseLost.__name__,
                non_retryable=True,
            )

    async def _held(self, guard: calls.Guard) -> bool:
        if guard.kept_by:
            info = activity.info()
            # Both are times of the Temporal server: no permit lapses within the lease that its holder has been told.
            within = not info.is_local and info.started_time.timestamp() * 1000 < guard.until_ms
            return within or await keeper_has(self._relay.temporal, guard)
        return await Requests(self._relay.with_redis()).held(guard.resource, guard.ticket, guard.fence)
