"""Guards in a database: the fence is checked in the transaction that writes, so that no late write comes between.

For SQLite and PostgreSQL, through SQLAlchemy 2 or plain DB-API connections (sqlite3, psycopg, aiosqlite and others), in
blocking and in async code. SQLAlchemy is needed for `fenced` only: `pip install 'redlease[sql]'`.
"""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Any, Protocol

from redlease._core import limits

from .errors import stale_fence

if TYPE_CHECKING:
    from typing import TypeAlias

    from sqlalchemy import ColumnElement, Update
    from sqlalchemy.orm import InstrumentedAttribute

    Column: TypeAlias = ColumnElement[int] | InstrumentedAttribute[int]
else:
    Update = Column = Any  # for those who look at the types while the program runs, such as frameworks that inject

__all__ = ["FenceTable", "ensure_written", "fenced"]

# How each style of PEP 249 writes the two parameters.
_STYLES = {
    "qmark": ("?", "?"),
    "numeric": (":1", ":2"),
    "format": ("%s", "%s"),
    "pyformat": ("%s", "%s"),
    "named": (":resource", ":fence"),
}
_HIGHER = "is stale, since a higher one was seen; roll back"


class Written(Protocol):
    """The result of a statement: a cursor, or a result of SQLAlchemy."""

    @property
    def rowcount(self) -> int: ...


class FenceTable:
    """A table with the highest fence seen of each resource, for writes that have no row with a fence of its own.

    The check takes part in the caller's transaction, and locks the resource's row until that ends: the write of a later
    holder waits for it. A transaction that is rolled back leaves no trace.

    Args:
        name: The name of the table, with or without a schema.

    Attributes:
        ddl: The statement that creates the table unless it exists.

    Raises:
        ValueError: The name is no identifier.

    Example:
        >>> fences = FenceTable()
        >>> with sqlite3.connect("ledger.sqlite") as connection:  # doctest: +SKIP
        ...     fences.check(connection, "ledger", hold.fence)
        ...     connection.execute("UPDATE ledger SET balance = 90")
    """

    def __init__(self, name: str = "fences") -> None:
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)?", name, re.ASCII):
            raise ValueError(f"the table's name must be an identifier, with or without a schema, not {name!r}")
        self.name = name
        self.ddl = f"CREATE TABLE IF NOT EXISTS {name} (resource TEXT PRIMARY KEY, fence BIGINT NOT NULL)"
        self._upsert = (
            f"INSERT INTO {name} AS seen (resource, fence) VALUES ({{}}, {{}}) "  # noqa: S608  an identifier
            "ON CONFLICT (resource) DO UPDATE SET fence = excluded.fence WHERE seen.fence <= excluded.fence"
        )

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}>"

    def check(self, connection: Any, resource: str, fence: int) -> None:
        """Records the fence, in the connection's transaction, if none higher was seen; the same one may be repeated.

        Under an isolation level above READ COMMITTED the database may refuse with an error of its own when another
        transaction checks the same resource: roll back and try again, as always there.

        Args:
            connection: A connection or session of SQLAlchemy, or a DB-API connection, that is not in autocommit mode.
            resource: The name of what is written, usually that of the lock.
            fence: `hold.fence`, or `permit.fence`.

        Raises:
            StaleFence: A higher fence was seen: roll back.
            ValueError: A parameter is wrong, or the connection commits each statement by itself.
        """
        _check(resource, fence)
        if _is_sqlalchemy(connection):
            recorded = bool(connection.execute(*self._for_sqlalchemy(resource, fence)).fetchall())
        else:
            statement = self._for_driver(connection, resource, fence)
            cursor = connection.cursor()
            try:
                cursor.execute(*statement)
                recorded = cursor.rowcount == 1
            finally:
                cursor.close()
        if not recorded:
            raise stale_fence(resource, fence, _HIGHER)

    async def check_async(self, connection: Any, resource: str, fence: int) -> None:
        """Does what `check` does, on an async connection or session of SQLAlchemy, of psycopg or of aiosqlite."""
        _check(resource, fence)
        if _is_sqlalchemy(connection):
            recorded = bool((await connection.execute(*self._for_sqlalchemy(resource, fence))).fetchall())
        else:
            statement = self._for_driver(connection, resource, fence)
            async with connection.cursor() as cursor:
                await cursor.execute(*statement)
                recorded = cursor.rowcount == 1
        if not recorded:
            raise stale_fence(resource, fence, _HIGHER)

    def _for_sqlalchemy(self, resource: str, fence: int) -> tuple[Any, dict[str, Any]]:
        from sqlalchemy import text  # noqa: PLC0415  it is optional

        # It promises no row count for an INSERT.
        statement = self._upsert.format(*_STYLES["named"]) + " RETURNING fence"
        return text(statement), {"resource": resource, "fence": fence}

    def _for_driver(self, connection: Any, resource: str, fence: int) -> tuple[str, Any]:
        style = _paramstyle(connection)
        if _commits_alone(connection):
            raise ValueError(
                f"the connection commits each statement by itself, so a late write could follow the check of resource "
                f"{resource!r}: begin a transaction, and check and write in it"
            )
        values = {"resource": resource, "fence": fence} if style == "named" else (resource, fence)
        return self._upsert.format(*_STYLES[style]), values


def fenced(statement: Update, fence: int, column: Column | str = "fence") -> Update:
    """Returns an UPDATE of SQLAlchemy that changes only rows without a higher fence, and records the fence in them.

    Args:
        statement: What is to be written.
        fence: `hold.fence`, or `permit.fence`.
        column: The column of that table that holds the fence of the last write, a BIGINT; also by its name.

    Raises:
        ValueError: The statement is no UPDATE, its table has no such column, or the fence is none.

    Example:
        >>> statement = fenced(update(ledger).where(ledger.c.id == 1).values(balance=90), hold.fence)  # doctest: +SKIP
        >>> ensure_written(connection.execute(statement), "ledger", hold.fence)  # doctest: +SKIP
    """
    from sqlalchemy import Update, or_  # noqa: PLC0415  it is optional

    limits.checked_fence(fence)
    if not isinstance(statement, Update):
        raise ValueError(f"only an UPDATE of SQLAlchemy can be fenced, not {statement!r:.80}")
    if isinstance(column, str):
        columns = statement.table.c
        if column not in columns:
            raise ValueError(f"table {statement.table} has no column {column!r} for the fence")
        column = columns[column]
    return statement.where(or_(column.is_(None), column <= fence)).values({column: fence})


def ensure_written(result: Written, resource: str, fence: int) -> None:
    """Raises StaleFence if an UPDATE that compares fences has changed no row.

    Args:
        result: What executing the statement returned: a result of SQLAlchemy, or a DB-API cursor.
        resource: The name of what is written, for the error.
        fence: The fence that the statement compared.

    Raises:
        StaleFence: No row was changed: it has a higher fence, or there is none.
    """
    if result.rowcount == 0:
        raise stale_fence(resource, fence, "changed no row: that has a higher fence, or there is none")


def _check(resource: str, fence: int) -> None:
    limits.checked_text("resource name", resource, limits.NAME_BYTES_MAX)
    limits.checked_fence(fence)


def _is_sqlalchemy(connection: Any) -> bool:
    return any(kind.__module__.startswith("sqlalchemy.") for kind in type(connection).__mro__)


def _paramstyle(connection: Any) -> str:
    """Returns the style in which the driver of a DB-API connection takes parameters."""
    for kind in type(connection).__mro__:
        driver = sys.modules.get(kind.__module__.partition(".")[0])
        style = getattr(driver, "paramstyle", None)
        if style in _STYLES:
            return str(style)
    raise ValueError(f"{connection!r:.80} is no connection of SQLAlchemy or of a DB-API driver")


def _commits_alone(connection: Any) -> bool:
    """Whether each statement is a transaction of its own, as far as the driver tells."""
    if isinstance(getattr(connection, "in_transaction", None), bool):  # sqlite3, aiosqlite
        by_itself = connection.isolation_level is None or getattr(connection, "autocommit", None) is True
        return by_itself and not connection.in_transaction
    if getattr(connection, "autocommit", None) is True:  # psycopg
        return getattr(getattr(connection, "info", None), "transaction_status", 0) == 0
    return False
