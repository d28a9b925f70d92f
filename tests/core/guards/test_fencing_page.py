"""The examples of docs/fencing.md run as they stand."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

from redlease.testing import fake_client

PAGE = (Path(__file__).parents[3] / "docs" / "fencing.md").read_text()
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("number", range(4))
async def test_an_example_runs_as_it_stands(number: int) -> None:
    """As in `python -m asyncio`, with an open client."""
    assert len(EXAMPLES) == PAGE.count("```python") == 4
    compiled = compile(EXAMPLES[number], "fencing.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    names: dict[str, Any] = {}
    async with fake_client() as names["client"]:
        await eval(compiled, names)
