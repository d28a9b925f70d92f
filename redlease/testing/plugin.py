"""The pytest plugin: a fixture that is available wherever `redlease[testing]` is installed.

Every run of pytest loads it, so it imports redlease only when a test uses the fixture.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from redlease import Redlease


@pytest.fixture
def redlease_client() -> Redlease:
    """A redlease client with its own fakeredis server.

    It connects on first use, and belongs to the event loop of that use, so it works with pytest-asyncio, anyio's plugin
    and a plain `asyncio.run`. Its tasks end with that loop. A test may also enter it.
    """
    from redlease.testing import fake_client  # noqa: PLC0415 - see above

    return fake_client()
