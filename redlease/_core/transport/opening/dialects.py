"""How a client speaks to a server: servers, proxies and settings differ in what they understand."""

from __future__ import annotations

import re
from typing import Any, Literal

from redis.asyncio import ConnectionPool

Protocol = Literal[2, 3]  # the version of RESP: 3 on one connection, 2 on one for calls and one for messages

# A server without HELLO, or with version 2 alone; or one that takes no other command on a subscribed connection.
_REFUSES_3 = re.compile(
    r"NOPROTO|(?:ERR )?unknown command [`']?HELLO|unsupported command [`']?HELLO|.*allowed in this context",
    re.IGNORECASE,
)
LOSSES_MOST = 3  # connections lost while messages are probed, before the client tries RESP2

_remembered: dict[tuple[object, ...], Protocol] = {}


def protocol_for(pool: ConnectionPool) -> Protocol:
    """Returns the protocol with which the server of a pool was found to work; at first RESP3."""
    return _remembered.get(_address(pool), 3)


def remember_resp2(pool: ConnectionPool) -> None:
    """Lets all clients in this process speak RESP2 to the server of a pool."""
    _remembered[_address(pool)] = 2


def forget_all() -> None:
    """Forgets what was found, for tests."""
    _remembered.clear()


def refuses_resp3(text: str) -> bool:
    """Returns True if an error says that the server cannot speak RESP3 as redlease needs it."""
    return _REFUSES_3.match(text) is not None


def declared_protocol(settings: dict[str, Any]) -> Protocol | None:
    """Returns the protocol that a URL or its options ask for; None if they leave it open.

    Raises:
        ValueError: It is neither 2 nor 3.
    """
    given = settings.get("protocol")
    if given is None:
        return None
    if str(given) not in ("2", "3"):
        raise ValueError(f"protocol must be 2 or 3, not {given!r}")
    return 2 if str(given) == "2" else 3


def _address(pool: ConnectionPool) -> tuple[object, ...]:
    settings = pool.connection_kwargs
    return (*(settings.get(name) for name in ("host", "port", "path")), getattr(pool, "service_name", None))
