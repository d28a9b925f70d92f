"""What a client gets as `on_event` to be observed."""

from __future__ import annotations

from collections.abc import Callable

from opentelemetry.metrics import MeterProvider, get_meter
from opentelemetry.trace import TracerProvider, get_tracer

from redlease.events import Event

from .metrics import Metrics
from .spans import Spans

NAME = "redlease"  # of the meter and the tracer


class Telemetry:
    """Records the events of clients as metrics, and as spans in traces that are recorded.

    One object serves all clients of a process, on both faces. The providers are the global ones unless given.

    Args:
        resource_label: Gets the name of a resource and returns what stands for it in `redlease.resource`: few different
            values, such as the part before a colon. Without it nothing is recorded of which resource it was.
        traces: Whether to make spans.
        meter_provider: What gives the meter.
        tracer_provider: What gives the tracer.

    Example:
        >>> telemetry = Telemetry(resource_label=lambda name: name.partition(":")[0])  # doctest: +SKIP
        >>> client = Redlease.from_url(url, on_event=telemetry)  # doctest: +SKIP
    """

    def __init__(
        self,
        *,
        resource_label: Callable[[str], str] | None = None,
        traces: bool = True,
        meter_provider: MeterProvider | None = None,
        tracer_provider: TracerProvider | None = None,
    ) -> None:
        self._metrics = Metrics(get_meter(NAME, meter_provider=meter_provider), resource_label)
        self._spans = Spans(get_tracer(NAME, tracer_provider=tracer_provider), resource_label) if traces else None

    def __call__(self, event: Event) -> None:
        """Records an event."""
        self._metrics.take(event)
        if self._spans is not None:
            self._spans.take(event)
