"""Runs `redlease top`: reads the resources again and again, and draws them after each reading and each key."""

from __future__ import annotations

import asyncio
import logging

from redlease import Redlease, RedleaseError, Unavailable
from redlease._core import clock
from redlease._core.primitives.overview import UNDECLARED, Overview, Summary

from .screen import draw
from .terminal import Terminal
from .view import Detail, View

RECENT = 100  # entries of a history in which losses and forced releases are counted
SHOWN_MOST = 200  # holders, and waiters, of an opened resource
ENTRIES_SHOWN = 50


class Top:
    """The display, and what is read for it.

    Args:
        client: An entered client.
        pattern: A glob for the names.
        every_s: Seconds between two readings.
    """

    def __init__(self, client: Redlease, pattern: str, every_s: float) -> None:
        self._client = client
        self._every_s = every_s
        self._overview = Overview(client._operations, pattern)
        self._counted: dict[str, Summary] = {}  # as they were when their losses were counted
        self._changed, self._asked = asyncio.Event(), asyncio.Event()
        self.view = View()
        self.terminal = Terminal(self._on_key, self._changed.set)

    async def run(self) -> int:
        """Shows the resources until a key or signal ends it; returns the number of the signal, or 0."""
        with self.terminal.taken():
            reading = asyncio.create_task(self._read_again_and_again())
            try:
                while not (self.view.ended or self.terminal.ended_by or reading.done()):
                    self._draw()
                    await self._changed.wait()
                    self._changed.clear()
            finally:
                reading.cancel()
                await asyncio.wait([reading])
        if not reading.cancelled():
            reading.result()
        return self.terminal.ended_by

    def _draw(self) -> None:
        try:
            self.terminal.live.update(draw(self.view, *self.terminal.console.size), refresh=True)
        except OSError:  # the terminal is gone, of which its reader tells
            return

    def _on_key(self, key: str) -> None:
        opened = self.view.opened
        self.view.press(key)
        if self.view.opened != opened:
            self._asked.set()
        self._changed.set()

    async def _read_again_and_again(self) -> None:
        try:
            while True:
                self._asked.clear()
                await self.read()
                self._changed.set()
                await clock.pause(self._asked, self._every_s)
        finally:
            self._changed.set()

    async def read(self) -> None:
        """Reads what is to be shown, or why that failed."""
        try:
            await (self._read_all() if self.view.opened is None else self._read_one(self.view.opened))
            self.view.trouble = ""
        except RedleaseError as error:
            self.view.trouble = str(error)

    async def _read_all(self) -> None:
        view = self.view
        view.summaries = await self._overview.look(view.shown)
        shown = set(view.shown)
        await asyncio.gather(*(self._count_losses(each) for each in view.summaries if each.resource in shown))

    async def _read_one(self, name: str) -> None:
        detail = await self._detail(name)
        if self.view.opened == name:
            self.view.detail = detail

    async def _detail(self, name: str) -> Detail:
        resource = self._client.semaphore(name, UNDECLARED)
        snapshot, entries = await asyncio.gather(
            resource.inspect(max_items=SHOWN_MOST), resource.history(ENTRIES_SHOWN)
        )
        return Detail(snapshot, entries)

    async def _count_losses(self, each: Summary) -> None:
        """Counts the losses in the history of a resource, if there is one and the resource has changed."""
        was = self._counted.get(each.resource)
        if each.history and (was is None or (was.fence, was.in_use) != (each.fence, each.in_use)):
            try:
                entries = await self._client.semaphore(each.resource, UNDECLARED).history(RECENT)
            except Unavailable:
                raise
            except RedleaseError:  # opening the resource tells why
                self.view.losses.pop(each.resource, None)
                return
            events = [entry.event for entry in entries]
            self.view.losses[each.resource] = events.count("lost"), events.count("forced")
            self._counted[each.resource] = each


async def show_top(url: str, prefix: str, pattern: str, every_s: float) -> int:
    """Shows the resources on the terminal; returns the number of the signal that ended it, or 0."""
    logging.getLogger("redlease").addHandler(logging.NullHandler())  # else warnings would be printed into the display
    async with Redlease.from_url(url, prefix=prefix) as client:
        return await Top(client, pattern, every_s).run()
