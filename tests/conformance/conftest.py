"""The faces of the library: every promise is kept by the blocking one too, unless it is about tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import fakeredis
import pytest
from blocking import Proxy, interruptible_calls

import redlease.sync

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from redlease import Redlease

    from conftest import Servers

FACES = ("asyncio", "blocking")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test of an engine on both faces, unless it says why it is of tasks alone."""
    if "face" in metafunc.fixturenames and "engine" in metafunc.fixturenames:
        of_tasks = metafunc.definition.get_closest_marker("of_tasks")
        metafunc.parametrize("face", FACES[:1] if of_tasks else FACES, indirect=True)


@pytest.fixture
def face(request: pytest.FixtureRequest) -> str:
    """The face of the library that a test uses."""
    return getattr(request, "param", FACES[0])


@pytest.fixture
def client_of_engine(
    client_of_engine: Callable[..., Redlease],
    engine: str,
    face: str,
    servers: Servers,
    fake_server: fakeredis.FakeServer,
) -> Iterator[Callable[..., Redlease]]:
    """Makes a client of the engine and the face that is not entered yet."""
    if face == FACES[0]:
        yield client_of_engine
        return

    def make(**options: Any) -> Redlease:
        if engine == "fakeredis":
            client = redlease.sync.Redlease(fakeredis.FakeRedis(server=fake_server), **options)
        else:
            client = redlease.sync.Redlease.from_url(servers.url(engine), **options)
        return cast("Redlease", Proxy(client))

    with interruptible_calls():
        yield make


@pytest.fixture
def client_by_default(client_by_default: Callable[..., Redlease] | None, face: str) -> Callable[..., Redlease] | None:
    """As elsewhere; it asks for the face, so that a test which has clients is seen to have one."""
    return client_by_default
