"""A server, a client of it, and the application without a web server."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx
import pytest

from redlease import Redlease
from redlease._web.application import View
from redlease._web.gatherer import Gatherer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from conftest import Servers


@pytest.fixture
def url(servers: Servers) -> str:
    """The server."""
    return servers["valkey9"].url


@pytest.fixture
async def client(url: str, prefix: str) -> AsyncIterator[Redlease]:
    """What holds and waits."""
    async with Redlease.from_url(url, prefix=prefix, history=100) as client:
        yield client


@pytest.fixture
def gatherer(client: Redlease) -> Gatherer:
    """What looks at the server."""
    return Gatherer(client)


@pytest.fixture
def asked(client: Redlease, gatherer: Gatherer) -> Callable[[str | None], httpx.AsyncClient]:
    """Makes a client of the application, which allows changes if it is given a token."""

    def make(token: str | None) -> httpx.AsyncClient:
        facts = {"server": "redis://here", "prefix": "test", "pattern": "*"}
        application = View(client, gatherer, facts, token).application(["view.example"])
        return httpx.AsyncClient(transport=httpx.ASGITransport(application), base_url="http://127.0.0.1:8420")

    return make
