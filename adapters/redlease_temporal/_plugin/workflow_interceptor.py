"""The interceptors of workflows, users' and the library's.

At each entry into workflow code, they set the state of the run. They handle the library's signals before any handler of
the user's, and put the permits that guard a call into its headers, where the activity interceptor reads them.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Sequence
from contextvars import copy_context
from typing import Any, TypeVar

from temporalio import workflow
from temporalio.worker import (
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

from redlease_temporal._admission.rule import Readmission, admission_request, admit, rule_of, start_within
from redlease_temporal._backends.coordinator.contended import ContendedHolders
from redlease_temporal._backends.coordinator.workflow import Coordinator
from redlease_temporal._payloads import locks
from redlease_temporal._payloads.slots import SlotOffer
from redlease_temporal._workflow_side.run import (
    Run,
    current,
    enter,
    fails_the_task,
    read_permit_headers,
    with_permit_headers,
)

T = TypeVar("T")

LIBRARY_PREFIX = "redlease."  # prefix of the names of the library's own activities and workflows


class LockedWorkflow(WorkflowInboundInterceptor):
    """A workflow that may use locks. `new_run` makes the state of a run; `closing` is called when the run ends."""

    new_run: Callable[[], Run]
    closing: Callable[[str], None]

    def init(self, outbound: WorkflowOutboundInterceptor) -> None:
        self._run = self.new_run()
        super().init(_PermitHeaderInterceptor(outbound))

    async def execute_workflow(self, input: ExecuteWorkflowInput) -> Any:  # noqa: A002
        self._run.inherited = read_permit_headers(input.headers)
        enter(self._run)
        for name, (_, handle) in self._signals().items():
            workflow.set_signal_handler(name, handle)
        self._watch_resets()
        info = workflow.info()
        rule = rule_of(info.workflow_type)
        if rule is None:
            return await self._execute(input)
        await admit(rule, input.args)
        readmission = Readmission(rule, input.args)
        self._run.on_reset.append(readmission.admit_again)
        try:
            result = await self._execute(input)
        except (Exception, asyncio.CancelledError) as error:
            self._close(info.workflow_id)
            readmission.raise_refusal(error)
            raise
        self._close(info.workflow_id)
        readmission.raise_refusal()
        return result

    def _watch_resets(self) -> None:
        # The server gives a reset run another random seed, at the event from which it begins again.
        loop, context = asyncio.get_running_loop(), copy_context()

        def on_seed(_: int) -> None:
            loop.call_soon(self._run.confirm_after_reset, context=context)

        workflow.register_random_seed_callback(on_seed)

    async def _execute(self, input: ExecuteWorkflowInput) -> Any:  # noqa: A002
        try:
            result = await super().execute_workflow(input)
        except (Exception, asyncio.CancelledError, workflow.ContinueAsNewError) as error:
            if not fails_the_task(error):  # else what is under way is dropped with the task
                await self._run.wait_until_idle()
            raise
        await self._run.wait_until_idle()
        return result

    def _close(self, workflow_id: str) -> None:
        if not workflow.unsafe.is_replaying():  # `closing` only notifies the relay and leaves nothing in the history
            self.closing(workflow_id)

    async def handle_signal(self, input: HandleSignalInput) -> None:  # noqa: A002
        enter(self._run)
        # Until execute_workflow has set the handlers, a dynamic handler of the user's would receive these signals.
        if input.signal in (signals := self._signals()):
            kind, handle = signals[input.signal]
            await handle_or_drop(input.signal, _handle_payload(handle, input.args, kind))
        elif workflow.info().workflow_type.startswith(LIBRARY_PREFIX):
            await handle_or_drop(input.signal, super().handle_signal(input))
        else:
            await super().handle_signal(input)

    def _signals(self) -> dict[str, tuple[type, Callable[[Any], None]]]:
        run = self._run
        return {
            locks.LOST_SIGNAL: (locks.LostSignal, run.on_lost),
            locks.GRANTED_SIGNAL: (locks.GrantedSignal, run.on_granted),
            locks.REFUSED_SIGNAL: (locks.RefusedSignal, run.mailbox.on_refused),
            locks.CONFIRM_SIGNAL: (locks.ConfirmSignal, run.mailbox.on_confirm),
            locks.OFFER_SIGNAL: (SlotOffer, run.mailbox.on_offer),
        }

    async def handle_update_handler(self, input: HandleUpdateInput) -> Any:  # noqa: A002
        enter(self._run)
        return await super().handle_update_handler(input)


async def handle_or_drop(name: str, handling: Awaitable[None]) -> None:
    """Handles a signal of the library's own; logs and drops one that cannot be handled.

    Anybody may send such a signal by hand with missing or wrong arguments. An error in its handler would fail the
    workflow task again and again.
    """
    try:
        await handling
    except Exception:  # noqa: BLE001  whatever it is, it is logged
        workflow.logger.exception("signal %r cannot be carried out as it was sent: dropping the signal", name)


async def _handle_payload(handle: Callable[[Any], None], args: Sequence[Any], kind: type) -> None:
    handle(_payload_of(args, kind))


class ResourceWorkflowInterceptor(Interceptor):
    """The interceptor of the internal worker, which runs the library's own workflows."""

    def __init__(self, contended: ContendedHolders) -> None:
        self._workflow_class = type("ResourceWorkflow", (_ResourceWorkflow,), {"contended": contended})

    def workflow_interceptor_class(self, _: WorkflowInterceptorClassInput) -> type[WorkflowInboundInterceptor]:
        return self._workflow_class


class _ResourceWorkflow(WorkflowInboundInterceptor):
    contended: ContendedHolders

    async def execute_workflow(self, input: ExecuteWorkflowInput) -> Any:  # noqa: A002
        instance = workflow.instance()
        if isinstance(instance, Coordinator):
            instance.report_holders = self.contended.report
        return await super().execute_workflow(input)

    async def handle_signal(self, input: HandleSignalInput) -> None:  # noqa: A002
        await handle_or_drop(input.signal, super().handle_signal(input))


def _payload_of(args: Sequence[Any], kind: type[T]) -> T:
    """The payload of a library signal, from the arguments that the handler received."""
    if isinstance(args[0], kind):
        return args[0]
    # A dynamic handler gets the name first, and then raw values, or in the old style the values.
    value = args[1]
    payload = value[0].payload if isinstance(value, list) else workflow.payload_converter().to_payload(value)
    return workflow.payload_converter().from_payload(payload, kind)


class _PermitHeaderInterceptor(WorkflowOutboundInterceptor):
    def start_activity(self, input: StartActivityInput) -> workflow.ActivityHandle[Any]:  # noqa: A002
        if not input.activity.startswith(LIBRARY_PREFIX):
            input.headers = with_permit_headers(input.headers)
        return super().start_activity(input)

    def start_local_activity(self, input: StartLocalActivityInput) -> workflow.ActivityHandle[Any]:  # noqa: A002
        if input.activity.startswith(LIBRARY_PREFIX):
            handle = super().start_local_activity(input)
            current().track(handle)
            return handle
        input.headers = with_permit_headers(input.headers)
        return super().start_local_activity(input)

    async def start_child_workflow(self, input: StartChildWorkflowInput) -> workflow.ChildWorkflowHandle[Any, Any]:  # noqa: A002
        # A child that is to outlive its parent's run is not meant to end with its parent's permit.
        is_of_library = input.workflow.startswith(LIBRARY_PREFIX)
        if not is_of_library and input.parent_close_policy != workflow.ParentClosePolicy.ABANDON:
            input.headers = with_permit_headers(input.headers)
        rule = rule_of(input.workflow)
        start = functools.partial(super().start_child_workflow, input)
        if rule is None:
            return await start()
        handle: workflow.ChildWorkflowHandle[Any, Any] = await start_within(
            admission_request(rule, input.id, input.args), start
        )
        return handle
