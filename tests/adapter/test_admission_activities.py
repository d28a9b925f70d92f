"""What the activities say by which runs take places, where they cannot; without a Temporal server."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment

from redlease_temporal.admission.activities import AdmissionActivities
from redlease_temporal.admission.rule import Entry
from redlease_temporal.errors import misused

if TYPE_CHECKING:
    from redlease_temporal.admission.slot_places import SlotAdmission
    from redlease_temporal.backends.redis.relay import Relay


def without_redis() -> Relay:
    """Stand in for the relay of a plugin that was given no Redis."""
    raise misused("the plugin was given no Redis")


def without_slots() -> SlotAdmission:
    """Stand in for what nobody is to ask for."""
    raise AssertionError


@pytest.mark.parametrize("name", ["reserve", "reserve_later", "forgo", "admit", "admit_later"])
async def test_without_redis_it_is_misuse(name: str) -> None:
    """The failure has the type by which workflow code knows misuse, and is not retried."""
    activities = AdmissionActivities(without_redis, without_slots)
    with pytest.raises(ApplicationError, match="given no Redis") as failed:
        await ActivityEnvironment().run(getattr(activities, name), Entry("Flow", "w1", 1))
    assert (failed.value.type, failed.value.non_retryable) == ("ValueError", True)
