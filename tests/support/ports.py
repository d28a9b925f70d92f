"""Ports of loopback for servers, which stay theirs while they are restarted."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import random
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@functools.cache
def _ports() -> Iterator[int]:
    """Return the ports of this test process, which are no other's of the same run, in turn and then again."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 16
    ports = list(range(11_000 + worker * 600, 11_000 + (worker + 1) * 600))
    first = random.randrange(len(ports))
    return itertools.cycle(ports[first:] + ports[:first])


def free_port() -> int:
    """Return a free loopback port whose companion, 10,000 above it, is free too: a cluster's nodes talk there.

    Both are below those that the system gives to outgoing connections: one of these would take the port of a server
    that is away for a moment.
    """
    while True:
        port = next(_ports())
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):  # noqa: SIM117
            with socket.create_server(("127.0.0.1", port + 10_000)):
                return port
