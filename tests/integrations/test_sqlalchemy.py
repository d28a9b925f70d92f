"""SQLAlchemy: the page's withdrawal, one after the other, and one that commits after its lease."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from redlease import LeaseLost, StaleFence

from helpers import until_waiting

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from types import ModuleType

    from sqlalchemy.ext.asyncio import AsyncEngine

    from redlease import Redlease

    from billing import Billing
    from how_to import Project


@pytest.fixture
def accounts(load: Callable[..., ModuleType]) -> Any:
    """The page's module."""
    return load("sqlalchemy", "accounts")


@pytest.fixture
async def engine(accounts: Any, project: Project) -> AsyncIterator[AsyncEngine]:
    """A database in which ann has 100."""
    engine = create_async_engine(f"sqlite+aiosqlite:///{project.directory}/accounts.db")
    async with engine.begin() as connection:
        await connection.run_sync(accounts.Base.metadata.create_all)
    async with AsyncSession(engine) as session, session.begin():
        session.add(accounts.Account(name="ann", balance=100))
    yield engine
    await engine.dispose()


async def row_of(engine: AsyncEngine, accounts: Any) -> tuple[int, int]:
    """Return balance and fence of ann's account."""
    async with AsyncSession(engine) as session:
        (account,) = (await session.scalars(select(accounts.Account))).all()
        return account.balance, account.fence


async def test_two_withdrawals(accounts: Any, engine: AsyncEngine, billing: Billing, observer: Redlease) -> None:
    """The second reads what the first has written; its charge fails, so it writes nothing but its fence."""
    first, second = (asyncio.create_task(accounts.withdraw(observer, engine, "ann", amount)) for amount in (10, 20))
    await billing.begun()
    await until_waiting(observer.lock("account:ann"), 1)
    await billing.end("ann")
    assert await first == 90
    fence = (await billing.begun()).fence
    await billing.end("ann", "fail")
    with pytest.raises(RuntimeError, match="the card was refused"):
        await second
    assert await row_of(engine, accounts) == (90, fence)


async def test_a_withdrawal_that_comes_late(
    accounts: Any, engine: AsyncEngine, billing: Billing, observer: Redlease, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that does not notice that its lease is over is refused by the row, and changes nothing."""
    hold = observer.lock("account:ann").hold

    class Unaware:
        """A client whose holds do not cancel: as if its process had been stopped until after the charge."""

        def lock(self, name: str) -> Any:
            lock = observer.lock(name)
            monkeypatch.setattr(lock, "hold", lambda timeout: hold(timeout=timeout, on_lost="signal"))
            return lock

    late = asyncio.create_task(accounts.withdraw(Unaware(), engine, "ann", 10))
    await billing.begun()
    await observer.lock("account:ann").release_all()
    other = asyncio.create_task(accounts.withdraw(observer, engine, "ann", 20))
    fence = (await billing.begun()).fence
    await billing.end("ann")
    await billing.end("ann")
    assert await other == 80
    with pytest.raises(StaleFence):
        await late
    assert await row_of(engine, accounts) == (80, fence)


async def test_a_withdrawal_that_notices_its_loss(
    accounts: Any, engine: AsyncEngine, billing: Billing, observer: Redlease
) -> None:
    """It is cancelled before it writes the balance."""
    withdrawal = asyncio.create_task(accounts.withdraw(observer, engine, "ann", 10))
    fence = (await billing.begun()).fence
    await observer.lock("account:ann").release_all()
    with pytest.raises(LeaseLost):
        await withdrawal
    assert await row_of(engine, accounts) == (100, fence)
