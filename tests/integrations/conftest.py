"""A server for each test, and the files of the pages."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

import pytest

from redlease import Redlease

from billing import Billing
from how_to import Project

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path
    from types import ModuleType

    from conftest import OwnServer
    from servers import Server


@pytest.fixture
def server(own_server: OwnServer, monkeypatch: pytest.MonkeyPatch) -> Server:
    """A server for this test alone, whose URL the pages find in the environment."""
    started = own_server("valkey9")
    monkeypatch.setenv("REDIS_URL", started.url)
    return started


@pytest.fixture
def project(tmp_path: Path, server: Server) -> Project:
    """A directory for the files of a page."""
    return Project(tmp_path, server.url)


@pytest.fixture
def billing(server: Server) -> Billing:
    """Drives the charges of the page."""
    return Billing(server.url)


@pytest.fixture
async def observer(server: Server) -> AsyncIterator[Redlease]:
    """A client of the same server."""
    async with Redlease.from_url(server.url) as client:
        yield client


@pytest.fixture
def load(project: Project, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ModuleType]]:
    """Imports a file of a page into this process: `load("fastapi", "app", TIMEOUT=0.1)`."""
    monkeypatch.syspath_prepend(str(project.directory))
    before = set(sys.modules)

    def load(page: str, module: str, **constants: Any) -> ModuleType:
        project.write(page, **constants)
        return importlib.import_module(module)

    yield load
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(project.directory)):
            del sys.modules[name]
