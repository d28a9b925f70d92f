"""Blocking clients of a server."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from redlease.sync import Redlease

if TYPE_CHECKING:
    from collections.abc import Iterator

    from conftest import Servers


@pytest.fixture
def url(servers: Servers) -> str:
    """The URL of a server that all tests share."""
    return servers.url("valkey9")


@pytest.fixture
def client(url: str, prefix: str) -> Iterator[Redlease]:
    """A blocking client, which is open."""
    with Redlease.from_url(url, prefix=prefix) as client:
        yield client
