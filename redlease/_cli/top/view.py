"""What `redlease top` shows, and how keys change that. Pure: neither terminal nor server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from redlease import HistoryEntry, Snapshot
from redlease._core.primitives.overview import Summary


@dataclass(frozen=True, slots=True)
class Sorting:
    """An order of the resources: the name of its column, and what is compared; the greatest comes first."""

    column: str
    by: Callable[[Summary], Any]


SORTINGS = {
    "w": Sorting("longest wait", lambda each: each.longest_wait_ms or -1),
    "n": Sorting("waiting", lambda each: each.waiting),
    "u": Sorting("held", lambda each: each.in_use),
    "o": Sorting("longest hold", lambda each: each.longest_hold_ms or -1),
}
BY_NAME = "r"  # the key for the order of the names, by which equals are sorted too


@dataclass(frozen=True, slots=True)
class Detail:
    """One resource in full, with the end of its history."""

    snapshot: Snapshot
    entries: list[HistoryEntry]


@dataclass
class View:
    """The state of the display.

    Attributes:
        summaries: All resources, as they were last read.
        losses: How many of the last entries of its history are losses, and how many forced releases, by resource.
        opened: The name of the resource that is shown alone, if one is.
        detail: That resource, once it is read.
        trouble: Why the last look failed; empty if it did not.
        sorting: The key of the order.
        reverse: Whether the order is reversed.
        typing: Whether keys are text of the filter.
        pattern: What a name must contain, in upper or lower case.
        ended: Whether the user has asked to quit.
        shown: The names of the resources in the window.
    """

    summaries: list[Summary] = field(default_factory=list)
    losses: dict[str, tuple[int, int]] = field(default_factory=dict)
    opened: str | None = None
    detail: Detail | None = None
    trouble: str = ""
    sorting: str = "w"
    reverse: bool = False
    typing: bool = False
    pattern: str = ""
    ended: bool = False
    shown: list[str] = field(default_factory=list)
    _index: int = 0  # of the selected resource, or of the first line of an opened one
    _selected: str | None = None  # stays selected when the order changes
    _first: int = 0  # the index of the first resource in the window
    _rows: int = 1

    def listed(self) -> list[Summary]:
        """Returns the resources that fit the filter, in order, and before them those that cannot be read."""
        wanted = self.pattern.casefold()
        found = [each for each in self.summaries if wanted in each.resource.casefold()]
        found.sort(key=lambda each: each.resource, reverse=self.sorting == BY_NAME and self.reverse)
        if self.sorting != BY_NAME:
            found.sort(key=SORTINGS[self.sorting].by, reverse=not self.reverse)
        return sorted(found, key=lambda each: each.error is None)  # what cannot be read needs attention first

    def window(self, rows: int) -> tuple[list[Summary], int]:
        """Returns the resources that fit into so many rows, and the index of the selected one among them."""
        self._rows, found = max(1, rows), self.listed()
        names = [each.resource for each in found]
        if self._selected in names:
            self._index = names.index(self._selected)
        self._index = max(0, min(self._index, len(found) - 1))
        self._selected = names[self._index] if names else None
        self._first = max(self._index - self._rows + 1, min(self._first, self._index, max(0, len(found) - self._rows)))
        fitting = found[self._first : self._first + self._rows]
        self.shown = [each.resource for each in fitting]
        return fitting, self._index - self._first

    def lines_from(self, count: int, rows: int) -> int:
        """Returns the first of so many lines of an opened resource to show in so many rows."""
        self._rows, self._index = max(1, rows), max(0, min(self._index, count - rows))
        return self._index

    def press(self, key: str) -> None:
        """Handles a key: a character, or the name of a key such as `up`."""
        if self.typing:
            self._type(key)
        elif key == "q":
            self.ended = True
        elif key in {"up", "k", "down", "j", "page up", "page down", "home", "end"}:
            self._move(key)
        elif self.opened is not None:
            if key in {"escape", "backspace", "left", "enter"}:
                self._selected, self.opened, self.detail = self.opened, None, None
        elif key in {"enter", "right"}:
            self.opened, self._index = self._selected, 0
        elif key == "/":
            self.typing = True
        elif key == "escape":
            self.pattern = ""
        elif key in SORTINGS or key == BY_NAME:
            self.reverse = key == self.sorting and not self.reverse
            self.sorting, self._selected, self._index = key, None, 0

    def _type(self, key: str) -> None:
        if key == "enter":
            self.typing = False
        elif key == "escape":
            self.typing, self.pattern = False, ""
        elif key == "backspace":
            self.pattern = self.pattern[:-1]
        elif len(key) == 1 and key.isprintable():
            self.pattern += key

    def _move(self, key: str) -> None:
        steps = {"up": -1, "k": -1, "down": 1, "j": 1, "page up": -self._rows, "page down": self._rows}
        self._index = {"home": 0, "end": 1 << 30}.get(key, self._index + steps.get(key, 0))
        self._selected = None
