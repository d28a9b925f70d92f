"""What a client gets as `on_event` to be observed."""

from __future__ import annotations

import logging
from collections.abc import Callable

from opentelemetry.metrics import MeterProvider, get_meter
from opentelemetry.trace import TracerProvider, get_tracer

from redlease._core.log import about
from redlease.events import Event

from .metrics import Metrics, bounded
from .spans import Spans

NAME = "redlease"  # of the meter and the tracer

logger = logging.getLogger("redlease")


class Telemetry:
    """Records the events of clients as metrics, and as spans in traces that are recorded.

    One object serves all clients of a process, on both faces. The providers are the global ones unless given.

    Args:
        resource_label: Gets the name of a resource and returns what stands for it in `redlease.resource`: few different
            values, such as the part before a colon. Without it nothing is recorded of which resource it was, nor for
            names for which it raises, which is logged once.
        key_label: Gets the key of a request and returns what stands for it in `redlease.key`, such as the key itself.
            Without it nothing is recorded of keys, nor for those for which it raises, which is logged once.
        max_keys: How many values of `key_label` metrics have, the first that come; all others are "other". Spans have
            each value.
        traces: Whether to make spans.
        meter_provider: What gives the meter.
        tracer_provider: What gives the tracer.

    Raises:
        ValueError: `max_keys` is less than 1.

    Example:
        >>> telemetry = Telemetry(resource_label=lambda name: name.partition(":")[0])  # doctest: +SKIP
        >>> client = Redlease.from_url(url, on_event=telemetry)  # doctest: +SKIP
    """

    def __init__(
        self,
        *,
        resource_label: Callable[[str], str] | None = None,
        key_label: Callable[[str], str] | None = None,
        max_keys: int = 100,
        traces: bool = True,
        meter_provider: MeterProvider | None = None,
        tracer_provider: TracerProvider | None = None,
    ) -> None:
        if max_keys < 1:
            raise ValueError(f"max_keys must be at least 1, not {max_keys!r}")
        of_resource = _no_label if resource_label is None else _harmless("resource_label", resource_label)
        of_key = _no_label if key_label is None else _harmless("key_label", key_label)
        self._metrics = Metrics(get_meter(NAME, meter_provider=meter_provider), of_resource, bounded(of_key, max_keys))
        self._spans = Spans(get_tracer(NAME, tracer_provider=tracer_provider), of_resource, of_key) if traces else None
        if resource_label is None:
            self._metrics.begin(("", ""))

    def __call__(self, event: Event) -> None:
        """Records an event."""
        self._metrics.take(event)
        if self._spans is not None:
            self._spans.take(event)


def _harmless(name: str, given_label: Callable[[str], str]) -> Callable[[str], str]:
    """Returns a label that never raises: in the thread of a reader it would keep all other metrics from being read."""
    has_failed = False

    def label(subject: str) -> str:
        nonlocal has_failed
        try:
            return given_label(subject)
        except Exception:
            if not has_failed:
                has_failed = True
                logger.warning(
                    "the function %s failed for %r, which is recorded without a label; it may fail again unlogged",
                    *(name, subject),
                    exc_info=True,
                    extra=about(subject if name == "resource_label" else None),
                )
            return ""

    return label


def _no_label(_: str) -> str:
    return ""
