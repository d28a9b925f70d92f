"""Polls the server for all browsers together, while at least one looks."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict
from typing import Any

from redlease import HistoryEntry, Redlease, RedleaseError, Snapshot, Unavailable
from redlease._core import clock
from redlease._core.log import about
from redlease._core.primitives.overview import UNDECLARED, Overview, Summary, is_known

logger = logging.getLogger("redlease")

PERIOD_S = 1.0
ROWS_A_S = 200  # resources that a browser gets in a second: it counts on by itself, so a long list may come less often
LISTED_MOST = 1000  # resources that a browser gets one by one; the totals are of all
SHOWN_MOST = 100  # holders, and as many waiters, that a browser gets one by one
HISTORY_MOST = 300  # entries of the history that the timeline is drawn of

# What a browser is sent, by kind: an event of the stream is one of these and JSON.
STATUS, OVERVIEW, HISTORY, DETAIL, BEAT = "status", "overview", "history", "detail", "beat"


class Viewer:
    """A browser that looks at all resources, and at one of them if `resource` is given.

    Holds no events: a slow browser skips what has changed again meanwhile.
    """

    def __init__(self, gatherer: Gatherer, resource: str | None) -> None:
        self.resource = resource
        self.changed = asyncio.Event()
        self._gatherer = gatherer
        self._seen: dict[str, bytes] = {}

    def news(self) -> list[bytes]:
        """Returns the events that this browser has not been sent yet, newest state only."""
        self.changed.clear()
        news = []
        for kind, event in self._gatherer.events_for(self.resource):
            if self._seen.get(kind) is not event:
                self._seen[kind] = event
                news.append(event)
        return news


class Gatherer:
    """Looks at the resources whose names match a pattern, as long as somebody sees it.

    What it has gathered is kept encoded, so that a further browser costs the Redis server nothing.

    Args:
        client: The client of the Redis server.
        pattern: A glob that names match.
    """

    def __init__(self, client: Redlease, pattern: str = "*") -> None:
        self.is_closed = False
        self._client = client
        self._all = Overview(client._operations, pattern)
        self._viewers: set[Viewer] = set()
        self._task: asyncio.Task[None] | None = None
        self._asked_for_detail = asyncio.Event()
        self._forget()

    @property
    def is_running(self) -> bool:
        """Whether the server is being polled."""
        return self._task is not None

    @property
    def viewers(self) -> int:
        """How many browsers look."""
        return len(self._viewers)

    @contextlib.contextmanager
    def viewer(self, resource: str | None) -> Iterator[Viewer]:
        """Returns a browser's view, and polls the server until the last one has been left.

        Raises:
            ValueError: The name of the resource is not valid.
        """
        if resource is not None:
            self._client._operations.resource(resource)
        viewer = Viewer(self, resource)
        self._viewers.add(viewer)
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        self.look_closely_now()
        try:
            yield viewer
        finally:
            self._viewers.discard(viewer)
            if not self._viewers:
                self._stop()

    def look_closely_now(self) -> None:
        """Looks at once at the resources that browsers show, as after a change."""
        self._asked_for_detail.set()

    def close(self) -> None:
        """Ends the streams of all browsers, for the web server waits for them before it ends."""
        self.is_closed = True
        self._tell()

    def events_for(self, resource: str | None) -> Iterator[tuple[str, bytes]]:
        """Yields what a browser is to be shown, by kind."""
        yield STATUS, self._status
        if self._overview:
            yield OVERVIEW, self._overview
        yield from self._details.get(resource, {}).items()

    def _stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None
        self._forget()

    def _forget(self) -> None:
        """Drops what was gathered: it would be old by the time that the next browser looks."""
        self._overview = b""
        self._details: dict[str | None, dict[str, bytes]] = {}
        self._troubles: dict[str, str] = {}
        self._status = _event(STATUS, {"reachable": True, "why": ""})

    async def _run(self) -> None:
        """Looks at all resources and, not to wait for that, at those that browsers show."""
        await asyncio.gather(
            self._repeat(self._look_at_all, asyncio.Event()),
            self._repeat(self._look_closely, self._asked_for_detail),
        )

    async def _repeat(self, look: Callable[[], Awaitable[float]], early: asyncio.Event) -> None:
        """Looks again and again, whatever a look raises; it returns how many seconds to pause."""
        name = look.__name__
        while True:
            early.clear()
            pause_s = PERIOD_S
            try:
                pause_s = await look()
            except RedleaseError as error:
                self._troubles[name] = str(error)
            except Exception as error:
                if name not in self._troubles:
                    logger.exception("the web view could not look at the resources, and will try again", extra=about())
                self._troubles[name] = f"{type(error).__name__}; the log of `redlease web` has more"
            else:
                self._troubles.pop(name, None)
            why = next(iter(self._troubles.values()), "")
            self._status = _kept(self._status, _event(STATUS, {"reachable": not why, "why": why}))
            self._tell()
            await clock.pause(early, pause_s)

    async def _look_at_all(self) -> float:
        listed = await self._all.look(self._shown())
        self._overview = _kept(self._overview, _event(OVERVIEW, overview_of(listed)))
        return max(PERIOD_S, min(len(listed), LISTED_MOST) / ROWS_A_S)

    async def _look_closely(self) -> float:
        names = self._shown()
        found = zip(names, await asyncio.gather(*map(self._detail, names)), strict=True)
        before = self._details
        self._details = {
            name: {kind: _kept(before.get(name, {}).get(kind, b""), event) for kind, event in events.items()}
            for name, events in found
        }
        return PERIOD_S

    async def _detail(self, name: str) -> dict[str, bytes]:
        resource = self._client.semaphore(name, capacity=UNDECLARED)
        snapshot, entries, why = Snapshot(name, UNDECLARED, (), (), 0, 0), list[HistoryEntry](), ""
        try:
            snapshot = await resource.inspect(max_items=SHOWN_MOST)
            entries = await resource.history(HISTORY_MOST)
        except Unavailable:
            raise
        except RedleaseError as error:  # of this resource: the others can be read
            why = str(error)
        return {
            HISTORY: _event(HISTORY, {"entries": [asdict(entry) for entry in entries]}),
            DETAIL: _event(DETAIL, {"known": is_known(snapshot), "why": why, "snapshot": asdict(snapshot)}),
        }

    def _shown(self) -> set[str]:
        """Returns the names of the resources that browsers show."""
        return {viewer.resource for viewer in self._viewers if viewer.resource is not None}

    def _tell(self) -> None:
        for viewer in self._viewers:
            viewer.changed.set()


def overview_of(listed: list[Summary]) -> dict[str, Any]:
    """Returns the totals of all resources, and the first of them one by one."""
    return {
        "resources": len(listed),
        "held": sum(each.in_use > 0 for each in listed),
        "waiting": sum(each.waiting for each in listed),
        "longest_wait_ms": max((each.longest_wait_ms or 0 for each in listed), default=0),
        "listed": [asdict(each) for each in listed[:LISTED_MOST]],
    }


def _kept(old: bytes, new: bytes) -> bytes:
    """Returns the old event if the new one is equal, so that browsers are not sent it again."""
    return old if old == new else new


def _event(kind: str, value: dict[str, Any]) -> bytes:
    """Returns an event of a `text/event-stream`. JSON escapes line breaks, so the data is one line."""
    return f"event: {kind}\ndata: {json.dumps(value)}\n\n".encode()


def beat() -> bytes:
    """Returns the event that says that the connection still works."""
    return _event(BEAT, {})
