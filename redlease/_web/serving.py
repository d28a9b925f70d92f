"""Serves the view until it is interrupted."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Collection
from dataclasses import dataclass
from ipaddress import ip_address

import uvicorn

from redlease import Redlease

from .access import TOKEN_LENGTH_MIN
from .application import View
from .gatherer import Gatherer

TOKEN_VARIABLE = "REDLEASE_WEB_TOKEN"  # noqa: S105 - the name of the variable, not a token
CALL_TIMEOUT_S = 3.0  # after which the page says that the server is out of reach


@dataclass(frozen=True, slots=True)
class Settings:
    """What to show, where, and whether it may be changed.

    `server`: the address to show, without secrets; `hosts`: names by which browsers may address the view.
    """

    url: str
    prefix: str
    pattern: str
    server: str
    host: str
    port: int
    hosts: Collection[str]
    allow_changes: bool


@dataclass(frozen=True, slots=True)
class Address:
    """Where the view is served.

    `changes`: whether it lets somebody change anything; `token`: what a change must carry, None if there are no
    changes, or if the environment has it: that is a secret to keep.
    """

    url: str
    is_loopback: bool
    changes: bool
    token: str | None


class Server(uvicorn.Server):
    """A web server that ends the streams first when it ends: they would go on forever."""

    def __init__(self, config: uvicorn.Config, gatherer: Gatherer) -> None:
        super().__init__(config)
        self._gatherer = gatherer

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stops to listen, and waits for what is under way."""
        self._gatherer.close()
        await super().shutdown(sockets)


async def serve(settings: Settings, on_ready: Callable[[Address], None]) -> None:
    """Serves the view until SIGINT or SIGTERM; calls `on_ready` when browsers can connect.

    Raises:
        OSError: The port cannot be listened on.
        Unavailable: The Redis server was not reached at the start. Later outages are shown on the page.
        ValueError: The URL, the prefix or the given token is wrong.
    """
    given = _given_token() if settings.allow_changes else None
    new = secrets.token_urlsafe(24) if settings.allow_changes and given is None else None
    async with Redlease.from_url(settings.url, prefix=settings.prefix, call_timeout=CALL_TIMEOUT_S) as client:
        gatherer = Gatherer(client, settings.pattern)
        facts = {"server": settings.server, "prefix": settings.prefix, "pattern": settings.pattern}
        application = View(client, gatherer, facts, given or new).application([settings.host, *settings.hosts])
        config = uvicorn.Config(
            application,
            ws="none",
            lifespan="off",
            access_log=False,
            log_level="warning",
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=5,
        )
        with _listening(settings.host, settings.port) as listener:
            on_ready(_address(listener, new, changes=settings.allow_changes))
            await Server(config, gatherer).serve(sockets=[listener])


def _listening(host: str, port: int) -> socket.socket:
    (family, _, _, _, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return socket.create_server(address[:2], family=family)


def _address(listener: socket.socket, token: str | None, *, changes: bool) -> Address:
    host, port = listener.getsockname()[:2]
    bound = ip_address(host)
    if bound.is_unspecified:  # all addresses of this machine, one of which is
        host = "127.0.0.1" if bound.version == 4 else "::1"
    url = f"http://[{host}]:{port}/" if bound.version == 6 else f"http://{host}:{port}/"
    return Address(url, bound.is_loopback, changes, token)


def _given_token() -> str | None:
    """Returns the token of the environment, None if there is none.

    Raises:
        ValueError: The given one is too short to be hard to guess.
    """
    given = os.environ.get(TOKEN_VARIABLE)
    if given is not None and len(given) < TOKEN_LENGTH_MIN:
        raise ValueError(f"{TOKEN_VARIABLE} must have at least {TOKEN_LENGTH_MIN} characters")
    return given
