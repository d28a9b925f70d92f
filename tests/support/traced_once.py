"""What coverage traces of the tests that run on several engines."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator

    from coverage import Coverage


class TracedOnce:
    """Trace no test on fakeredis that the same run repeats on Valkey: that shows no other line, and takes time."""

    def __init__(self, tracer: Coverage) -> None:
        self._tracer = tracer
        self._node_ids: set[str] = set()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Learn what this run repeats."""
        self._node_ids = {item.nodeid for item in session.items}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Run a test, with the tracer stopped if it is repeated."""
        on_valkey = item.nodeid.replace("fakeredis", "valkey9")
        if on_valkey == item.nodeid or on_valkey not in self._node_ids:
            return (yield)
        self._tracer.stop()
        try:
            return (yield)
        finally:
            self._tracer.start()
