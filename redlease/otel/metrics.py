"""The metrics.

To record one value takes the SDK some forty calls, so it is not done where events are emitted: the loop's thread keeps
them, and they are recorded when a reader collects, in the thread of that reader.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import get_args

from opentelemetry.metrics import CallbackOptions, Meter, Observation

from redlease._core import clock
from redlease.errors import AcquireTimeout, LossReason, Unavailable
from redlease.events import (
    Abandoned,
    Connected,
    Disconnected,
    Event,
    Granted,
    Lost,
    Queued,
    Reconnected,
    Released,
    RenewalFailed,
)

KEPT_MOST = 50_000  # events; with more, as when nobody collects, the oldest is recorded at once
# Bounds of the histograms' buckets, in seconds: from a round trip to an hour.
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 900, 3600)
RESOURCE, KEY, REASON, ERROR = "redlease.resource", "redlease.key", "redlease.loss.reason", "error.type"
OTHER = "other"  # stands for the keys beyond the bound
ENDS_OF_WAIT = (Granted, Abandoned)

Attributes = dict[str, str]
Labels = tuple[str, str]  # of a resource and of a key; empty without one


class Metrics:
    """Keeps events until a reader collects, and records them then."""

    def __init__(self, meter: Meter, label: Callable[[str], str], key_label: Callable[[str], str]) -> None:
        self._label, self._key_label = label, key_label
        self._labels: set[Labels] = set()
        self._events: deque[Event] = deque()
        self._waiting: dict[tuple[str, str], tuple[str | None, float]] = {}  # key, and since when; by resource, ticket
        bounds = {"explicit_bucket_boundaries_advisory": SECONDS}
        self._wait = meter.create_histogram("redlease.wait.duration", "s", "From a request to its grant.", **bounds)
        self._hold = meter.create_histogram("redlease.hold.duration", "s", "From a grant to its end.", **bounds)
        self._grants = meter.create_counter("redlease.grants", "{grant}", "Permits granted.")
        self._failures = meter.create_counter("redlease.acquire.failures", "{request}", "Requests that failed.")
        self._losses = meter.create_counter("redlease.losses", "{hold}", "Holds that were lost.")
        self._renewals = meter.create_counter("redlease.renewal.failures", "{renewal}", "Renewals that failed.")
        self._lost = meter.create_counter("redlease.connection.losses", "{connection}", "Connections lost.")
        self._found = meter.create_counter("redlease.connection.reconnects", "{connection}", "Connections made again.")
        self._silences = meter.create_counter(
            "redlease.connection.silences",
            "{connection}",
            "Connections on which no messages arrive, so that requests poll.",
        )
        meter.create_observable_up_down_counter(
            "redlease.queue.length", [self._lengths], "{request}", "Requests of this process in queues."
        )
        meter.create_observable_gauge(
            "redlease.queue.longest_wait", [self._longest_waits], "s", "How long the first of them has waited."
        )

        self._lost.add(0)
        self._found.add(0)
        self._silences.add(0)

    def take(self, event: Event) -> None:
        """Keeps an event; for the thread of the event loop."""
        self._events.append(event)
        if isinstance(event, Queued):
            self._waiting[event.resource, event.ticket] = event.key, clock.now_ms()
        elif isinstance(event, ENDS_OF_WAIT) and event.queued:
            self._waiting.pop((event.resource, event.ticket), None)
        if len(self._events) > KEPT_MOST:
            self._record_oldest()

    def _lengths(self, _: CallbackOptions) -> list[Observation]:
        while self._events:
            self._record_oldest()
        return [Observation(len(waits), about) for about, waits in self._waits()]

    def _longest_waits(self, _: CallbackOptions) -> list[Observation]:
        return [Observation(max(waits, default=0.0), about) for about, waits in self._waits()]

    def _waits(self) -> list[tuple[Attributes, list[float]]]:
        """Returns the attributes and how long each queued request has waited, for all labels that were ever used."""
        now_ms, waiting = clock.now_ms(), list(self._waiting.items())
        waits = [(self._begun(resource, key), now_ms - since_ms) for (resource, _), (key, since_ms) in waiting]
        found: dict[Labels, list[float]] = {labels: [] for labels in tuple(self._labels)}
        for labels, waited_ms in waits:
            found[labels].append(waited_ms / 1000)
        return [(_attributes(labels), waited) for labels, waited in found.items()]

    def _begun(self, resource: str, key: str | None) -> Labels:
        """Returns the labels of a request; their counters begin at 0, or an alert would not see the first increase."""
        labels = self._label(resource), self._key_label(key) if key else ""
        if labels not in self._labels:
            self.begin(labels)
        return labels

    def begin(self, labels: Labels) -> None:
        """Begins the counters of these labels at 0."""
        about = _attributes(labels)
        for reason in get_args(LossReason):
            self._losses.add(0, about | {REASON: reason})
        for error in (AcquireTimeout, Unavailable):
            self._failures.add(0, about | {ERROR: error.__name__})
        self._renewals.add(0, about)
        self._labels.add(labels)

    def _record_oldest(self) -> None:
        with suppress(IndexError):  # another thread has recorded it
            self._record(self._events.popleft())

    def _record(self, event: Event) -> None:
        if isinstance(event, Disconnected):
            self._lost.add(1)
        elif isinstance(event, Reconnected):
            self._found.add(1)
        elif isinstance(event, Connected):
            self._silences.add(event.silence is not None)
        else:
            about = _attributes(self._begun(event.resource, event.key))
            if isinstance(event, Granted):
                self._grants.add(1, about)
                self._wait.record(event.waited, about)
            elif isinstance(event, Abandoned):
                self._failures.add(1, about | {ERROR: event.error})
            elif isinstance(event, Lost):
                self._losses.add(1, about | {REASON: event.reason})
                self._hold.record(event.held, about)
            elif isinstance(event, Released) and event.held is not None:
                self._hold.record(event.held, about)
            elif isinstance(event, RenewalFailed):
                self._renewals.add(1, about)


def _attributes(labels: Labels) -> Attributes:
    resource, key = labels
    about = {RESOURCE: resource} if resource else {}
    return about | {KEY: key} if key else about


def bounded(label: Callable[[str], str], most: int) -> Callable[[str], str]:
    """Returns a label with so many values, the first that come, and `OTHER` for all that come later."""
    known: set[str] = set()

    def bounded_label(key: str) -> str:
        value = label(key)
        if not value or value in known:
            return value
        if len(known) >= most:
            return OTHER
        known.add(value)
        return value

    return bounded_label
