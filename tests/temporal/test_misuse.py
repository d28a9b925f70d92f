"""What is passed by mistake is told where it is passed, and what is used again works again."""

from __future__ import annotations

import asyncio
import copy
import math
import pickle
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import redis.asyncio
from exclusive_flows import Calling, Order, call_alone
from lock_flows import Locked, Use, work
from temporal_tools import Place
from temporalio.api.failure.v1 import Failure
from temporalio.client import Client, WorkflowFailureError
from temporalio.converter import DataConverter
from temporalio.exceptions import ActivityError, ApplicationError
from temporalio.worker import Worker

from redlease import Redlease
from redlease_temporal import LeaseLost, SequenceFailed, lock, outside, semaphore
from redlease_temporal._admission.rule import resource_of
from redlease_temporal.errors import usage_error
from redlease_temporal.worker import RedleasePlugin

if TYPE_CHECKING:
    from collections.abc import Callable

    from quiet import Quiet

URL = "redis://localhost"


@pytest.mark.parametrize(
    "make",
    [
        lambda: RedleasePlugin(redis.asyncio.Redis()),  # type: ignore[arg-type]
        lambda: RedleasePlugin(Redlease.from_url(URL)),  # type: ignore[arg-type]
        lambda: RedleasePlugin(URL.encode()),  # type: ignore[arg-type]
        lambda: RedleasePlugin(URL, wait_atempt=3),
        lambda: RedleasePlugin(lambda: Redlease.from_url(URL), wait_atempt=3),
        lambda: RedleasePlugin(wait_atempt=3),
        *(
            lambda looks=looks: RedleasePlugin(URL, polls_per_second=looks)
            for looks in (0, -1, math.nan, math.inf, "5", None)
        ),
        *(lambda group=group: RedleasePlugin(URL, group=group) for group in (5, None, "\ud800", "x" * 200)),
    ],
)
async def test_a_plugin_is_given_something_wrong(make: Callable[[], RedleasePlugin]) -> None:
    """Whatever it is, the plugin refuses it as it is made, not once a worker runs."""
    with pytest.raises(ValueError, match=r"RedleasePlugin|wait_atempt|polls_per_second|group"):
        make()


@pytest.mark.parametrize("result", [None, "error"])
async def test_a_plugin_that_makes_no_client(place: Place, result: str | None, quiet: Quiet) -> None:
    """A worker that cannot begin says why and ends, instead of standing still; so does the block around it."""
    quiet.allow("the worker of task queue .* cannot run")

    def make_client() -> Any:
        if result == "error":
            raise LookupError("no URL is configured")
        return result

    client = await Client.connect(place.address, plugins=[RedleasePlugin(make_client)])
    async with asyncio.timeout(20):
        with pytest.raises((LookupError, ValueError), match=r"no URL is configured|has to make a Redlease client"):
            await Worker(client, task_queue=place.task_queue, workflows=[Locked], activities=[work]).run()
        with pytest.raises((LookupError, ValueError), match=r"no URL is configured|has to make a Redlease client"):
            async with Worker(client, task_queue=place.task_queue, workflows=[Locked], activities=[work]):
                await asyncio.sleep(60)


def test_a_client_in_one_event_loop_after_another(place: Place) -> None:
    """Workers of one client serve workflows with locks in a later event loop, too."""
    clients: list[Client] = []

    async def use(number: int) -> list[int]:
        if not clients:
            clients.append(await Client.connect(place.address, plugins=[RedleasePlugin(place.redis_url)]))
        async with Worker(clients[0], task_queue=place.task_queue, workflows=[Locked], activities=[work]):
            return await clients[0].execute_workflow(
                Locked.run,
                Use(f"{place.task_queue}-r"),
                id=f"{place.task_queue}-{number}",
                task_queue=place.task_queue,
                execution_timeout=timedelta(seconds=20),
            )

    fences = [asyncio.run(use(number)) for number in range(2)]
    assert fences[0] < fences[1]


async def test_a_key_that_makes_too_long_a_name(place: Place) -> None:
    """An `@exclusive` activity whose resource can have no such name fails for good: no attempt can mend it."""
    async with place.serving([Calling], [call_alone]) as client:
        handle = await client.start_workflow(
            Calling.run,
            args=["call_alone", Order(vendor="x" * 600), 0],
            id=f"{place.task_queue}-long",
            task_queue=place.task_queue,
        )
        with pytest.raises(WorkflowFailureError) as caught:
            await asyncio.wait_for(handle.result(), 20)
    activity_error = caught.value.cause
    assert isinstance(activity_error, ActivityError)
    assert isinstance(activity_error.cause, ApplicationError)
    assert activity_error.cause.type == "ValueError"
    assert "611 bytes" in str(activity_error.cause)


@pytest.mark.parametrize("owner", ["", 0, False, 7, b"x", "x" * 300])
async def test_an_owner_that_a_slot_could_not_read(place: Place, owner: Any) -> None:
    """A service that acquires a slot is told of its mistake before a slot has it."""
    async with place.serving([Locked], [work]) as client:
        pool = outside.lock(client, f"{place.task_queue}-r")
        with pytest.raises(ValueError, match="owner"):
            await pool.acquire(owner=owner)
        permit = await pool.acquire(owner=None)
        assert await pool.release(permit)


@pytest.mark.parametrize(
    "make",
    [
        lambda: lock(""),
        lambda: semaphore("r", 0),
        lambda: lock("r", backend="none"),
        lambda: semaphore("r", 2000, backend="slots"),
        lambda: lock("r").hold(on_lost="ignore"),  # type: ignore[arg-type]
    ],
)
async def test_misuse_in_a_workflow_is_a_value_error(make: Callable[[], object]) -> None:
    """It is caught as elsewhere, and crosses as the failure that it always was: of that type, for good."""
    with pytest.raises(ValueError, match=r"name|capacity|backend|on_lost") as caught:
        make()
    failure = Failure()
    await DataConverter.default.encode_failure(caught.value, failure)
    assert isinstance(caught.value, ApplicationError)
    assert failure.message == caught.value.message
    assert not failure.message.startswith("ValueError")
    assert failure.application_failure_info.type == "ValueError"
    assert failure.application_failure_info.non_retryable
    decoded = await DataConverter.default.decode_failure(failure)
    assert str(decoded) == str(caught.value) == f"ValueError: {failure.message}"


def test_no_two_limits_have_one_name() -> None:
    """Whatever colons there are in workflow types and keys, each pair has places of its own."""
    pairs = [("a", None), ("a", "b"), ("a", "b:c"), ("a:b", None), ("a:b", "c"), ("a%3Ab", None), ("a%3Ab", "c")]
    assert len({resource_of(*pair) for pair in pairs}) == len(pairs)


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))])
@pytest.mark.parametrize(
    "error",
    [
        LeaseLost("it is gone", resource="r", ticket="t"),
        SequenceFailed("it failed", resource="r", index=3, results=[1, "two"]),
        usage_error("it cannot be"),
    ],
)
def test_an_error_can_be_copied(error: Any, how: Callable[[Any], Any]) -> None:
    """A copy of an error says the same, of the same request, and fails a workflow in the same way."""
    copied = how(error)
    assert type(copied) is type(error)
    assert str(copied) == str(error)
    for name in ("message", "type", "non_retryable", "resource", "ticket", "index", "results"):
        assert getattr(copied, name, None) == getattr(error, name, None)
