"""Clients for tests, on fakeredis: in memory, in this process, without a server. And a model of what servers do.

    pip install 'redlease[testing]'

The extra also installs the pytest fixture `redlease_client`: see `redlease.testing.plugin`. `Model` is the
specification of the protocol as a program: see `redlease.testing.model`. `Simulation` and `explore` run code that uses
clients in virtual time, under faults that a seed draws: see docs/how-to/simulate.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from redlease import Redlease

from .model import Model
from .simulation.exploring import explore
from .simulation.faults import Fault, draw_faults
from .simulation.world import Report, Simulation, SimulationFailed

if TYPE_CHECKING:
    from fakeredis import FakeServer
else:
    FakeServer = Any  # for those who look at the types while the program runs, such as frameworks that inject


__all__ = ["Fault", "Model", "Report", "Simulation", "SimulationFailed", "draw_faults", "explore", "fake_client"]


def fake_client(*, server: FakeServer | None = None, **settings: Any) -> Redlease:
    """Makes a client with a fake server in this process.

    Args:
        server: A `fakeredis.FakeServer`, to share it between clients as processes share a real one; a new one by
            default.
        **settings: As for `Redlease`: `prefix`, `owner`, `lease`, `waiter_lease`, `idle_ttl`, `call_timeout`,
            `on_event`.

    Raises:
        ModuleNotFoundError: fakeredis is not installed: `pip install 'redlease[testing]'`.
    """
    try:
        import fakeredis  # noqa: PLC0415 - it comes with an extra, and the plugin is loaded in every run of pytest
    except ImportError as error:
        raise ModuleNotFoundError(f"fakeredis is needed: pip install 'redlease[testing]' ({error})") from error

    return Redlease(fakeredis.FakeAsyncRedis(server=server or fakeredis.FakeServer()), **settings)
