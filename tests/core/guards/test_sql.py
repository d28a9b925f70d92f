"""Guards in SQLite and PostgreSQL, through plain drivers and through SQLAlchemy, blocking and async."""

from __future__ import annotations

import asyncio
import sqlite3
from itertools import count
from typing import TYPE_CHECKING, Any

import aiosqlite
import psycopg
import pytest
from sqlalchemy import BigInteger, Column, Integer, MetaData, Table, delete, update
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from redlease import StaleFence
from redlease.guards.sql import FenceTable, ensure_written, fenced

from databases import IN_POSTGRES, IN_SQLITE, database
from helpers import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

FENCE = 1_795_342_886_845_427
_numbers = count(1)

KINDS = [*IN_SQLITE, *(pytest.param(kind, marks=pytest.mark.slow) for kind in IN_POSTGRES)]
THROUGH_SQLALCHEMY = [kind for kind in KINDS if "sqlalchemy" in str(kind)]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Each kind of connection in turn."""
    return str(request.param)


@pytest.fixture
def place(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> str:
    """The file or the server."""
    return str(request.getfixturevalue("postgres") if kind in IN_POSTGRES else tmp_path / "data.sqlite")


@pytest.fixture
async def begin(kind: str, place: str) -> AsyncIterator[Callable[[], Any]]:
    """What begins a transaction, on a connection of its own."""
    async with database(kind, place) as begin:
        yield begin


@pytest.fixture
async def fences(begin: Callable[[], Any]) -> FenceTable:
    """A table of fences that no other test uses."""
    fences = FenceTable(f"fences_{next(_numbers)}")
    async with begin() as transaction:
        await transaction.execute(fences.ddl)
        await transaction.execute(fences.ddl)
    return fences


@pytest.fixture
async def ledger(begin: Callable[[], Any]) -> Table:
    """A table with a fence in each row, one of which was never written under any."""
    name = f"ledger_{next(_numbers)}"
    async with begin() as transaction:
        await transaction.execute(f"CREATE TABLE {name} (id INTEGER PRIMARY KEY, balance INTEGER, fence BIGINT)")
        await transaction.execute(f"INSERT INTO {name} VALUES (1, 100, {FENCE}), (2, 100, NULL)")
    columns = Column("id", Integer, primary_key=True), Column("balance", Integer), Column("fence", BigInteger)
    return Table(name, MetaData(), *columns)


async def test_a_table_refuses_a_lower_fence(begin: Callable[[], Any], fences: FenceTable) -> None:
    """A fence as high as the highest seen of its resource passes, in the same transaction and in later ones."""
    async with begin() as transaction:
        for fence in (FENCE, FENCE, FENCE + 1):
            await transaction.check(fences, "a", fence)
    async with begin() as transaction:
        await transaction.check(fences, "a", FENCE + 1)
        await transaction.check(fences, "b", FENCE)
    for fence in (FENCE, 1):
        with pytest.raises(StaleFence, match=f"resource 'a': fence {fence} is stale") as refused:
            async with begin() as transaction:
                await transaction.check(fences, "a", fence)
        assert (refused.value.resource, refused.value.fence) == ("a", fence)


async def test_a_refused_transaction_writes_nothing(begin: Callable[[], Any], fences: FenceTable) -> None:
    """What it wrote before the check is rolled back with it; of one that fails later, the check is too."""
    table = f"{fences.name}_log"
    async with begin() as transaction:
        await transaction.execute(f"CREATE TABLE {table} (entry INTEGER)")
        await transaction.check(fences, "a", 5)
    with pytest.raises(StaleFence):
        async with begin() as transaction:
            await transaction.execute(f"INSERT INTO {table} VALUES (1)")
            await transaction.check(fences, "a", 4)
    with pytest.raises(ZeroDivisionError):
        async with begin() as transaction:
            await transaction.check(fences, "a", 6)
            raise ZeroDivisionError
    async with begin() as transaction:
        await transaction.check(fences, "a", 5)
        assert await transaction.value(f"SELECT count(*) FROM {table}") == 0


@pytest.mark.parametrize("kind", THROUGH_SQLALCHEMY)
async def test_an_update_is_fenced(begin: Callable[[], Any], ledger: Table) -> None:
    """It changes a row without a higher fence, and a lower one changes nothing."""
    for row, fence, balance in ((1, FENCE, 90), (1, FENCE + 1, 80), (2, 5, 70)):
        statement = update(ledger).where(ledger.c.id == row).values(balance=balance)
        async with begin() as transaction:
            ensure_written(await transaction.execute(fenced(statement, fence)), "ledger", fence)
    for row, fence in ((1, FENCE), (2, 4)):
        with pytest.raises(StaleFence, match=f"resource 'ledger': fence {fence} changed no row"):
            async with begin() as transaction:
                statement = fenced(update(ledger).where(ledger.c.id == row).values(balance=0), fence)
                ensure_written(await transaction.execute(statement), "ledger", fence)
    async with begin() as transaction:
        assert await transaction.value(f"SELECT balance FROM {ledger.name} WHERE id = 1") == 80
        assert await transaction.value(f"SELECT fence FROM {ledger.name} WHERE id = 1") == FENCE + 1
        assert await transaction.value(f"SELECT balance FROM {ledger.name} WHERE id = 2") == 70


@pytest.mark.parametrize("kind", THROUGH_SQLALCHEMY)
async def test_an_update_of_a_mapped_class_is_fenced(begin: Callable[[], Any], ledger: Table) -> None:
    """The column may be named by an attribute of the class."""

    class Base(DeclarativeBase):
        """What mapped classes stand on."""

    class Account(Base):
        """A row of the ledger."""

        __tablename__ = ledger.name
        id: Mapped[int] = mapped_column(primary_key=True)
        balance: Mapped[int]
        fence: Mapped[int] = mapped_column(BigInteger)

    statement = update(Account).where(Account.id == 1).values(balance=90)
    for column in ("fence", Account.fence):
        async with begin() as transaction:
            result = await transaction.execute(fenced(statement, FENCE + 1, column))
            ensure_written(result, "ledger", FENCE + 1)
    with pytest.raises(StaleFence):
        async with begin() as transaction:
            ensure_written(await transaction.execute(fenced(statement, FENCE)), "ledger", FENCE)


async def test_the_cursor_of_a_driver_tells_that_nothing_was_written(begin: Callable[[], Any], ledger: Table) -> None:
    """`ensure_written` serves a condition that the caller wrote as well."""
    for fence, is_stale in ((FENCE, False), (FENCE - 1, True)):
        async with begin() as transaction:
            result = await transaction.execute(
                f"UPDATE {ledger.name} SET fence = {fence} WHERE id = 1 AND fence <= {fence}"
            )
            if is_stale:
                with pytest.raises(StaleFence):
                    ensure_written(result, "ledger", fence)
            else:
                ensure_written(result, "ledger", fence)


def test_what_cannot_be_fenced_is_refused(tmp_path: Path) -> None:
    """It is a mistake of the caller, and nothing is executed."""
    table = Table("t", MetaData(), Column("id", Integer))
    with pytest.raises(ValueError, match="only an UPDATE"):
        fenced(delete(table), 5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="table t has no column 'fence'"):
        fenced(update(table), 5)
    with pytest.raises(ValueError, match="a fence is a whole number"):
        fenced(update(table), 0, table.c.id)
    for name in ("", "a b", "a;b", "a.b.c", "1a"):
        with pytest.raises(ValueError, match="must be an identifier"):
            FenceTable(name)
    with sqlite3.connect(tmp_path / "x") as connection:
        with pytest.raises(ValueError, match="resource name"):
            FenceTable().check(connection, "", 5)
        with pytest.raises(ValueError, match="a fence is a whole number"):
            FenceTable().check(connection, "a", 2**53)
    connection.close()
    with pytest.raises(ValueError, match="no connection of SQLAlchemy or of a DB-API driver"):
        FenceTable().check(object(), "a", 5)


async def test_a_connection_of_sqlite_that_commits_by_itself_is_refused(tmp_path: Path) -> None:
    """A check of its own transaction keeps no late write away; in a transaction it does."""
    fences = FenceTable()
    connection = sqlite3.connect(tmp_path / "data", isolation_level=None)
    connection.execute(fences.ddl)
    with pytest.raises(ValueError, match="the connection commits each statement by itself"):
        fences.check(connection, "a", 5)
    connection.execute("BEGIN")
    fences.check(connection, "a", 5)
    connection.execute("COMMIT")
    connection.close()
    async with aiosqlite.connect(tmp_path / "data", isolation_level=None) as other:
        with pytest.raises(ValueError, match="commits each statement by itself"):
            await fences.check_async(other, "a", 5)
        await other.execute("BEGIN")
        await fences.check_async(other, "a", 5)
        await other.execute("COMMIT")


@pytest.mark.slow
async def test_a_connection_of_postgresql_that_commits_by_itself_is_refused(postgres: str) -> None:
    """As on SQLite; `connection.transaction()` begins one."""
    fences = FenceTable("public.fences_autocommit")
    async with await psycopg.AsyncConnection.connect(postgres, autocommit=True) as connection:
        await connection.execute(fences.ddl)
        with pytest.raises(ValueError, match="commits each statement by itself"):
            await fences.check_async(connection, "a", 5)
        async with connection.transaction():
            await fences.check_async(connection, "a", 5)
    with psycopg.connect(postgres, autocommit=True) as blocking:
        with pytest.raises(ValueError, match="commits each statement by itself"):
            fences.check(blocking, "a", 5)
        with blocking.transaction():
            fences.check(blocking, "a", 5)


@pytest.mark.slow
@pytest.mark.parametrize("outcome", ["commit", "rollback"])
@pytest.mark.parametrize(("first", "second"), [(5, 6), (6, 5)])
async def test_a_check_waits_for_the_transaction_before_it(
    postgres: str, outcome: str, first: int, second: int
) -> None:
    """The second holder's check sees what became of the first's, so their writes are in the order of their fences."""
    fences = FenceTable(f"fences_{outcome}_{first}")
    connect = psycopg.AsyncConnection.connect
    async with await connect(postgres) as one, await connect(postgres) as other, await connect(postgres) as watching:
        await one.execute(fences.ddl)
        await fences.check_async(one, "a", 1)
        await one.commit()
        await fences.check_async(one, "a", first)
        checking = asyncio.create_task(fences.check_async(other, "a", second))

        async def waits() -> Any:
            await watching.rollback()
            found = await watching.execute(
                "SELECT 1 FROM pg_locks WHERE pid = %s AND NOT granted", (other.info.backend_pid,)
            )
            return await found.fetchone()

        await eventually(waits)
        assert not checking.done()
        await (one.commit() if outcome == "commit" else one.rollback())
        if outcome == "commit" and first > second:
            with pytest.raises(StaleFence):
                await checking
        else:
            await checking
