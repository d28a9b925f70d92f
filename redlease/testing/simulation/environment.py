"""What a simulation takes the place of while it runs: clocks, sleeping, and what is random."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import redis.utils

from redlease._core import clock
from redlease._core.transport import connection

from .loop import SimulatedLoop

REDIS_PY: Any = getattr(
    redis.utils, "get_lib_version", str
)()  # which redis-py would read from its metadata for each connection
EPOCH_S = 1_700_000_000.0  # the wall clock at the beginning
DRAWS = (
    *("betavariate", "choice", "choices", "expovariate", "gauss", "getrandbits", "normalvariate", "randbytes"),
    *("randint", "random", "randrange", "sample", "shuffle", "triangular", "uniform"),
)


def patches(loop: SimulatedLoop) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """Yield which name of which module is replaced, and by what."""

    def elapsed() -> float:
        """Read a clock, after which the process may stand still."""
        process, read = loop.current, loop.time()
        if process.stop_after_clock_s:
            seconds, process.stop_after_clock_s = process.stop_after_clock_s, 0.0
            process.stop(read, seconds)
        return read

    def wall() -> float:
        return EPOCH_S + elapsed() + loop.current.clock_offset_s

    def random_bytes(size: int) -> bytes:
        return loop.current.random.randbytes(size)

    yield time, "monotonic", elapsed
    yield time, "monotonic_ns", lambda: int(elapsed() * 1e9)
    yield time, "time", wall
    yield time, "time_ns", lambda: int(wall() * 1e9)
    yield time, "sleep", lambda seconds: loop.current.stop(loop.time(), seconds)
    yield clock, "clock_gettime", lambda _: elapsed()
    yield connection, "monotonic", elapsed
    yield redis.utils, "get_lib_version", lambda: REDIS_PY
    yield os, "urandom", random_bytes
    yield random, "_urandom", random_bytes  # which `secrets` reads
    for name in DRAWS:
        yield random, name, functools.partial(_drawn, loop, name)


def _drawn(loop: SimulatedLoop, name: str, *args: Any, **settings: Any) -> Any:
    return getattr(loop.current.random, name)(*args, **settings)


@contextlib.contextmanager
def replaced(loop: SimulatedLoop) -> Iterator[None]:
    """Put the stand-ins in place for this thread; the others go on with what is real."""
    own, before = threading.get_ident(), []

    def only_here(real: Callable[..., Any], stand_in: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **settings: Any) -> Any:
            return (stand_in if threading.get_ident() == own else real)(*args, **settings)

        return call

    try:
        for module, name, stand_in in patches(loop):
            real = getattr(module, name)
            before.append((module, name, real))
            setattr(module, name, only_here(real, stand_in))
        yield
    finally:
        for module, name, real in before:
            setattr(module, name, real)
