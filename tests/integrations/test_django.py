"""Django: the page's views under gunicorn, its command as processes, and settings that are wrong."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import httpx
import pytest

from helpers import eventually, until_waiting
from ports import free_port

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from redlease import Redlease

    from billing import Billing
    from how_to import Project
    from servers import Server

# What a project has besides the files of the page.
PROJECT = {
    "project.py": """
from settings import *

SECRET_KEY = "of a test"
ALLOWED_HOSTS = ["127.0.0.1"]
INSTALLED_APPS = ["shop"]
ROOT_URLCONF = "urls"
REDLEASE["default"]["CALL_TIMEOUT"] = 0.5
""",
    "urls.py": """
from django.urls import path
from shop import views

urlpatterns = [path("pay/<account>", views.pay), path("pay_async/<account>", views.pay_async)]
""",
    "served.py": """
import os
from django.core.asgi import get_asgi_application
from django.core.wsgi import get_wsgi_application
from redlease.integrations.django import client

wsgi, asgi = get_wsgi_application(), get_asgi_application()
client().lock("before the fork").acquire()  # a client that is used before the workers are forked
""",
    "shop/__init__.py": "",
    "shop/management/__init__.py": "",
    "shop/management/commands/__init__.py": "",
}


@pytest.fixture
def django(project: Project) -> Project:
    """A project of Django with the files of the page."""
    project.environment["DJANGO_SETTINGS_MODULE"] = "project"
    project.write("django", TIMEOUT=1)
    for name, text in PROJECT.items():
        (project.directory / name).write_text(text)
    return project


@contextlib.asynccontextmanager
async def serving(project: Project, *options: str) -> AsyncIterator[httpx.AsyncClient]:
    """Serve the project with two workers of gunicorn, which are forked after its import."""
    port = free_port()
    arguments = ("-m", "gunicorn", "--preload", "--workers", "2", "--bind", f"127.0.0.1:{port}", *options)
    async with project.running(*arguments), httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as http:

        async def answers() -> bool:
            with contextlib.suppress(httpx.TransportError):
                return (await http.get("/")).status_code == 404
            return False

        await eventually(answers, within=40)
        yield http


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ["--worker-class", "gthread", "--threads", "4", "served:wsgi"],
        ["-k", "uvicorn_worker.UvicornWorker", "served:asgi"],
    ],
    ids=["wsgi", "asgi"],
)
async def test_views_in_forked_workers(
    django: Project, billing: Billing, observer: Redlease, server: Server, options: list[str]
) -> None:
    """Sync and async views exclude each other; 409 and 503 without a lock; a view that fails frees it."""
    lock = observer.lock("account:ann")
    async with serving(django, *options) as http:
        first = asyncio.create_task(http.get("/pay/ann"))
        begun = await billing.begun()
        refused = await http.get("/pay_async/ann")
        assert (refused.status_code, refused.json()["title"]) == (409, "AcquireTimeout")
        waiting = asyncio.create_task(http.get("/pay_async/ann"))
        await until_waiting(lock, 1)
        await billing.end("ann", "fail")
        assert (await first).status_code == 500
        later = await billing.begun()
        assert later.fence > begun.fence
        await billing.end("ann")
        assert (await waiting).json() == {"fence": later.fence}

        killed = asyncio.create_task(http.get("/pay/ann"))
        os.kill((await billing.begun()).pid, signal.SIGKILL)
        with pytest.raises(httpx.TransportError):
            await killed
        assert await lock.locked()  # until its lease ends
        await lock.release_all()
        server.pause()
        for answer in [await http.get("/pay/ann"), await http.get("/pay_async/ann")]:
            assert (answer.status_code, answer.json()["title"]) == (503, "Unavailable")
        server.resume()


def run(project: Project, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command of Django, or a program with the project's settings."""
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=project.directory, env=project.environment, capture_output=True, text=True, timeout=40, check=False
    )


COMMAND = ("-m", "django", "charge_all")


@pytest.mark.slow
async def test_one_command_at_a_time(django: Project, billing: Billing, observer: Redlease, server: Server) -> None:
    """The second ends with 75, one whose lease was lost with 74, and 69 is for a Redis that is away."""
    async with django.running(*COMMAND) as first:
        begun = await billing.begun()
        second = await asyncio.to_thread(run, django, *COMMAND)
        assert second.returncode == 75, second.stderr
        assert "Traceback" not in second.stderr
        await billing.end("ann")
        assert (await billing.begun()).fence == begun.fence
        await observer.lock("charge-all").release_all()
        await billing.end("bob")
        assert await first.wait() == 74
    assert "charged bob" in django.log
    server.kill()
    assert (await asyncio.to_thread(run, django, *COMMAND)).returncode == 69


SETTINGS = """
import asyncio, sys
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from redlease.integrations.django import async_client, client

settings.configure()


async def made():
    return async_client()


async def hold():
    assert async_client() is async_client()
    async with async_client().lock("ann").hold(timeout=5) as hold:
        return hold.fence


for wrong in ({}, {"default": {"LEASE": 30}}, {"default": {"URL": "redis://localhost", "LAESE": 30}}):
    settings.REDLEASE = wrong
    for make in (client, lambda: asyncio.run(made())):
        try:
            make()
        except ImproperlyConfigured as error:
            print(error)

settings.REDLEASE = {"default": {"URL": sys.argv[1]}, "other": {"URL": sys.argv[1], "PREFIX": "other"}}
assert client() is client() and client() is not client("other")
with client().lock("bob"), client("other").lock("bob"):
    fences = [asyncio.run(hold()) for _ in range(3)]
print(fences == sorted(set(fences)))
"""


@pytest.mark.slow
def test_clients_from_the_settings(project: Project) -> None:
    """Wrong settings are told; each event loop has a client of its own, which is closed as the loop ends."""
    done = run(project, "-X", "dev", "-W", "error", "-c", SETTINGS, project.url)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    *errors, last = done.stdout.splitlines()
    assert len(errors) == 6
    assert "set REDLEASE = {'default': {'URL'" in errors[0]
    assert all("needs a URL" in error for error in errors[2:])
    assert last == "True"
