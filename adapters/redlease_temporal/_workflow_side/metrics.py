"""The metrics of workflows, through Temporal's meter, which records nothing while a run is replayed.

The names are those of the core as Prometheus spells them: Temporal's own exporter takes no dots, and adds no suffixes.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

from temporalio import workflow
from temporalio.common import MetricMeter

ResourceLabel = Callable[[str], str]


def granted(resource: str, label: ResourceLabel | None, waited: timedelta) -> None:
    """Counts a grant, and records how long it was waited for."""
    meter = _meter(resource, label)
    meter.create_counter("redlease_grants_total", "Permits granted.").add(1)
    wait = meter.create_histogram_float("redlease_wait_duration_seconds", "From a request to its grant.", "s")
    wait.record(_seconds(waited))


def held(resource: str, label: ResourceLabel | None, lasted: timedelta) -> None:
    """Records how long a hold lasted that has ended."""
    hold = _meter(resource, label).create_histogram_float(
        "redlease_hold_duration_seconds", "From a grant to its end.", "s"
    )
    hold.record(_seconds(lasted))


def lost(resource: str, label: ResourceLabel | None) -> None:
    """Counts a hold that was lost."""
    _meter(resource, label).create_counter("redlease_losses_total", "Holds that were lost.").add(1)


def _seconds(lasted: timedelta) -> float:
    return max(0.0, lasted.total_seconds())  # the clock of workflow tasks may be stepped


def _meter(resource: str, label: ResourceLabel | None) -> MetricMeter:
    meter = workflow.metric_meter()
    if label is None or workflow.unsafe.is_replaying():
        return meter
    try:
        return meter.with_additional_attributes({"redlease_resource": label(resource)})
    except Exception:  # noqa: BLE001  a metric must not fail the workflow
        workflow.logger.warning("resource_label failed for resource %r", resource, exc_info=True)
        return meter
