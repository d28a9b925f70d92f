"""What the activities say by which runs take places, where they cannot; without a Temporal server."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import pytest
from fake_temporal import FakeTemporal
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment

from redlease_temporal._admission.activities import AdmissionActivities
from redlease_temporal._admission.rule import AdmissionRequest
from redlease_temporal._common.run_monitor import RunMonitor
from redlease_temporal.errors import usage_error

if TYPE_CHECKING:
    from redlease_temporal._admission.replacing import TakenSlot
    from redlease_temporal._admission.slot_admission import SlotAdmission
    from redlease_temporal._backends.redis.relay import Relay


def without_redis() -> Relay:
    """Stand in for the relay of a plugin that was given no Redis."""
    raise usage_error("the plugin was given no Redis")


def without_slots() -> SlotAdmission:
    """Stand in for what nobody is to ask for."""
    raise AssertionError


@pytest.mark.parametrize("name", ["reserve", "reserve_later", "cancel_reservation", "admit", "admit_later"])
async def test_without_redis_it_is_misuse(name: str) -> None:
    """The failure has the type by which workflow code knows misuse, and is not retried."""
    activities = AdmissionActivities(without_redis, without_slots)
    with pytest.raises(ApplicationError, match="given no Redis") as failed:
        await ActivityEnvironment().run(getattr(activities, name), AdmissionRequest("Flow", "w1", 1))
    assert (failed.value.type, failed.value.non_retryable) == ("ValueError", True)


async def test_what_waits_for_a_closed_run_takes_no_place() -> None:
    """A run waits for a place and closes, and another one of its ID begins: the first one's activity leaves off."""
    server = FakeTemporal()
    server.start("w1")
    admitted: list[AdmissionRequest] = []

    class Slots:
        """The places, of which the run's is taken by another workflow when it asks for the first time."""

        temporal = server
        monitor = RunMonitor(cast("Any", server), 1000)

        async def admit(self, entry: AdmissionRequest) -> bool:
            admitted.append(entry)
            return len(admitted) > 1

        async def taken_slots(self, _: AdmissionRequest) -> tuple[list[TakenSlot], float]:
            return [], 10

    activities = AdmissionActivities(without_redis, cast("Any", Slots))
    entry = AdmissionRequest("Flow", "w1", 1, chain="an earlier run", backend="slots", replaces=True, grace_ms=10_000)
    with pytest.raises(ApplicationError, match="'w1': the run that asked closed") as failed:
        await ActivityEnvironment().run(activities.admit_replacing, entry)
    assert failed.value.non_retryable
    assert len(admitted) == 1
    assert await ActivityEnvironment().run(activities.admit_replacing, replace(entry, chain="run of w1"))
