"""The settings of a plugin, checked once."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from temporalio.client import Client
from temporalio.converter import DataConverter, DefaultPayloadConverter

from redlease import Redlease
from redlease._core import limits
from redlease._core.limits import Duration


class Settings(NamedTuple):
    """The settings of a plugin; durations in ms unless named otherwise.

    Attributes:
        make_client: Makes a relay's Redis client, called in the relay's event loop; None if there is no Redis.
        group: Separates setups in one namespace that must not serve each other; empty: by the data converter.
        waiter_lease_ms: How long a workflow's queue entry is kept when no relay is left to renew it.
        unknown_grace_ms: How long a permit is renewed while the Temporal server does not report the run's status.
        adopt_window_ms: How long a run that was continued as new has to adopt the permits of its predecessor.
        wait_attempt_s: How long one attempt of the waiting activity may last, in seconds.
        by_signal: Whether a run waits for a signal instead of an activity; a sent signal counts as recorded.
    """

    make_client: Callable[[], Redlease] | None
    prefix: str
    group: str
    waiter_lease_ms: int
    idle_ttl_ms: int
    unknown_grace_ms: int
    adopt_window_ms: int
    wait_attempt_s: float
    polls_per_second: float
    by_signal: bool = False

    def group_of(self, client: Client) -> str:
        """The group of this client's relay: setups whose data converters are alike share a group."""
        if self.group:
            return self.group
        converter, codec = client.data_converter.payload_converter_class, client.data_converter.payload_codec
        name = "json" if is_stock(client.data_converter) else f"{converter.__module__}.{converter.__qualname__}"
        return name if codec is None else f"{name} {type(codec).__module__}.{type(codec).__qualname__}"

    def task_queue_of(self, client: Client) -> str:
        """The queue of the internal worker, in the client's namespace."""
        return f"redlease:{self.prefix}:{self.group_of(client)}"


def is_stock(data_converter: DataConverter) -> bool:
    """Whether it is the default converter or pydantic's, which encode the library's payloads alike."""
    converter = data_converter.payload_converter_class
    return converter is DefaultPayloadConverter or converter.__module__.startswith("temporalio.contrib.pydantic")


def checked(
    make_client: Callable[[], Redlease] | None,
    *,
    prefix: str,
    group: str,
    waiter_lease: Duration,
    idle_ttl: Duration,
    unknown_grace: Duration,
    adopt_window: Duration,
    wait_attempt: Duration,
    polls_per_second: float,
) -> Settings:
    """The settings; raises ValueError for a wrong one."""
    if not isinstance(polls_per_second, int | float) or not 0 < polls_per_second < math.inf:
        raise ValueError(f"polls_per_second must be a number above 0, not {polls_per_second!r}")
    if group != "":
        limits.checked_text("group", group, limits.PREFIX_BYTES_MAX)
    return Settings(
        make_client,
        limits.checked_prefix(prefix),
        group,
        limits.milliseconds("waiter_lease", waiter_lease, limits.LEASE_MS_MIN),
        limits.milliseconds("idle_ttl", idle_ttl, 1),
        limits.milliseconds("unknown_grace", unknown_grace),
        limits.milliseconds("adopt_window", adopt_window),
        limits.milliseconds("wait_attempt", wait_attempt, 1000) / 1000,
        polls_per_second,
    )
