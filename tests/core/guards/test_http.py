"""Fences in HTTP: what the middleware answers, and what the hook of httpx sends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from redlease import LeaseLost, Redlease
from redlease.guards.http import FencingMiddleware, send_fence
from redlease.testing import fake_client

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.requests import Request

URL = "http://ledger/payments"
FENCE = 1_795_342_886_845_427


@pytest.fixture
async def client() -> AsyncIterator[Redlease]:
    """A client without a server."""
    async with fake_client() as client:
        yield client


class Service:
    """An application behind the middleware, and the fences of the requests that reached it."""

    def __init__(self, guard: Any, **options: Any) -> None:
        self.reached: list[int | None] = []
        self.app = Starlette(routes=[Route("/payments", self.pay, methods=["GET", "POST"])])
        self.app.add_middleware(FencingMiddleware, guard=guard, **options)

    async def pay(self, request: Request) -> PlainTextResponse:
        """Take a payment."""
        self.reached.append(request.scope.get("redlease.fence"))
        return PlainTextResponse("paid")

    def http(self, **options: Any) -> httpx.AsyncClient:
        """Return a client of this service."""
        return httpx.AsyncClient(transport=httpx.ASGITransport(self.app), **options)

    async def post(self, *tokens: str, header: str = "Fencing-Token") -> httpx.Response:
        """Send a request with these tokens."""
        async with self.http() as http:
            return await http.post(URL, headers=[(header, token) for token in tokens])


def problem(answer: httpx.Response) -> tuple[int, str]:
    """Return status and title of a refusal."""
    assert answer.headers["content-type"] == "application/problem+json"
    said = answer.json()
    assert said["status"] == answer.status_code
    assert said["detail"]
    return answer.status_code, said["title"]


async def test_a_stale_fence_is_answered_409(client: Redlease) -> None:
    """The application sees the requests whose fence is not lower than one before, and their fence."""
    service = Service(client.guard("ledger"))
    for fence in (FENCE, FENCE, FENCE + 1):
        assert (await service.post(str(fence))).text == "paid"
    answer = await service.post(str(FENCE))
    assert problem(answer) == (409, "Stale fencing token")
    assert f"since {FENCE + 1} was seen" in answer.json()["detail"]
    assert service.reached == [FENCE, FENCE, FENCE + 1]


@pytest.mark.parametrize(
    "tokens",
    [
        [""],
        ["0"],
        ["-1"],
        ["+5"],
        ["05"],
        ["1e3"],
        ["5 6"],
        ["5", "6"],
        ["5", "5"],
        [str(2**53)],
        ["9" * 17],
        ["\u0665"],
    ],
)
async def test_what_is_no_fence_is_answered_400(client: Redlease, tokens: list[str]) -> None:
    """Neither the guard nor the application sees it."""
    service = Service(client.guard("ledger"))
    async with service.http() as http:
        answer = await http.post(URL, headers=[(b"Fencing-Token", token.encode()) for token in tokens])
    assert problem(answer) == (400, "Malformed fencing token")
    assert service.reached == []
    assert (await service.post("1")).text == "paid"


async def test_a_request_without_a_fence_passes_unless_one_is_required(client: Redlease) -> None:
    """It is refused with 428 where a fence is required."""
    guard = client.guard("ledger")
    lenient, strict = Service(guard), Service(guard, required=True)
    assert (await lenient.post()).text == "paid"
    assert problem(await strict.post()) == (428, "Fencing token required")
    assert (await strict.post("5")).text == "paid"
    assert (lenient.reached, strict.reached) == ([None], [5])


async def test_each_request_can_have_a_guard_of_its_own(client: Redlease) -> None:
    """A function of the scope names it, and None lets a request pass unchecked."""

    def guard_of(scope: Any) -> Any:
        account = scope["query_string"].decode()
        return client.guard(account) if scope["method"] == "POST" else None

    service = Service(guard_of, required=True)
    async with service.http(headers={"Fencing-Token": "5"}) as http:
        await client.guard("ada").check(6)
        assert (await http.post(f"{URL}?ada")).status_code == 409
        assert (await http.post(f"{URL}?bob")).status_code == 200
        assert (await http.get(f"{URL}?ada", headers={"Fencing-Token": ""})).status_code == 200


async def test_the_header_may_have_another_name(client: Redlease) -> None:
    """The usual one is not looked at then."""
    service = Service(client.guard("ledger"), header="X-Fence")
    await client.guard("ledger").check(6)
    assert (await service.post("5")).status_code == 200
    assert (await service.post("5", header="x-fence")).status_code == 409
    async with client.lock("ledger").hold() as hold, service.http() as http:
        http.event_hooks = {"request": [send_fence(hold, header="X-Fence")]}
        assert (await http.post(URL)).status_code == 200
        assert service.reached == [None, hold.fence]
    for wrong in ("", "a b", "a:b"):
        with pytest.raises(ValueError, match="no name of a header"):
            Service(client.guard("ledger"), header=wrong).app.build_middleware_stack()
        with pytest.raises(ValueError, match="no name of a header"):
            send_fence(hold, header=wrong)
    for no_guard in ("ledger", None):
        with pytest.raises(ValueError, match="guard must be"):
            FencingMiddleware(service.app, no_guard)  # type: ignore[arg-type]


async def test_without_a_server_nothing_passes() -> None:
    """A fence that cannot be checked is answered 503."""
    unreachable = Redlease.from_url("redis://127.0.0.1:1", call_timeout=0.05)
    service = Service(unreachable.guard("ledger"))
    assert problem(await service.post("5")) == (503, "Fencing token not checked")
    assert service.reached == []
    await unreachable.close()


async def test_what_is_no_request_passes(client: Redlease) -> None:
    """The messages of a server's start and of WebSockets reach the application."""
    seen = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["type"])

    middleware = FencingMiddleware(app, client.guard("ledger"), required=True)
    for kind in ("lifespan", "websocket"):
        await middleware({"type": kind, "headers": []}, None, None)  # type: ignore[arg-type]
    assert seen == ["lifespan", "websocket"]


async def test_the_hook_sends_the_fence_of_the_hold(client: Redlease) -> None:
    """With either client of httpx, and the middleware takes holders in the order of their grants."""
    service = Service(client.guard("ledger"), required=True)
    lock = client.lock("ledger")
    async with lock.hold() as hold:
        async with service.http(event_hooks={"request": [send_fence(hold)]}) as http:
            assert (await http.post(URL)).text == "paid"
        echo = httpx.MockTransport(lambda request: httpx.Response(200, text=request.headers["Fencing-Token"]))
        with httpx.Client(transport=echo, event_hooks={"request": [send_fence(hold)]}) as blocking:
            assert blocking.get(URL).text == str(hold.fence)  # noqa: ASYNC212  nothing is sent anywhere
    assert service.reached == [hold.fence]


async def test_nothing_is_sent_under_a_lost_hold(client: Redlease) -> None:
    """The hook raises LeaseLost before the request leaves."""
    service = Service(client.guard("ledger"))
    hold = await client.lock("ledger").hold(on_lost="signal")
    async with service.http(event_hooks={"request": [send_fence(hold)]}) as http:
        await client.lock("ledger").release(hold.ticket)
        await hold.wait_lost()
        with pytest.raises(LeaseLost):
            await http.post(URL)
    assert service.reached == []
