"""FastAPI and Starlette: the page's application under uvicorn, and what it answers when things go wrong."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Route

from redlease import (
    AcquireTimeout,
    LeaseLost,
    NotReplicated,
    QueueFull,
    RedleaseError,
    StaleFence,
    Unavailable,
    Withdrawn,
)
from redlease.integrations.starlette import problem_handler

from helpers import cancel, eventually, until_waiting
from ports import free_port

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from types import ModuleType

    from redlease import Redlease

    from billing import Billing
    from servers import Server


@contextlib.asynccontextmanager
async def serving(app: Any) -> AsyncIterator[httpx.AsyncClient]:
    """Serve an application with uvicorn, with its lifespan, and yield a client of it."""
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_config=None, ws="none"))
    task = asyncio.create_task(server.serve())
    await eventually(lambda: server.started or task.done())
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as http:
            yield http
    finally:
        server.should_exit = True
        await task


def said(answer: httpx.Response) -> tuple[int, str]:
    """Return status and title of an answer with problem details."""
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert problem["status"] == answer.status_code
    assert "account" not in problem["detail"]
    return answer.status_code, problem["title"]


async def test_requests_for_one_account_run_one_at_a_time(
    load: Callable[..., ModuleType], billing: Billing, observer: Redlease
) -> None:
    """The second request for an account waits for the first, which fails, and another account does not wait."""
    async with serving(load("fastapi", "app").app) as http:
        first = asyncio.create_task(http.post("/accounts/ann/payments"))
        assert (begun := await billing.begun()).account == "ann"
        second = asyncio.create_task(http.post("/accounts/ann/payments"))
        await until_waiting(observer.lock("account:ann"), 1)
        other = asyncio.create_task(http.post("/accounts/bob/payments"))
        assert (await billing.begun()).account == "bob"
        await billing.end("ann", "fail")
        assert (await first).status_code == 500
        later = await billing.begun()
        assert later.account == "ann"
        assert later.fence > begun.fence
        await billing.end("ann")
        await billing.end("bob")
        assert (await second).json() == {"fence": later.fence}
        assert (await other).status_code == 200
    assert not await observer.lock("account:ann").locked()


async def test_what_a_request_without_a_lock_gets(
    load: Callable[..., ModuleType], observer: Redlease, server: Server
) -> None:
    """409 while another one holds it, and 503 when Redis is gone; the handler is not called."""
    async with serving(load("fastapi", "app", TIMEOUT=0.4).app) as http:
        async with observer.lock("account:ann"):
            assert said(await http.post("/accounts/ann/payments")) == (409, "AcquireTimeout")
        server.pause()
        assert said(await http.post("/accounts/ann/payments")) == (503, "Unavailable")
        server.resume()


async def test_a_lease_that_is_lost_in_a_request(
    load: Callable[..., ModuleType], billing: Billing, observer: Redlease
) -> None:
    """The handler is cancelled, and the client gets 500, as nobody knows how far the work is."""
    async with serving(load("fastapi", "app").app) as http:
        request = asyncio.create_task(http.post("/accounts/ann/payments"))
        await billing.begun()
        await observer.lock("account:ann").release_all()
        assert said(await request) == (500, "LeaseLost")


async def test_a_client_that_disconnects(load: Callable[..., ModuleType], billing: Billing, observer: Redlease) -> None:
    """The handler runs to its end under the lock, which is then free."""
    async with serving(load("fastapi", "app").app) as http:
        request = asyncio.create_task(http.post("/accounts/ann/payments"))
        await billing.begun()
        await cancel(request)
        assert await observer.lock("account:ann").locked()
        await billing.end("ann")
        async with observer.lock("account:ann").hold(timeout=5):
            pass


async def test_a_request_that_is_cancelled(
    load: Callable[..., ModuleType], billing: Billing, observer: Redlease
) -> None:
    """As a middleware with a time limit does it: a waiting request leaves the queue, a running one frees the lock."""
    app, lock = load("fastapi", "app").app, observer.lock("account:ann")
    scope: dict[str, Any] = {"type": "http", "method": "POST", "path": "/accounts/ann/payments", "headers": []}
    scope |= {"query_string": b"", "http_version": "1.1", "state": {"redlease": observer}}

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(_message: dict[str, Any]) -> None:
        """Nobody reads the answers."""

    running = asyncio.create_task(app({**scope}, receive, send))
    await billing.begun()
    waiting = asyncio.create_task(app({**scope}, receive, send))
    await until_waiting(lock, 1)
    await cancel(waiting)
    await until_waiting(lock, 0)
    await cancel(running)
    assert not await lock.locked()


async def test_a_late_request_to_the_ledger_is_refused(load: Callable[..., ModuleType], observer: Redlease) -> None:
    """The fence of the hold goes with the request; an older one and a request without one are answered 409 and 428."""
    pay = load("fastapi", "payments").pay
    async with serving(load("fastapi", "ledger").app) as http:
        first = await pay(observer, str(http.base_url).rstrip("/"))
        assert first.status_code == 200
        fence = first.json()["written under"]
        late = await http.post("/entries", headers={"Fencing-Token": str(fence - 1)})
        assert said(late) == (409, "Stale fencing token")
        assert (await http.post("/entries")).status_code == 428


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (AcquireTimeout("", resource="r"), 423),
        (StaleFence(""), 409),
        (LeaseLost(""), 500),
        (RedleaseError(""), 500),
        *((kind(""), 503) for kind in (Unavailable, QueueFull, NotReplicated, Withdrawn)),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_the_answer_to_each_error(error: RedleaseError, status: int) -> None:
    """Plain Starlette answers the same, with 423 for a timeout where that is asked for."""

    async def fails(_request: Request) -> Any:
        raise error

    handlers: Any = {RedleaseError: problem_handler(timeout_status=423)}
    app = Starlette(routes=[Route("/", fails)], exception_handlers=handlers)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://shop") as http:
        assert said(await http.get("/")) == (status, type(error).__name__)
