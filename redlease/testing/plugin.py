"""The pytest plugin: a fixture that is there wherever `redlease[testing]` is installed.

It is loaded in every run of pytest, so it imports redlease only when a test asks for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from redlease import Redlease


@pytest.fixture
def redlease_client() -> Redlease:
    """A redlease client on a fakeredis server of its own.

    It connects when it is first used, and belongs to the event loop of that use: so it serves with pytest-asyncio,
    anyio's plugin and a plain `asyncio.run` alike. Its tasks end with that loop. A test may also enter it.
    """
    from redlease.testing import fake_client  # noqa: PLC0415 - see above

    return fake_client()
