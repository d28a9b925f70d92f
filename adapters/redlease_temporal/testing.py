"""For tests of workflows that use locks, without Redis: the plugin with an engine in memory.

    pip install 'redlease[temporal,testing]'

It serves one process, under any `WorkflowEnvironment`. With `time_skipping` a workflow waits for its permit by a signal
instead of an activity, as a pending activity keeps the server from skipping time; leases then follow the real clock.
"""

from __future__ import annotations

from typing import Any

from redlease.testing import fake_client

from .worker import RedleasePlugin


class InMemoryPlugin(RedleasePlugin):
    """A plugin whose resources exist in this process only.

    Args:
        time_skipping: For `WorkflowEnvironment.start_time_skipping`.
        prefix: See `RedleasePlugin`.
        **settings: As for `RedleasePlugin`.

    Raises:
        ModuleNotFoundError: fakeredis is not installed: `pip install 'redlease[testing]'`.

    Example:
        >>> plugin = InMemoryPlugin(time_skipping=True)  # doctest: +SKIP
        >>> async with await WorkflowEnvironment.start_time_skipping(plugins=[plugin]) as env:  # doctest: +SKIP
        ...     ...
    """

    def __init__(self, *, time_skipping: bool = False, prefix: str = "redlease", **settings: Any) -> None:
        import fakeredis  # noqa: PLC0415 - it comes with an extra

        server = fakeredis.FakeServer()
        super().__init__(lambda: fake_client(server=server, prefix=prefix), prefix=prefix, **settings)
        self._settings = self._settings._replace(by_signal=time_skipping)
