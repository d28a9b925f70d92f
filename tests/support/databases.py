"""The databases that a fence guards, each through every kind of connection, blocking and async, as one interface."""

from __future__ import annotations

import contextlib
import sqlite3
from typing import TYPE_CHECKING, Any, Protocol

import aiosqlite
import psycopg
import sqlalchemy
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from redlease.guards.sql import FenceTable

IN_SQLITE = ("sqlite3", "aiosqlite", "sqlalchemy sqlite", "sqlalchemy aiosqlite")
IN_POSTGRES = ("psycopg", "psycopg async", "sqlalchemy psycopg", "sqlalchemy psycopg async")


class Transaction(Protocol):
    """What is done in one transaction."""

    connection: Any

    async def check(self, fences: FenceTable, resource: str, fence: int) -> None:
        """Check a fence."""

    async def execute(self, statement: Any) -> Any:
        """Execute a statement, and return its result or cursor."""

    async def value(self, statement: str) -> Any:
        """Return the first value of the first row."""


class Blocking:
    """A transaction on a blocking connection."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection

    async def check(self, fences: FenceTable, resource: str, fence: int) -> None:
        """Check a fence."""
        fences.check(self.connection, resource, fence)

    async def execute(self, statement: Any) -> Any:
        """Execute a statement."""
        return self.connection.execute(_as_taken(self.connection, statement))

    async def value(self, statement: str) -> Any:
        """Return the first value of the first row."""
        return (await self.execute(statement)).fetchone()[0]


class Async:
    """A transaction on an async connection."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection

    async def check(self, fences: FenceTable, resource: str, fence: int) -> None:
        """Check a fence."""
        await fences.check_async(self.connection, resource, fence)

    async def execute(self, statement: Any) -> Any:
        """Execute a statement."""
        return await self.connection.execute(_as_taken(self.connection, statement))

    async def value(self, statement: str) -> Any:
        """Return the first value of the first row."""
        row = (await self.execute(statement)).fetchone()
        return (row if isinstance(row, tuple | sqlalchemy.Row) else await row)[0]


def _as_taken(connection: Any, statement: Any) -> Any:
    taken_as_text = isinstance(statement, str) and type(connection).__module__.startswith("sqlalchemy")
    return sqlalchemy.text(statement) if taken_as_text else statement


@contextlib.asynccontextmanager
async def database(kind: str, place: str) -> AsyncIterator[Callable[[], Any]]:
    """Yield what begins a transaction, on a connection of its own, in the file or the server at `place`."""
    async with contextlib.AsyncExitStack() as stack:
        if kind.startswith("sqlalchemy"):
            engine: Any = _engine(kind, place)
            if kind.endswith((" sqlite", " psycopg")):
                stack.callback(engine.dispose)
                yield lambda: _with_session(Session(engine))
            else:
                stack.push_async_callback(engine.dispose)
                yield lambda: _with_async_session(AsyncSession(engine))
        else:
            yield lambda: _DRIVERS[kind](place)


def _engine(kind: str, place: str) -> Any:
    url = {
        "sqlalchemy sqlite": f"sqlite:///{place}",
        "sqlalchemy aiosqlite": f"sqlite+aiosqlite:///{place}",
    }.get(kind, place.replace("postgresql:", "postgresql+psycopg:"))
    asynchronous = kind.endswith(("aiosqlite", "async"))
    return create_async_engine(url) if asynchronous else sqlalchemy.create_engine(url)


@contextlib.asynccontextmanager
async def _with_session(session: Session) -> AsyncIterator[Transaction]:
    with session, session.begin():
        yield Blocking(session)


@contextlib.asynccontextmanager
async def _with_async_session(session: AsyncSession) -> AsyncIterator[Transaction]:
    async with session, session.begin():
        yield Async(session)


@contextlib.asynccontextmanager
async def _sqlite3(place: str) -> AsyncIterator[Transaction]:
    with contextlib.closing(sqlite3.connect(place)) as connection, connection:
        yield Blocking(connection)


@contextlib.asynccontextmanager
async def _aiosqlite(place: str) -> AsyncIterator[Transaction]:
    async with aiosqlite.connect(place) as connection:
        yield Async(connection)
        await connection.commit()


@contextlib.asynccontextmanager
async def _psycopg(place: str) -> AsyncIterator[Transaction]:
    with psycopg.connect(place) as connection:
        yield Blocking(connection)


@contextlib.asynccontextmanager
async def _psycopg_async(place: str) -> AsyncIterator[Transaction]:
    async with await psycopg.AsyncConnection.connect(place) as connection:
        yield Async(connection)


_DRIVERS: dict[str, Callable[[str], contextlib.AbstractAsyncContextManager[Transaction]]] = {
    "sqlite3": _sqlite3,
    "aiosqlite": _aiosqlite,
    "psycopg": _psycopg,
    "psycopg async": _psycopg_async,
}
