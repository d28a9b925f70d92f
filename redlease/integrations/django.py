"""For Django: clients from the settings, answers to requests that get no lock, and commands that run one at a time.

    REDLEASE = {"default": {"URL": "redis://localhost:6379/0", "LEASE": 30}}

The other keys are parameters of `redlease.Redlease.from_url` in capitals: `PREFIX`, `OWNER`, `LEASE`, `WAITER_LEASE`,
`IDLE_TTL` and `CALL_TIMEOUT`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, Callable
from typing import Any, NoReturn, ParamSpec

from asgiref.sync import iscoroutinefunction, markcoroutinefunction
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import CommandError
from django.http import HttpRequest, HttpResponse

import redlease
import redlease.sync
from redlease import AcquireTimeout, Duration, LeaseLost, RedleaseError

from . import exclusive as jobs
from .problems import CONTENT_TYPE, problem

__all__ = ["ProblemMiddleware", "async_client", "client", "exclusive"]

P = ParamSpec("P")

KEYS = {"PREFIX", "OWNER", "LEASE", "WAITER_LEASE", "IDLE_TTL", "CALL_TIMEOUT"}
UNAVAILABLE, LOST, NOT_GRANTED = 69, 74, 75  # the statuses of `redlease run`

Options = frozenset[tuple[str, Any]]

_clients: dict[Options, redlease.sync.Redlease] = {}
_of_loops: dict[tuple[asyncio.AbstractEventLoop, Options], tuple[redlease.Redlease, AsyncGenerator[None]]] = {}


def client(using: str = "default") -> redlease.sync.Redlease:
    """Returns the client of this process for views, commands and threads. It connects on first use.

    Args:
        using: Which of the servers in the setting `REDLEASE`.

    Raises:
        ImproperlyConfigured: The setting lacks that server, or has a key that is none.
        ValueError: One of its values is wrong.

    Example:
        >>> with client().lock("invoice:42").hold(timeout=2) as hold:  # doctest: +SKIP
        ...     pay(fence=hold.fence)
    """
    options = _options(using)
    return _clients.get(options) or _clients.setdefault(options, redlease.sync.Redlease.from_url(**dict(options)))


def async_client(using: str = "default") -> redlease.Redlease:
    """Returns the client of the running event loop, for async views. It connects on first use.

    Under ASGI that is one client a process. Under WSGI, Django runs each async view in an event loop of its own, so
    each makes its connection; sync views and `client` cost less there. The end of the loop closes the client.

    Args:
        using: Which of the servers in the setting `REDLEASE`.

    Raises:
        ImproperlyConfigured: The setting lacks that server, or has a key that is none.
        ValueError: One of its values is wrong.
    """
    key = asyncio.get_running_loop(), _options(using)
    if key not in _of_loops:
        made = redlease.Redlease.from_url(**dict(key[1]))

        async def until_the_loop_ends() -> AsyncGenerator[None]:
            try:
                yield
            finally:
                del _of_loops[key]
                await made.close()

        # What ends a loop, `asyncio.run` for example, closes the generators that were begun in it.
        generator = until_the_loop_ends()
        with contextlib.suppress(StopIteration):
            anext(generator).send(None)
        _of_loops[key] = made, generator
    return _of_loops[key][0]


def _options(using: str) -> Options:
    """Returns the arguments of `from_url`."""
    server = getattr(settings, "REDLEASE", {}).get(using)
    if server is None:
        raise ImproperlyConfigured(f"set REDLEASE = {{{using!r}: {{'URL': 'redis://...'}}}} in the settings")
    if "URL" not in server or server.keys() - KEYS - {"URL"}:
        raise ImproperlyConfigured(f"REDLEASE[{using!r}] needs a URL, and may have {', '.join(sorted(KEYS))} besides")
    return frozenset((name.lower(), value) for name, value in server.items())


class ProblemMiddleware:
    """Middleware that answers with problem details (RFC 9457) when redlease raises in a view.

    It answers 409 to `AcquireTimeout` and `StaleFence`, 500 to `LeaseLost`, and 503 if the request was not carried out,
    as Redis could not be reached for example. The answers name no resource and no server.

    Attributes:
        timeout_status: The status for `AcquireTimeout`; a subclass may have 423 (Locked).
    """

    sync_capable = async_capable = True
    timeout_status = 409

    def __init__(self, get_response: Callable[[HttpRequest], Any]) -> None:
        self._get_response = get_response
        if iscoroutinefunction(get_response):
            markcoroutinefunction(self)

    def __call__(self, request: HttpRequest) -> Any:
        """Passes the request on."""
        return self._get_response(request)

    def process_exception(self, _request: HttpRequest, error: Exception) -> HttpResponse | None:
        """Returns the answer to a request in which redlease raised; None for other errors."""
        if not isinstance(error, RedleaseError):
            return None
        status, body = problem(error, self.timeout_status)
        return HttpResponse(body, status=status, content_type=CONTENT_TYPE)


def exclusive(
    name: str, *, using: str = "default", timeout: Duration | None = 0, lease: Duration | None = None
) -> Callable[[Callable[P, Any]], Callable[P, Any]]:
    """Makes a decorator for `handle` of a management command, which then runs once at a time, on whatever host.

    A command that is not granted its lock does nothing and ends with status 75; with 69 if Redis cannot be reached, and
    with 74 if its lease was lost meanwhile. A parameter that is annotated as a `redlease.sync.Hold` gets the hold.

    Args:
        name: The name of the lock.
        using: Which of the servers in the setting `REDLEASE`.
        timeout: Seconds to wait while another one runs; None waits forever.
        lease: Seconds; as for `redlease.sync.Redlease.lock`.

    Example:
        >>> class Command(BaseCommand):  # doctest: +SKIP
        ...     @exclusive("nightly-report")
        ...     def handle(self, *args, hold: Hold | None = None, **options): ...
    """

    def decorate(handle: Callable[P, Any]) -> Callable[P, Any]:
        @functools.wraps(handle)
        def run(*args: P.args, **kwargs: P.kwargs) -> Any:
            lock = client(using).lock(name, lease=lease)
            try:
                return jobs.exclusive(lock, not_granted=_end, name_for=None, timeout=timeout)(handle)(*args, **kwargs)
            except LeaseLost as error:
                raise CommandError(str(error), returncode=LOST) from error

        return run

    return decorate


def _end(error: RedleaseError) -> NoReturn:
    status = NOT_GRANTED if isinstance(error, AcquireTimeout) else UNAVAILABLE
    raise CommandError(str(error), returncode=status) from error
