"""Servers that users have, which are not among the engines of the other tests: the primitives one by one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from redlease import Redlease
from redlease._core.transport.opening import dialects

from other_servers import OTHER_SERVERS
from primitive_checks import CHECKS, Check
from servers import running_other

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow


@pytest.fixture(params=OTHER_SERVERS, scope="module")
def other(request: pytest.FixtureRequest) -> str:
    """Each of the servers in turn."""
    return str(request.param)


@pytest.fixture(scope="module")
def url(other: str) -> Iterator[str]:
    """Its address."""
    with running_other(other) as url:
        yield url
    dialects.forget_all()


@pytest.mark.parametrize("check", CHECKS)
async def test_primitives(url: str, prefix: str, check: Check) -> None:
    """Every primitive works, with the protocol that the client finds by itself."""
    async with Redlease.from_url(url, prefix=prefix) as client:
        await check(client)
