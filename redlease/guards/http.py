"""Fences in HTTP: a middleware that refuses requests under a stale one, and a hook by which httpx sends it."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Generator, MutableMapping
from typing import Any

from redlease._core import limits
from redlease._core.hold import Hold
from redlease.errors import StaleFence, Unavailable

from .redis import Guard

__all__ = ["HEADER", "SCOPE_KEY", "FencingMiddleware", "send_fence"]

HEADER = "Fencing-Token"
SCOPE_KEY = "redlease.fence"  # where the application finds the fence that was checked

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class FencingMiddleware:
    """ASGI middleware that checks the fence in a request's header, and answers a stale one in place of the application.

    Answers are problem details (RFC 9457): 409 to a stale fence, 400 to a header that is no fence, 428 to a request
    without one where it is required, and 503 if the guard's server cannot be reached. The application finds the fence
    in `scope["redlease.fence"]`, to pass it on to what it writes. Whoever sends a high fence locks out those with lower
    ones, so let in only callers that you trust. Requests of HTTP are checked, and nothing else, WebSockets for example.

    Args:
        app: The application.
        guard: The guard, or a function of the scope that returns the request's guard, or None to let the request pass.
        header: The name of the header.
        required: Whether a request without the header is refused.

    Raises:
        ValueError: The header's name is not valid, or that is no guard of the asyncio face.

    Example:
        >>> app.add_middleware(FencingMiddleware, guard=client.guard("ledger"))  # doctest: +SKIP
    """

    def __init__(
        self,
        app: App,
        guard: Guard | Callable[[Scope], Guard | None],
        *,
        header: str = HEADER,
        required: bool = False,
    ) -> None:
        if not isinstance(guard, Guard) and not callable(guard):
            raise ValueError(
                f"guard must be one of `redlease.Redlease.guard`, or a function that returns one: {guard!r:.80}"
            )
        self._app = app
        self._guard = guard
        self._header = _checked_header(header)
        self._name = header.lower().encode()
        self._required = required

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Checks the fence of a request, and passes the request on."""
        guard = self._guard_of(scope) if scope["type"] == "http" else None
        if guard is not None:
            found = [value for name, value in scope["headers"] if name.lower() == self._name]
            refusal = await self._refusal(guard, scope, found)
            if refusal is not None:
                await _answer(send, *refusal)
                return
        await self._app(scope, receive, send)

    def _guard_of(self, scope: Scope) -> Guard | None:
        return self._guard if isinstance(self._guard, Guard) else self._guard(scope)

    async def _refusal(self, guard: Guard, scope: Scope, found: list[bytes]) -> tuple[int, str, str] | None:
        """Returns status, title and detail of the answer to a request that is not to be passed on."""
        if not found:
            title, detail = "Fencing token required", f"Send the fence of your lock in the header {self._header}."
            return (428, title, detail) if self._required else None
        fence = _read(found)
        if fence is None:
            most = f"a whole number from 1 to {limits.FENCE_MAX}, once"
            return 400, "Malformed fencing token", f"The header {self._header} must have {most}."
        try:
            await guard.check(fence)
        except StaleFence as error:
            return 409, "Stale fencing token", str(error)
        except Unavailable:
            return 503, "Fencing token not checked", "The fence could not be checked in time. Send the request again."
        scope[SCOPE_KEY] = fence
        return None


def _checked_header(header: str) -> str:
    if not isinstance(header, str) or not re.fullmatch(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+", header):
        raise ValueError(f"{header!r:.80} is no name of a header")
    return header


def _read(found: list[bytes]) -> int | None:
    """Returns the fence in the values of the header; None if they are not exactly one."""
    if len(found) != 1 or not re.fullmatch(rb"[1-9][0-9]{0,15}", found[0]):
        return None
    fence = int(found[0])
    return fence if fence <= limits.FENCE_MAX else None


async def _answer(send: Send, status: int, title: str, detail: str) -> None:
    body = json.dumps({"title": title, "status": status, "detail": detail}).encode()
    headers = [(b"content-type", b"application/problem+json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class _Done:
    """What a hook returns: `httpx.AsyncClient` awaits it, `httpx.Client` ignores it."""

    def __await__(self) -> Generator[None, None, None]:
        yield from ()


def send_fence(hold: Hold, *, header: str = HEADER) -> Callable[[Any], Awaitable[None]]:
    """Makes a request hook for `httpx.Client` and `httpx.AsyncClient` that sends the fence of a hold.

    A request under a hold that is lost raises `LeaseLost`, and nothing is sent.

    Args:
        hold: The hold under which the requests are made.
        header: The name of the header.

    Raises:
        ValueError: The header's name is not valid.

    Example:
        >>> async with lock.hold() as hold:  # doctest: +SKIP
        ...     async with httpx.AsyncClient(event_hooks={"request": [send_fence(hold)]}) as http:
        ...         await http.post("https://ledger.example/payments", json=payment)
    """
    _checked_header(header)

    def hook(request: Any) -> Awaitable[None]:
        hold.check()
        request.headers[header] = str(hold.fence)
        return _Done()

    return hook
