"""State that a client keeps across requests: tickets in use, and requests of which late copies may still arrive."""

from __future__ import annotations

import logging
from collections.abc import Callable

from redlease._core import clock
from redlease._core.log import about
from redlease._core.protocol.arguments import AcquireRequest
from redlease._core.protocol.encoding import Resource

from .ids import RequestIds

WARNED_MOST = 1000  # how many warnings are remembered

logger = logging.getLogger("redlease")


class ClientMemory:
    """Entries about requests, each kept as long as it matters."""

    def __init__(self) -> None:
        self.adopting: dict[tuple[bytes, str, int], tuple[str, float]] = {}
        self._may_be_duplicated: dict[tuple[bytes, str], tuple[str, float]] = {}
        self._operations: set[tuple[bytes, str]] = set()
        self._warned: set[tuple[str, int | str]] = set()

    def reserve_ticket(self, resource: Resource, ticket: str) -> Callable[[], None]:
        """Marks a ticket as in use until the returned callback is called; raises ValueError if it is in use already."""
        key = (resource.state_key, ticket)
        if key in self._operations:
            raise ValueError(
                f"resource {resource.name!r}: ticket {ticket!r} is in use in this client already. "
                "One ticket is one request: wait for it to end, or take another ticket"
            )
        self._operations.add(key)
        return lambda: self._operations.discard(key)

    def note_possible_duplicate(self, request: AcquireRequest, for_ms: float) -> None:
        """Notes, for `for_ms`, that a late copy of the request for a plain permit may still arrive."""
        now_ms = clock.now_ms()
        self._may_be_duplicated = {key: noted for key, noted in self._may_be_duplicated.items() if noted[1] >= now_ms}
        self._may_be_duplicated[request.resource.state_key, request.ticket] = (request.request_id, now_ms + for_ms)

    def take_possible_duplicate(self, resource: Resource, ticket: str) -> tuple[str, bool]:
        """Removes the note; returns the request id, empty if none, and whether late copies may still arrive."""
        request_id, until_ms = self._may_be_duplicated.pop((resource.state_key, ticket), ("", 0.0))
        return request_id, clock.now_ms() < until_ms

    def adoption(self, key: tuple[bytes, str, int], ids: RequestIds, for_ms: float) -> str:
        """Returns the request id for an adoption by state key, ticket and fence; a retry gets the same id."""
        now_ms = clock.now_ms()
        self.adopting = {other: noted for other, noted in self.adopting.items() if noted[1] >= now_ms}
        request_id = self.adopting[key][0] if key in self.adopting else ids.draw()[1]
        self.adopting[key] = (request_id, now_ms + for_ms)
        return request_id

    def declared(self, request: AcquireRequest, was_declared: int) -> None:
        """Warns once if this client's declared capacity replaced a different one."""
        name, capacity = request.resource.name, request.terms.capacity
        if self._is_new(name, was_declared):
            logger.warning(
                "resource %r: the capacity declared here is %d, but %d was declared before; it is %d from now on. "
                "Declare the same one everywhere, or use resize()",
                *(name, capacity, was_declared, capacity),
                extra=about(name),
            )

    def found_foreign(self, name: str, ids: list[str]) -> None:
        """Warns once of entries that something else has added to the history of a resource."""
        if self._is_new(name, "history"):
            logger.warning(
                "resource %r: %d entries of its history are none of redlease's and are left out; the first is %s",
                *(name, len(ids), ids[0]),
                extra=about(name),
            )

    def _is_new(self, name: str, what: int | str) -> bool:
        """Returns whether nobody was warned of this yet, as far as is remembered, and remembers it."""
        if (name, what) in self._warned:
            return False
        if len(self._warned) >= WARNED_MOST:
            self._warned.clear()
        self._warned.add((name, what))
        return True
