"""A primary that is found through Sentinel, anew on every connect."""

from __future__ import annotations

from typing import Any

from redis import exceptions
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool

from .addresses import Address, NamedServers
from .errors import RedleaseError

# A Sentinel that does not answer is passed over for the next one while there is still time to connect.
ANSWER_S = 0.3


class Sentinels(Sentinel):
    """Asks one after the other as redis-py does, and tells what each has answered where none knows the primary.

    Args:
        addresses: Where they listen.
        settings: Of the connections to them.
        others_min: How many others one has to know to be believed.
        reached_at: Where the primary is reached, whatever they say.
    """

    def __init__(
        self,
        addresses: list[Address],
        settings: dict[str, Any],
        others_min: int = 0,
        reached_at: str | None = None,
    ) -> None:
        timeouts = {"socket_timeout": ANSWER_S, "socket_connect_timeout": ANSWER_S, "retry": None}
        super().__init__(addresses, others_min, settings | timeouts)  # type: ignore[no-untyped-call]
        self._reached_at = reached_at

    async def discover_master(self, service_name: str) -> tuple[str, int]:
        """Where the primary is.

        Raises:
            RedleaseError: A Sentinel refused the user name or password, and no other one knows it.
            redis.exceptions.ConnectionError: None of them knows it now.
        """
        said = []
        refused = None
        for number, sentinel in enumerate(self.sentinels):
            try:
                services: Any = await sentinel.sentinel_masters()
            except (exceptions.ConnectionError, exceptions.TimeoutError) as error:
                refused = refused or _refusal(error)
                said.append(f"{_address_of(sentinel)}: {error}")
                continue
            state = services.get(service_name)
            if state and self.check_master_state(state, service_name):
                self.sentinels.insert(0, self.sentinels.pop(number))  # it is asked first the next time
                return self._reached_at or state["ip"], state["port"]
            said.append(f"{_address_of(sentinel)}: {'it is down' if state else 'no such service'}")
        raise refused or exceptions.ConnectionError(
            f"no Sentinel knows a primary of {service_name!r}: {'; '.join(said)}"
        )


def _address_of(sentinel: Any) -> Address:
    settings = sentinel.connection_pool.connection_kwargs
    return Address(settings["host"], settings["port"])


def _refusal(error: Exception) -> RedleaseError | None:
    if not isinstance(error, exceptions.AuthenticationError):
        return None
    return RedleaseError(
        f"a Sentinel refused the user name or password: {error}. Sentinels have their own: give them as "
        "`sentinel_username` and `sentinel_password`"
    )


class PrimaryPool(SentinelConnectionPool):
    """Asks the Sentinels where the primary is, each time, and keeps no connection to them."""

    async def get_master_address(self) -> Any:
        """Where the primary is now."""
        try:
            return await self.sentinel_manager.discover_master(self.service_name)
        finally:
            await self.sentinel_manager.aclose()


def primary_pool(servers: NamedServers) -> PrimaryPool:
    """What leads to the primary of `redis+sentinel://host:port[,host:port ...]/service[/database]`.

    User name and password of the URL are those of the primary; the options `sentinel_username` and `sentinel_password`
    are for the Sentinels. TLS (`rediss+sentinel://`) and its options are for both.

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
    """What leads to where a client of redis-py is led that asks Sentinels, on connections to them of our own.

    They have the short patience of ours: redis-py waits for a Sentinel that hangs for as long as connecting may take.

    Raises:
        ValueError: It leads to replicas.
    """
    if not given.is_master:
        raise ValueError(f"a replica grants no locks: give the client that `master_for({given.service_name!r})` makes")
    manager = given.sentinel_manager
    if type(manager) is not Sentinel:
        return given  # it may have a way of its own to find the primary
    addresses = [_address_of(sentinel) for sentinel in manager.sentinels]
    fixed = (manager.min_other_sentinels, manager._force_master_ip)
    settings = {name: value for name, value in given.connection_kwargs.items() if name != "connection_pool"}
    settings["connection_class"] = given.connection_class
    return PrimaryPool(given.service_name, Sentinels(addresses, manager.sentinel_kwargs, *fixed), **settings)  # type: ignore[no-untyped-call]
