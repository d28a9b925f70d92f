"""Sequences for tests: workflows that hand items over, and activities that leave a trace of each item in a file."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import assert_type

from temporalio import activity, workflow
from temporalio.common import RetryPolicy
from temporalio.exceptions import ApplicationError

from redlease_temporal import SequenceFailed, sequence

SOON = RetryPolicy(initial_interval=timedelta(milliseconds=50), backoff_coefficient=1)


@dataclass
class Item:
    """One item: `fails` attempts fail, -1 fails for good, -2 stays until it is cancelled; the pause is in seconds."""

    index: int
    book: str
    fails: int = 0
    pause: float = 0.0


@dataclass
class Receipt:
    """What handling an item returns."""

    index: int
    item_id: str


def trace(book: str) -> list[str]:
    """Return what the activities have written."""
    path = Path(book)
    return path.read_text().splitlines() if path.exists() else []


def note(book: str, line: str) -> None:
    """Write a line, whole."""
    with Path(book).open("a") as file:
        file.write(line + "\n")


@activity.defn
async def post(item: Item) -> Receipt:
    """Book an item, once: its effect is left out if it is there."""
    info = activity.info()
    note(item.book, f"begin {item.index}")
    try:
        await asyncio.sleep(item.pause)
        if item.fails == -1:
            raise ApplicationError("it can not be booked", type="Unbookable", non_retryable=True)
        while item.fails == -2:
            activity.heartbeat()
            await asyncio.sleep(0.05)
        if info.attempt <= item.fails:
            raise ApplicationError("not yet")
        if f"effect {item.index}" not in trace(item.book):
            note(item.book, f"effect {item.index}")
    finally:
        note(item.book, f"end {item.index}")
    return Receipt(item.index, info.activity_id)


@workflow.defn
class Handing:
    """A workflow that hands items over."""

    @workflow.run
    async def run(self, items: list[Item]) -> list[int]:
        """Return the indices of the receipts, and after a failure also -1 and where it was."""
        try:
            receipts = await sequence(
                "ledger:" + items[0].book,
                items,
                post,
                start_to_close_timeout=timedelta(seconds=20),
                heartbeat_timeout=timedelta(seconds=2),
                retry_policy=SOON,
            )
        except SequenceFailed as error:
            return [*(receipt.index for receipt in error.results), -1, error.index]
        assert_type(receipts, list[Receipt])
        assert all(isinstance(receipt, Receipt) for receipt in receipts)
        assert len({receipt.item_id for receipt in receipts}) == len(receipts)
        return [receipt.index for receipt in receipts]


@workflow.defn
class Naming:
    """A workflow that knows by name alone what handles its items, on another task queue."""

    @workflow.run
    async def run(self, items: list[Item], task_queue: str) -> list[int]:
        """Return the indices of the receipts."""
        receipts = await sequence(
            "ledger:" + items[0].book,
            items,
            "post",
            start_to_close_timeout=timedelta(seconds=20),
            task_queue=task_queue,
            result_type=Receipt,
        )
        assert_type(receipts, list[Receipt])
        return [receipt.index for receipt in receipts]


@workflow.defn
class Misusing:
    """A workflow whose items cannot be handed over."""

    @workflow.run
    async def run(self, count: int) -> list[str]:
        """Return the results."""
        return await sequence("large", ["x" * 100_000] * count, "echo", start_to_close_timeout=5)
