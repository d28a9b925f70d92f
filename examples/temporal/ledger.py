"""A lock for each customer's ledger, and a database that refuses whoever writes under an older fence.

    make example-temporal
    DATABASE_URL=postgresql://... make example-temporal

The lock keeps writers apart for as long as all goes well. When it does not, and a writer whose workflow is gone writes
late, the database refuses it: each write carries the fence, and a ledger takes none that is older than its last.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sqlite3
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from temporalio import activity, workflow
from temporalio.client import Client
from temporalio.exceptions import ApplicationError, ApplicationErrorCategory
from temporalio.worker import Worker

from redlease_temporal import lock

with workflow.unsafe.imports_passed_through():
    from local import run, servers
    from show import console, verdict

PAYMENTS, AMOUNT = 12, 5
CUSTOMERS = ("ada", "bob", "cid")

CREATE = (
    "CREATE TABLE IF NOT EXISTS ledger (customer TEXT PRIMARY KEY, balance BIGINT NOT NULL, fence BIGINT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS payment (id TEXT PRIMARY KEY, customer TEXT NOT NULL, amount BIGINT NOT NULL)",
)
OPEN = "INSERT INTO ledger (customer, balance, fence) VALUES (?, 0, 0)"
GUARD = "UPDATE ledger SET fence = ? WHERE customer = ? AND fence <= ?"
PAY = "INSERT INTO payment (id, customer, amount) VALUES (?, ?, ?) ON CONFLICT (id) DO NOTHING"
BOOK = "UPDATE ledger SET balance = balance + ? WHERE customer = ?"
BALANCE = "SELECT balance FROM ledger WHERE customer = ?"


@dataclass
class Payment:
    """What is to be booked. `late`: the writer sleeps before it writes, until the ledger has seen another."""

    id: str
    customer: str
    amount: int
    late: bool = False


class Books:
    """The database: PostgreSQL by its URL, SQLite by a file's path."""

    def __init__(self, database: str) -> None:
        self._database = database
        self._postgres = database.startswith("postgres")
        self.late_writer_began = threading.Event()
        self.late_writer_may_go_on = threading.Event()
        self.refusals: list[str] = []

    @contextmanager
    def transaction(self) -> Iterator[Any]:
        """What executes statements; all of them take effect, or none does."""
        with closing(self._connect()) as connection:
            yield lambda sql, *values: connection.execute(sql.replace("?", "%s") if self._postgres else sql, values)
            connection.commit()

    def _connect(self) -> Any:
        if self._postgres:
            import psycopg  # noqa: PLC0415  only who uses PostgreSQL needs it

            return psycopg.connect(self._database)
        return sqlite3.connect(self._database)

    def open(self, customer: str) -> None:
        """Begins a ledger."""
        with self.transaction() as execute:
            for statement in CREATE:
                execute(statement)
            execute(OPEN, customer)

    def balance(self, customer: str) -> int:
        """What a ledger says."""
        with self.transaction() as execute:
            balance: int = execute(BALANCE, customer).fetchone()[0]
        return balance

    @activity.defn
    def book(self, payment: Payment, fence: int) -> None:
        """Books a payment once, however often it is tried, unless a later holder has written."""
        if payment.late:
            self.late_writer_began.set()
            self.late_writer_may_go_on.wait(timeout=60)
        with self.transaction() as execute:
            if execute(GUARD, fence, payment.customer, fence).rowcount == 0:
                self.refusals.append(payment.id)
                message = f"the ledger of {payment.customer} has seen a later fence than {fence}"
                # It is what the fence is for, so the worker does not log it as a failure.
                benign = ApplicationErrorCategory.BENIGN
                raise ApplicationError(message, type="StaleFence", non_retryable=True, category=benign)
            if execute(PAY, payment.id, payment.customer, payment.amount).rowcount == 1:
                execute(BOOK, payment.amount, payment.customer)


@workflow.defn
class Pay:
    """Books a payment while it holds the customer's ledger."""

    @workflow.run
    async def run(self, payment: Payment) -> int:
        """Returns the fence that it was booked under."""
        async with lock(f"ledger:{payment.customer}").hold(timeout=timedelta(minutes=5)) as hold:
            await workflow.execute_activity(
                "book", args=[payment, hold.fence], start_to_close_timeout=timedelta(minutes=1)
            )
        return hold.fence


async def pay(client: Client, task_queue: str, payment: Payment) -> int:
    """Runs one workflow to its end."""
    return await client.execute_workflow(Pay.run, payment, id=payment.id, task_queue=task_queue)


async def pay_late(client: Client, task_queue: str, books: Books, customer: str) -> None:
    """Lets a writer fall asleep and its workflow be terminated; the next one pays, and then the first one wakes up."""
    late, next_one = f"{customer}-late", f"{customer}-next"
    handle = await client.start_workflow(
        Pay.run, Payment(late, customer, 1000, late=True), id=late, task_queue=task_queue
    )
    await asyncio.to_thread(books.late_writer_began.wait, 60)
    await handle.terminate("an operator has lost patience")
    console.print(f"{late}: its workflow is terminated, but its writer only sleeps")
    fence = await pay(client, task_queue, Payment(next_one, customer, AMOUNT))
    console.print(f"{next_one}: paid under fence {fence}")
    books.late_writer_may_go_on.set()
    while not books.refusals:  # noqa: ASYNC110  it is in another thread
        await asyncio.sleep(0.01)
    console.print(f"{late}: woke up, wrote under its older fence, and was refused")


async def main() -> bool:
    """Whether the promises were kept."""
    token = secrets.token_hex(2)
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(8) as threads:
        books = Books(os.environ.get("DATABASE_URL") or str(Path(directory) / "ledger.sqlite"))
        customers = [f"{name}-{token}" for name in CUSTOMERS]
        for customer in customers:
            books.open(customer)
        queue = f"ledger-{token}"
        async with (
            servers() as (client, _),
            Worker(client, task_queue=queue, workflows=[Pay], activities=[books.book], activity_executor=threads),
        ):
            payments = [
                Payment(f"{customer}-{number}", customer, AMOUNT)
                for number in range(1, PAYMENTS + 1)
                for customer in customers
            ]
            await asyncio.gather(*(pay(client, queue, payment) for payment in payments))
            console.print(f"{len(payments)} payments into {len(customers)} ledgers are booked")
            await pay_late(client, queue, books, customers[0])
        balances = [books.balance(customer) for customer in customers]
    expected = [(PAYMENTS + 1) * AMOUNT, *[PAYMENTS * AMOUNT] * (len(customers) - 1)]
    return verdict(
        (balances == expected, "every payment is booked once", f"balances {balances}"),
        (books.refusals == [f"{customers[0]}-late"], "the late writer was refused by its fence", ""),
    )


if __name__ == "__main__":
    run(main)
