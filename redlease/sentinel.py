"""A primary that is found through Sentinel, anew on every connect."""

from __future__ import annotations

from typing import Any

from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool

from .addresses import NamedServers

# A Sentinel that does not answer is passed over for the next one while there is still time to connect.
ANSWER_S = 0.3


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
    timeouts = {"socket_timeout": ANSWER_S, "socket_connect_timeout": ANSWER_S, "retry": None}
    sentinels = Sentinel(servers.seeds, sentinel_kwargs=own | tls | timeouts)  # type: ignore[no-untyped-call]
    settings |= {"db": int(servers.path[1]) if len(servers.path) == 2 else 0, "ssl": servers.is_tls}
    return PrimaryPool(servers.path[0], sentinels, **settings)  # type: ignore[no-untyped-call]
