"""Finds the primary through Sentinel, again on every connect."""

from __future__ import annotations

from typing import Any

from redis import exceptions
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool

from redlease.errors import RedleaseError

from .addresses import Address, NamedServers
from .base import GrowingTimeout

# The time limit for one Sentinel, at first and at most: short, so that there is time left to ask the next one and to
# connect; longer after each that was late, since all of them may be slow.
ANSWER_S = (0.3, 2.4)


class Sentinels(Sentinel):
    """Asks the Sentinels in turn, as redis-py does; if none knows the primary, the error has the answer of each.

    Args:
        addresses: The addresses of the Sentinels.
        settings: The settings of the connections to them.
        others_min: How many other Sentinels a Sentinel must know for its answer to count.
        reached_at: The host of the primary, if it differs from what the Sentinels say.
    """

    def __init__(
        self,
        addresses: list[Address],
        settings: dict[str, Any],
        others_min: int = 0,
        reached_at: str | None = None,
    ) -> None:
        ours = {"socket_timeout": None, "socket_connect_timeout": None, "retry": None}
        super().__init__(addresses, others_min, settings | ours)  # type: ignore[no-untyped-call]
        self._reached_at = reached_at
        self._connect_timeout = GrowingTimeout(ANSWER_S[1])

    async def discover_master(self, service_name: str) -> tuple[str, int]:
        """Returns host and port of the primary.

        Raises:
            RedleaseError: None knows the primary, and one refused the user name or password or is not a Sentinel.
            redis.exceptions.ConnectionError: None knows the primary now.
        """
        text = []
        refused = None
        for number, sentinel in enumerate(self.sentinels):
            try:
                async with self._connect_timeout.attempt(ANSWER_S[0]):
                    services: Any = await sentinel.sentinel_masters()
            except (exceptions.RedisError, OSError) as error:
                refused = refused or _refusal(error, _address_of(sentinel))
                text.append(f"{_address_of(sentinel)}: {str(error) or 'no answer in time'}")
                continue
            state = services.get(service_name)
            if state and self.check_master_state(state, service_name):
                self.sentinels.insert(0, self.sentinels.pop(number))  # it is asked first the next time
                return self._reached_at or state["ip"], state["port"]
            text.append(f"{_address_of(sentinel)}: {'it is down' if state else 'no such service'}")
        raise refused or exceptions.ConnectionError(
            f"no Sentinel knows a primary of {service_name!r}: {'; '.join(text)}"
        )


def _address_of(sentinel: Any) -> Address:
    settings = sentinel.connection_pool.connection_kwargs
    return Address(settings["host"], settings["port"])


def _refusal(error: Exception, address: Address) -> RedleaseError | None:
    if str(error).lower().startswith("unknown command"):
        return RedleaseError(f"the server at {address} is no Sentinel. Give a single server as `redis://`")
    if not isinstance(error, exceptions.AuthenticationError | exceptions.ResponseError):
        return None
    text = str(error).rstrip(". ")
    if not isinstance(error, exceptions.AuthenticationError):
        return RedleaseError(f"the Sentinel at {address} refused to tell where the primary is: {text}")
    return RedleaseError(
        f"a Sentinel refused the user name or password: {text}. Sentinels have their own: give them as "
        "`sentinel_username` and `sentinel_password`"
    )


class PrimaryPool(SentinelConnectionPool):
    """Asks the Sentinels for the primary on every connect, and keeps no connection to them."""

    async def get_master_address(self) -> Any:
        """Returns host and port of the current primary."""
        try:
            return await self.sentinel_manager.discover_master(self.service_name)
        finally:
            # Without waiting, unlike `aclose`: who is cancelled again meanwhile would leave connections open.
            for sentinel in self.sentinel_manager.sentinels:
                pool = sentinel.connection_pool
                for connection in (*pool._available_connections, *pool._in_use_connections):
                    await connection.disconnect(nowait=True)


def primary_pool(servers: NamedServers) -> PrimaryPool:
    """Returns the pool for a URL `redis+sentinel://host:port[,host:port ...]/service[/database]`.

    User name and password of the URL are for the primary; the options `sentinel_username` and `sentinel_password` are
    for the Sentinels. TLS (`rediss+sentinel://`) and its options apply to both.

    Raises:
        ValueError: The URL is wrong.
    """
    if len(servers.path) not in (1, 2) or not all(part.isdecimal() for part in servers.path[1:]):
        raise ValueError("the URL of Sentinels ends in the name of the service and the database: /mymaster/0")
    pool = servers.pool(servers.seeds[0])
    settings = {key: value for key, value in pool.connection_kwargs.items() if key not in {"host", "port"}}
    own = {name: settings.pop(f"sentinel_{name}", None) for name in ("username", "password")}
    tls = {key: value for key, value in settings.items() if key.startswith("ssl_")} | {"ssl": servers.is_tls}
    sentinels = Sentinels(servers.seeds, own | tls)
    settings |= {"db": int(servers.path[1]) if len(servers.path) == 2 else 0, "ssl": servers.is_tls}
    return PrimaryPool(servers.path[0], sentinels, **settings)  # type: ignore[no-untyped-call]


def own_pool(given: SentinelConnectionPool) -> SentinelConnectionPool:
    """Returns a pool like that of a redis-py client, but with our own connections to the Sentinels.

    Ours have a short timeout: redis-py waits for an unresponsive Sentinel as long as a whole connect may take.

    Raises:
        ValueError: The client connects to replicas.
    """
    if not given.is_master:
        raise ValueError(f"a replica grants no locks: give the client that `master_for({given.service_name!r})` makes")
    manager = given.sentinel_manager
    if type(manager) is not Sentinel:
        return given  # a subclass may find the primary differently
    addresses = [_address_of(sentinel) for sentinel in manager.sentinels]
    fixed = (manager.min_other_sentinels, manager._force_master_ip)
    settings = {name: value for name, value in given.connection_kwargs.items() if name != "connection_pool"}
    settings["connection_class"] = given.connection_class
    return PrimaryPool(given.service_name, Sentinels(addresses, manager.sentinel_kwargs, *fixed), **settings)  # type: ignore[no-untyped-call]
