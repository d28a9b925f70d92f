"""Clients without a server, for tests: on fakeredis, in memory, in this process.

    pip install 'redlease[testing]'

It also brings the pytest fixture `redlease_client`: see `redlease.testing.plugin`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from redlease import Redlease

if TYPE_CHECKING:
    from fakeredis import FakeServer


def fake_client(*, server: FakeServer | None = None, **settings: Any) -> Redlease:
    """A client of a server that exists in this process only.

    Args:
        server: A `fakeredis.FakeServer` that several clients share, as several processes share a real one; a new one
            by default.
        **settings: As for `Redlease`: `prefix`, `owner`, `lease`, `waiter_lease`, `idle_ttl`.

    Raises:
        ModuleNotFoundError: fakeredis is not installed: `pip install 'redlease[testing]'`.
    """
    import fakeredis  # noqa: PLC0415 - it comes with an extra, and the plugin is loaded in every run of pytest

    return Redlease(fakeredis.FakeAsyncRedis(server=server or fakeredis.FakeServer()), **settings)
