"""Spans of waits and holds, as OpenTelemetry's SDK exports them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from redlease import LeaseLost
from redlease.otel import Telemetry, link_to, trace_metadata

from helpers import until_waiting

if TYPE_CHECKING:
    from redlease import Redlease

    from conftest import MakeClient

pytestmark = pytest.mark.parametrize("engine", ["fakeredis"])


@pytest.fixture
async def observed(engine: str, make_client: MakeClient, tracers: TracerProvider) -> Redlease:
    """A client that makes spans."""
    return await make_client(on_event=Telemetry(tracer_provider=tracers, meter_provider=MeterProvider()))


def named(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    """Return the spans by name, the last of each."""
    return {span.name: span for span in exporter.get_finished_spans()}


async def test_a_waiter_is_linked_to_who_released(
    observed: Redlease, tracers: TracerProvider, exporter: InMemorySpanExporter
) -> None:
    """Wait and hold are children of the caller's span, and the wait links to the hold that ended for it."""
    lock, tracer = observed.lock("r"), tracers.get_tracer("test")

    async def wait() -> None:
        with tracer.start_as_current_span("second"):
            async with lock.hold():
                pass

    with tracer.start_as_current_span("first"):
        async with lock.hold() as first:
            waiting = asyncio.create_task(wait())
            await until_waiting(lock, 1)
    await waiting
    spans = exporter.get_finished_spans()
    assert sorted(span.name for span in spans) == [
        "first",
        "redlease.hold",
        "redlease.hold",
        "redlease.wait",
        "second",
    ]
    own, wait_span, second = (named(exporter)[name] for name in ("first", "redlease.wait", "second"))
    hold = next(span for span in spans if (span.attributes or {}).get("redlease.fence") == first.fence)
    assert hold.parent is not None
    assert hold.parent.span_id == own.context.span_id
    assert wait_span.parent is not None
    assert wait_span.parent.span_id == second.context.span_id
    assert [link.context.span_id for link in wait_span.links] == [hold.context.span_id]
    assert wait_span.start_time is not None
    assert wait_span.end_time is not None
    assert 0 < wait_span.end_time - wait_span.start_time < 60e9


async def test_failures_are_errors(observed: Redlease, tracers: TracerProvider, exporter: InMemorySpanExporter) -> None:
    """A request that timed out and a hold that was lost are spans with the status of an error, and say why."""
    lock = observed.lock("r")
    with tracers.get_tracer("test").start_as_current_span("caller"), pytest.raises(LeaseLost):
        async with lock.hold(ticket="t"):
            with pytest.raises(TimeoutError):
                await lock.acquire(timeout=0.5)
            await lock.release("t")
            await asyncio.sleep(30)
    wait, hold = named(exporter)["redlease.wait"], named(exporter)["redlease.hold"]
    assert wait.status.status_code == hold.status.status_code == StatusCode.ERROR
    assert (wait.attributes or {})["error.type"] == "AcquireTimeout"
    assert (hold.attributes or {})["redlease.loss.reason"] == "taken"


async def test_a_detached_hold_ends_its_span(
    observed: Redlease, tracers: TracerProvider, exporter: InMemorySpanExporter
) -> None:
    """The permit lives on, for another process perhaps; the span tells of the hold, without an error."""
    with tracers.get_tracer("test").start_as_current_span("caller"):
        hold = await observed.lock("r").hold()
        permit = hold.detach()
    span = named(exporter)["redlease.hold"]
    assert (span.attributes or {})["redlease.detached"] is True
    assert span.status.status_code == StatusCode.UNSET
    await observed.lock("r").release(permit)
    assert len(exporter.get_finished_spans()) == 2


async def test_outside_of_a_trace_there_are_no_spans(observed: Redlease, exporter: InMemorySpanExporter) -> None:
    """Locks begin no traces of their own."""
    async with observed.lock("r").hold():
        pass
    assert not exporter.get_finished_spans()


async def test_the_trace_context_in_metadata(observed: Redlease, tracers: TracerProvider) -> None:
    """Where it is asked for, whoever looks at a resource can link to the span of its holder."""
    lock = observed.lock("r")
    with tracers.get_tracer("test").start_as_current_span("caller") as span:
        async with lock.hold(metadata=trace_metadata()):
            (permit,) = (await lock.inspect()).holders
    link = link_to(permit.metadata)
    assert link is not None
    assert link.context.span_id == span.get_span_context().span_id
    assert link_to({}) is None


async def test_spans_name_the_key(
    engine: str, make_client: MakeClient, tracers: TracerProvider, exporter: InMemorySpanExporter
) -> None:
    """With a label of keys the spans of requests with a key have it, and no others."""
    telemetry = Telemetry(key_label=str.upper, max_keys=1, tracer_provider=tracers, meter_provider=MeterProvider())
    pool = (await make_client(on_event=telemetry)).semaphore("r", capacity=1)
    with tracers.get_tracer("test").start_as_current_span("caller"):
        for key in ("acme", "other", None):
            async with pool.hold(key=key):
                pass
    holds = [span for span in exporter.get_finished_spans() if span.name == "redlease.hold"]
    assert [(span.attributes or {}).get("redlease.key") for span in holds] == ["ACME", "OTHER", None]
