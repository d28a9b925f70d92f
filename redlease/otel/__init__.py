"""Metrics and traces through OpenTelemetry's API: `Redlease.from_url(url, on_event=Telemetry())`.

Needs `pip install 'redlease[otel]'`; the SDK and its exporters are the application's. The names are in
docs/observability.md.
"""

from .spans import link_to, trace_metadata
from .telemetry import Telemetry

__all__ = ["Telemetry", "link_to", "trace_metadata"]
