"""Which tests `make test` runs, and which are for `make test-rest`; README.md beside this file says so in words.

Each test is of exactly one tier, which follows from its marks, the engine it runs on and the servers it asks for.
"""

from __future__ import annotations

import pytest

QUICK, REST = TIERS = ("quick", "rest")

# How long a quick test takes at most on an idle machine.
QUICK_S = 2.0

# What pip brings. A test that takes any one server, as one is as good as another for it, takes valkey9.
QUICK_ENGINES = {"fakeredis", "valkey9"}

ENGINE_FIXTURES = {"engine", "real_engine", "clock_engine"}

# Pip brings none of them. What is marked `smoke` shows on the first, where that is at hand, that workflows are served.
TEMPORAL_SERVER = "temporal_server"
SERVERS_OF_TEMPORAL = {TEMPORAL_SERVER, "newest_temporal_server", "own_temporal_server", "time_skipping"}


def tier_of(item: pytest.Item) -> str:
    """Return the tier of a test."""
    return REST if is_marked_slow(item) or needs_more_than_pip(item) or repeats_on_a_server(item) else QUICK


def is_marked_slow(item: pytest.Item) -> bool:
    """Tell whether a test takes more than two seconds or two processes, is statistical, or starts another program."""
    return item.get_closest_marker("slow") is not None


def needs_more_than_pip(item: pytest.Item) -> bool:
    """Tell whether the engine or a server that a test asks for comes from elsewhere."""
    assert isinstance(item, pytest.Function)
    params = item.callspec.params if hasattr(item, "callspec") else {}
    engines = {params[name] for name in ENGINE_FIXTURES & params.keys()}
    servers = SERVERS_OF_TEMPORAL & set(item.fixturenames)
    if item.get_closest_marker("smoke"):
        servers -= {TEMPORAL_SERVER}
    return bool(servers) or not engines <= QUICK_ENGINES


def repeats_on_a_server(item: pytest.Item) -> bool:
    """Tell whether a test repeats for the blocking face, on a server, what is quick for asyncio there."""
    params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    return params.get("face") == "blocking" and params.get("engine") != "fakeredis"
