"""For Starlette and FastAPI: the answers to requests in which a lock is not granted, or lost."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response

from redlease.errors import RedleaseError

from .problems import CONTENT_TYPE, problem

__all__ = ["problem_handler"]


def problem_handler(*, timeout_status: int = 409) -> Callable[[Request, Exception], Awaitable[Response]]:
    """Makes an exception handler that answers with problem details (RFC 9457) when redlease raises.

    It answers 409 to `AcquireTimeout` and `StaleFence`, 500 to `LeaseLost`, and 503 if the request was not carried out,
    as Redis could not be reached for example. The answers name no resource and no server.

    Args:
        timeout_status: The status for `AcquireTimeout`; 423 (Locked) is another choice.

    Example:
        >>> app.add_exception_handler(RedleaseError, problem_handler())  # doctest: +SKIP
    """

    async def answer(_request: Request, error: Exception) -> Response:
        if not isinstance(error, RedleaseError):
            raise error  # it was added for more than the errors of redlease
        status, body = problem(error, timeout_status)
        return Response(body, status, media_type=CONTENT_TYPE)

    return answer
