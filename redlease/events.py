"""The events of a client, which `on_event` gets: one frozen dataclass for each thing that happens to a request.

They contain what the caller knows of its own requests, and no credentials.

Example:
    >>> def on_event(event: Event) -> None:  # doctest: +SKIP
    ...     if isinstance(event, Lost):
    ...         pager.notify(f"{event.resource}: {event.reason}")
    >>> client = Redlease.from_url(url, on_event=on_event)  # doctest: +SKIP
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from ._core.log import about
from .errors import LossReason

logger = logging.getLogger("redlease")


@dataclass(frozen=True, slots=True)
class Queued:
    """A request has to wait.

    Once a request: not again when it queues again, after its place expired for example.

    Attributes:
        resource: The name of the resource.
        ticket: The id of the request.
        weight: Units requested.
        ahead: How many requests are before it in the queue.
        key: Whose turn the request takes; None without one.
    """

    resource: str
    ticket: str
    weight: int
    ahead: int
    key: str | None = None


@dataclass(frozen=True, slots=True)
class Granted:
    """A request got its permit, or a permit was adopted.

    Attributes:
        resource: The name of the resource.
        ticket: The id of the request and of its permit.
        weight: Units held.
        fence: The fencing token.
        waited: Seconds from the call to the grant, the round trip included; 0.0 for an adopted permit.
        queued: Whether it stood in the queue.
        key: Whose turn the request takes; None without one.
    """

    resource: str
    ticket: str
    weight: int
    fence: int
    waited: float
    queued: bool
    key: str | None = None


@dataclass(frozen=True, slots=True)
class Abandoned:
    """A request ended with an error before it was granted: it timed out, was cancelled or refused.

    A request that may not wait and finds no free capacity is none.

    Attributes:
        resource: The name of the resource.
        ticket: The id of the request.
        weight: Units requested.
        waited: Seconds from the call to its end.
        queued: Whether it stood in the queue.
        error: The name of the error's class: `AcquireTimeout`, `Unavailable`, `CancelledError` and so on.
        key: Whose turn the request takes; None without one.
    """

    resource: str
    ticket: str
    weight: int
    waited: float
    queued: bool
    error: str
    key: str | None = None


@dataclass(frozen=True, slots=True)
class Released:
    """A permit was released.

    For a hold, the release is on its way: while the server is unreachable it is retried. Should the server answer that
    it no longer had the permit, `Lost` follows.

    Attributes:
        resource: The name of the resource.
        ticket: The id of the permit.
        weight: Units held.
        fence: The fencing token.
        held: Seconds from the grant to the release; None for the permits of `acquire`, which are data.
        key: Whose turn the request takes; None without one.
    """

    resource: str
    ticket: str
    weight: int
    fence: int
    held: float | None
    key: str | None = None


@dataclass(frozen=True, slots=True)
class Lost:
    """A hold is no longer a hold: its permit is lost.

    Attributes:
        resource: The name of the resource.
        ticket: The id of the permit.
        weight: Units held.
        fence: The fencing token.
        held: Seconds from the grant to the moment at which the loss was noticed.
        reason: "expired": its lease ended before a renewal came through. "max_hold": that was reached. "gone": the
            server no longer has it. "taken": it was released by its ticket, or adopted elsewhere. "superseded": a newer
            request replaced it. "closed": its client was closed.
        key: Whose turn the request takes; None without one.
    """

    resource: str
    ticket: str
    weight: int
    fence: int
    held: float
    reason: LossReason
    key: str | None = None


@dataclass(frozen=True, slots=True)
class Detached:
    """A hold was detached: its permit lives on, and this client renews it no longer.

    Attributes:
        resource: The name of the resource.
        ticket: The id of the permit.
        weight: Units held.
        fence: The fencing token.
        held: Seconds from the grant to the end of the hold.
        key: Whose turn the request takes; None without one.
    """

    resource: str
    ticket: str
    weight: int
    fence: int
    held: float
    key: str | None = None


@dataclass(frozen=True, slots=True)
class RenewalFailed:
    """A renewal of a hold had an error for an answer, or none. It is tried again while the lease lasts.

    Attributes:
        resource: The name of the resource.
        ticket: The id of the permit.
        fence: The fencing token.
        error: What the server said; "no answer" if the connection was lost.
        key: Whose turn the request takes; None without one.
    """

    resource: str
    ticket: str
    fence: int
    error: str
    key: str | None = None


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The connection to the server was lost, or that to the first node of a cluster; redlease connects again.

    Attributes:
        reason: Why.
    """

    reason: str


@dataclass(frozen=True, slots=True)
class Reconnected:
    """The connection to the server is there again, or those to all nodes of a cluster that are in use.

    Attributes:
        after: Seconds since it was lost.
    """

    after: float


@dataclass(frozen=True, slots=True)
class Connected:
    """The client has found out how it works with the server; sent when that has changed.

    Attributes:
        protocol: The version of RESP, 2 or 3.
        connections: How many connections the client has to the server.
        sends_texts: Whether the server loads no scripts, so that their texts are sent.
        silence: Why messages from the server do not arrive, so that waiting requests poll; None if they do.
    """

    protocol: int
    connections: int
    sends_texts: bool
    silence: str | None


Event = (
    Connected | Queued | Granted | Abandoned | Released | Lost | Detached | RenewalFailed | Disconnected | Reconnected
)
OnEvent = Callable[[Event], None]


def harmless(on_event: OnEvent) -> OnEvent:
    """Returns a callback that passes events on; the first exception is logged, and none reaches the caller.

    Raises:
        ValueError: `on_event` cannot be called.
    """
    if not callable(on_event):
        raise ValueError(f"on_event must be callable, not {on_event!r:.80}")
    has_failed = False

    def emit(event: Event) -> None:
        nonlocal has_failed
        try:
            on_event(event)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # CancelledError too: out of here it would cancel who asked, or cut the connection
            if not has_failed:
                has_failed = True
                logger.warning(
                    "on_event failed for a %s event, and may fail again unlogged",
                    type(event).__name__,
                    exc_info=True,
                    extra=about(*_subject(event)),
                )

    return emit


def _subject(event: Event) -> tuple[str | None, str | None, int | None]:
    return getattr(event, "resource", None), getattr(event, "ticket", None), getattr(event, "fence", None)
