"""The example of a process that is stopped past its lease keeps what it promises."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from children import running

if TYPE_CHECKING:
    from conftest import Servers

EXAMPLE = Path(__file__).parents[3] / "examples" / "fencing" / "paused.py"


@pytest.mark.slow
@pytest.mark.parametrize("its_own_server", [False, True])
async def test_a_late_write_does_harm_only_where_there_is_no_guard(servers: Servers, its_own_server: bool) -> None:
    """The verdict names both ends of the story, whoever brings the server, and the exit status is 0."""
    environment = os.environ | {"REDIS_URL": "" if its_own_server else servers["valkey9"].url}
    async with running(sys.executable, str(EXAMPLE), stderr=asyncio.subprocess.STDOUT, env=environment) as process:
        output, _ = await asyncio.wait_for(process.communicate(), 45)
    text = output.decode()
    assert process.returncode == 0, text
    assert "Traceback" not in text
    assert "✓  without a guard the late write undoes the payment" in text
    assert "✓  with a guard the late write is refused" in text
    assert "✗" not in text
