"""The workflow that handles a resource's items one at a time. The plugin's internal worker runs it."""

from __future__ import annotations

import asyncio
from collections import deque
from datetime import timedelta

from temporalio import workflow
from temporalio.common import RawValue, RetryPolicy
from temporalio.exceptions import ActivityError, ApplicationError, is_cancelled_exception

from redlease_temporal._workflow_side.mailbox import signal

from .api import (
    APPEND,
    ASK,
    EXTEND,
    PROGRESS,
    SEQUENCE,
    UPDATE_ID_BYTES_MAX,
    WITHDRAW,
    Batch,
    BatchOutcome,
    BatchQuery,
    Handling,
    ItemFailure,
    Progress,
    SequenceState,
    checked_batch,
    reply_signal,
)
from .values import BYTES_MAX, Value, payload_of, size_of, value_of

FINISHED_KEYS_MAX = 1000  # keys of ended batches to remember, so that a repeated delivery is ignored
START = "start"  # the key of the batch whose outcome is the workflow's result
CONTINUED = "Continued"  # failure type: the client sends the update again, to the next run


@workflow.defn(name=SEQUENCE)
class SequenceWorkflow:
    """One run of a sequence. It ends when nothing is left to do, and continues as new before its history is long."""

    @workflow.init
    def __init__(self, state: SequenceState) -> None:
        self._resource, self._handling = state.resource, state.handling
        self._batches = {batch.key: batch for batch in state.batches}
        self._finished_keys = deque(state.finished_keys, FINISHED_KEYS_MAX)  # keys of batches that have ended
        self._handled = state.handled
        self._outcome = state.outcome or BatchOutcome()
        self._bytes = sum(map(_size, state.batches)) + size_of(self._outcome.results)
        self._outcomes: dict[str, BatchOutcome] = {}  # for updates that wait
        self._replies: set[asyncio.Task[None]] = set()
        self._current: workflow.ActivityHandle[RawValue] | None = None
        self._current_id: str | None = None
        self._continuing = False

    @workflow.run
    async def run(self, _: SequenceState) -> BatchOutcome:
        """Handles all items; returns the outcome of the batch it was started with, or fails if that batch failed."""
        try:
            while self._batches:
                if workflow.info().is_continue_as_new_suggested():
                    await self._continue()
                await self._next()
                _raise_if_cancelled()
                if not self._batches:
                    await self._all_replied()
        except asyncio.CancelledError:
            for batch in list(self._batches.values()):
                self._end(batch, ItemFailure("the sequence was cancelled", "Cancelled"))
            await self._all_replied()
            raise
        if self._outcome.failure is not None:
            message = f"item {len(self._outcome.results)}: {self._outcome.failure.message}"
            raise ApplicationError(message, self._outcome, type="SequenceFailed", non_retryable=True)
        return self._outcome

    # Signals, updates and queries

    @workflow.signal(name=EXTEND)
    def extend(self, batch: Batch) -> None:
        """A workflow adds a batch of items."""
        if batch.key in self._finished_keys or batch.key in self._batches:
            return
        self._add(batch)
        try:
            checked_batch(batch, _policy)
        except ValueError as error:
            self._end(batch, ItemFailure(str(error), "ValueError"))
            return
        if self._bytes > BYTES_MAX:
            self._end(
                batch, ItemFailure(f"more than {BYTES_MAX:,} bytes would wait; hand them over later", "QueueFull")
            )

    @workflow.signal(name=WITHDRAW)
    def withdraw(self, key: str) -> None:
        """A workflow withdraws the items that are not done."""
        running = self._current is not None and key == next(iter(self._batches), None)
        if self._remove(key) and running and self._current is not None:
            self._current.cancel()

    @workflow.signal(name=ASK)
    def ask(self, query: BatchQuery) -> None:
        """A workflow asks whether its batch is known: an earlier sequence of this resource may have lost it."""
        if query.key not in self._finished_keys and query.key not in self._batches:
            lost = ItemFailure("the sequence that had it was ended from outside", "SequenceEnded")
            self._reply(query.key, query.reply_to, BatchOutcome(failure=lost))

    @workflow.update(name=APPEND)
    async def append(self, item: RawValue, handling: Handling | None = None) -> RawValue:
        """Appends one item and returns its result. An update that is sent again with its id is the same item."""
        key = _key_of_update()
        if key in self._finished_keys:
            raise ApplicationError(f"update {key!r}: an earlier run handled it, and had its result", type="Handled")
        if key not in self._batches:  # an earlier run may have accepted it and passed it on
            self._add(Batch(key, [value_of(item.payload)], handling or self._handling))
        await workflow.wait_condition(lambda: key in self._outcomes or self._continuing)
        if key not in self._outcomes:
            raise ApplicationError("the sequence continues as a new run: send it again under its id", type=CONTINUED)
        outcome = self._outcomes.pop(key)
        if outcome.failure is not None:
            raise ApplicationError(outcome.failure.message, type=outcome.failure.type, non_retryable=True)
        return RawValue(payload_of(outcome.results[0]))

    @append.validator
    def _may_append(self, item: RawValue, handling: Handling | None = None) -> None:  # noqa: ARG002
        if len(_key_of_update().encode()) > UPDATE_ID_BYTES_MAX:
            raise ApplicationError(f"its id has more than {UPDATE_ID_BYTES_MAX} bytes", type="ValueError")
        if self._bytes + size_of([value_of(item.payload)]) > BYTES_MAX:
            raise ApplicationError(f"more than {BYTES_MAX:,} bytes would wait: append it later", type="QueueFull")

    @workflow.query(name=PROGRESS)
    def progress(self) -> Progress:
        """How far the sequence is."""
        queued = sum(len(batch.items) - len(batch.results) for batch in self._batches.values())
        return Progress(self._resource, self._handled, queued, self._current_id)

    # Handling items

    async def _next(self) -> None:
        """Handles the next item; no other starts before it has ended."""
        batch = next(iter(self._batches.values()))
        handling, index = batch.handling, len(batch.results)
        self._current_id = f"{batch.key}:{index}"
        self._current = workflow.start_activity(
            handling.activity,
            RawValue(payload_of(batch.items[index])),
            result_type=RawValue,
            activity_id=self._current_id,
            task_queue=handling.task_queue,
            start_to_close_timeout=_ms(handling.start_to_close_ms),
            heartbeat_timeout=None if handling.heartbeat_ms is None else _ms(handling.heartbeat_ms),
            retry_policy=_policy(handling),
            # A cancelled activity may run on for a while, and the next one must not start beside it.
            cancellation_type=workflow.ActivityCancellationType.WAIT_CANCELLATION_COMPLETED,
            summary=f"{self._resource}: item {index + 1} of {len(batch.items)}",
        )
        try:
            result = await self._current
        except ActivityError as error:
            if is_cancelled_exception(error) and batch.key in self._batches:
                raise asyncio.CancelledError from error
            self._end(batch, _failure(error))
        else:
            # an operator may have completed it without a result
            payload = workflow.payload_converter().to_payload(None) if result is None else result.payload
            self._done(batch, value_of(payload))
        finally:
            self._current = self._current_id = None

    def _done(self, batch: Batch, result: Value) -> None:
        self._handled += 1
        if batch.key not in self._batches:
            return  # it was withdrawn meanwhile
        if self._bytes + (size := size_of([result])) > BYTES_MAX:
            self._end(batch, ItemFailure("it was done, but its result is too large to be kept", "ResultTooLarge"))
            return
        self._bytes += size
        batch.results.append(result)
        if len(batch.results) == len(batch.items):
            self._end(batch, None)

    def _end(self, batch: Batch, failure: ItemFailure | None) -> None:
        """Ends a batch and notifies whoever waits for it."""
        if not self._remove(batch.key):
            return  # it was withdrawn
        outcome = BatchOutcome(batch.results, failure)
        if batch.key == START:
            self._outcome = outcome
            self._bytes += size_of(outcome.results)
        elif batch.reply_to:
            self._reply(batch.key, batch.reply_to, outcome)
        else:
            self._outcomes[batch.key] = outcome

    def _add(self, batch: Batch) -> None:
        self._batches[batch.key] = batch
        self._bytes += _size(batch)

    def _remove(self, key: str) -> bool:
        batch = self._batches.pop(key, None)
        if batch is None:
            return False
        self._finished_keys.append(key)
        self._bytes -= _size(batch)
        return True

    def _reply(self, key: str, reply_to: str, outcome: BatchOutcome) -> None:
        reply = asyncio.ensure_future(self._send_outcome(key, reply_to, outcome))
        self._replies.add(reply)
        reply.add_done_callback(self._replies.discard)

    async def _send_outcome(self, key: str, reply_to: str, outcome: BatchOutcome) -> None:
        if not await signal(reply_to, reply_signal(key), outcome):
            workflow.logger.info("nobody waits any more for the items that %s handed over", reply_to)

    async def _all_replied(self) -> None:
        """Waits until all replies are sent: a signal sent as the run closes would not be delivered."""
        await workflow.wait_condition(lambda: not self._replies and workflow.all_handlers_finished())

    async def _continue(self) -> None:
        self._continuing = True  # the waiting updates fail, and their clients send them again
        await self._all_replied()
        state = SequenceState(
            self._resource,
            self._handling,
            list(self._batches.values()),
            list(self._finished_keys),
            self._handled,
            self._outcome,
        )
        workflow.continue_as_new(state)


def _key_of_update() -> str:
    """The key of the item whose update is being handled."""
    info = workflow.current_update_info()
    key = info.id if info is not None else ""
    return f"update {START}" if key == START else key


def _size(batch: Batch) -> int:
    return size_of(batch.items) + size_of(batch.results)


def _raise_if_cancelled() -> None:
    """Raises if the run was cancelled, even if its activity completed nevertheless."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


def _ms(ms: int) -> timedelta:
    return timedelta(milliseconds=ms)


def _policy(handling: Handling) -> RetryPolicy:
    longest = handling.maximum_interval_ms
    return RetryPolicy(
        initial_interval=_ms(handling.initial_interval_ms),
        backoff_coefficient=handling.backoff,
        maximum_interval=None if longest is None else _ms(longest),
        maximum_attempts=handling.maximum_attempts,
        non_retryable_error_types=handling.non_retryable,
    )


def _failure(error: ActivityError) -> ItemFailure:
    cause = error.cause or error
    kind = cause.type if isinstance(cause, ApplicationError) and cause.type else type(cause).__name__
    return ItemFailure(getattr(cause, "message", str(cause)), kind)
