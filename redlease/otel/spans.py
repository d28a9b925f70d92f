"""The spans: one for each wait in a queue, and one for each hold, in traces that are recorded.

They are children of the span in which the caller asked. What is not part of a recorded trace has none, and costs a look
at the current span.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from time import time_ns  # spans are dated by the wall clock

from opentelemetry import trace
from opentelemetry.trace import Link, Span, SpanContext, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from redlease.events import Abandoned, Detached, Event, Granted, Lost, Released

KEPT_MOST = 10_000  # open spans, and resources whose last hold is known; permits may be released elsewhere
RESOURCE, KEY, TICKET = "redlease.resource", "redlease.key", "redlease.ticket"
FENCE, WEIGHT = "redlease.fence", "redlease.weight"
REASON, ERROR, DETACHED = "redlease.loss.reason", "error.type", "redlease.detached"

_trace_context = TraceContextTextMapPropagator()


def trace_metadata() -> dict[str, str]:
    """Returns the current trace context as metadata of a request, which `inspect()` shows in any process.

    Example:
        >>> async with lock.hold(metadata=trace_metadata()): ...  # doctest: +SKIP
    """
    carrier: dict[str, str] = {}
    _trace_context.inject(carrier)
    return carrier


def link_to(metadata: Mapping[str, str]) -> Link | None:
    """Returns a link to the span of which `trace_metadata` was made; None if there is none in the metadata.

    Example:
        >>> holders = (await lock.inspect()).holders  # doctest: +SKIP
        >>> links = [link for permit in holders if (link := link_to(permit.metadata))]  # doctest: +SKIP
    """
    context = trace.get_current_span(_trace_context.extract(metadata)).get_span_context()
    return Link(context) if context.is_valid else None


class Spans:
    """Makes the spans of the events of clients."""

    def __init__(self, tracer: Tracer, label: Callable[[str], str], key_label: Callable[[str], str]) -> None:
        self._tracer = tracer
        self._label, self._key_label = label, key_label
        self._holds: OrderedDict[tuple[str, str, int], Span] = OrderedDict()
        self._ended: OrderedDict[str, tuple[SpanContext, int]] = OrderedDict()  # by resource: its last hold, and when

    def take(self, event: Event) -> None:
        """Begins or ends a span, if the event is about one; grants and failures come in the task of the caller."""
        if isinstance(event, Granted | Abandoned):
            if trace.get_current_span().is_recording():
                self._asked(event)
        elif self._holds and isinstance(event, Released | Lost | Detached):
            self._end(event)

    def _asked(self, event: Granted | Abandoned) -> None:
        about = self._attributes(event)
        if event.queued or isinstance(event, Abandoned):
            self._wait(event, about)
        if isinstance(event, Granted):
            span = self._tracer.start_span("redlease.hold", attributes=about | {FENCE: event.fence})
            self._holds[event.resource, event.ticket, event.fence] = span
            if len(self._holds) > KEPT_MOST:
                self._holds.popitem(last=False)[1].end()

    def _wait(self, event: Granted | Abandoned, about: dict[str, str | int]) -> None:
        now_ns = time_ns()
        began_ns = now_ns - round(event.waited * 1e9)
        before = self._ended.get(event.resource)
        links = [Link(before[0])] if before is not None and before[1] >= began_ns else []
        span = self._tracer.start_span("redlease.wait", attributes=about, links=links, start_time=began_ns)
        if isinstance(event, Abandoned):
            span.set_attribute(ERROR, event.error)
            span.set_status(StatusCode.ERROR)
        span.end(now_ns)

    def _end(self, event: Released | Lost | Detached) -> None:
        span = self._holds.pop((event.resource, event.ticket, event.fence), None)
        if span is None:
            return
        if isinstance(event, Lost):
            span.set_attribute(REASON, event.reason)
            span.set_status(StatusCode.ERROR, "the permit was lost")
        elif isinstance(event, Detached):
            span.set_attribute(DETACHED, True)
        span.end()
        if isinstance(event, Detached):  # nobody's wait ended with it
            return
        self._ended[event.resource] = span.get_span_context(), time_ns()
        self._ended.move_to_end(event.resource)
        if len(self._ended) > KEPT_MOST:
            self._ended.popitem(last=False)

    def _attributes(self, event: Granted | Abandoned) -> dict[str, str | int]:
        about: dict[str, str | int] = {TICKET: event.ticket, WEIGHT: event.weight}
        if label := self._label(event.resource):
            about[RESOURCE] = label
        if event.key and (label := self._key_label(event.key)):
            about[KEY] = label
        return about
