"""`redlease web` as a command: what it needs, what it says, and what it warns of."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys

import httpx
import pytest

from redlease._cli.statuses import Exit

from command_line import COMMAND, run_async
from web_view import TOKEN, served

WITHOUT_THE_EXTRA = """
import sys
sys.modules["{missing}"] = None
sys.argv = ["redlease", "web"]
from redlease._cli import main
main()
"""


# Each runs the command.
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("missing", ["starlette", "uvicorn"])
def test_without_the_extra_it_says_which(missing: str) -> None:
    """One line, with the command that installs it; the other commands need neither."""
    code = WITHOUT_THE_EXTRA.format(missing=missing)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr == (f"redlease: this command needs {missing}. Install it with: pip install 'redlease[web]'\n")


async def told_by(*options: str) -> str:
    """Return what the view says on its standard error stream until it listens."""
    process = await asyncio.create_subprocess_exec(
        *(*COMMAND, "web", "--port", "0", "--json", *options), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert await asyncio.wait_for(process.stdout.readline(), 50)
    process.terminate()
    return (await process.communicate())[1].decode()


@pytest.mark.parametrize("options", [(), ("--json",)])
async def test_a_token_of_the_environment_is_not_printed(
    url: str, prefix: str, options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is printed may be in a log; the page asks for the token."""
    monkeypatch.setenv("REDLEASE_WEB_TOKEN", TOKEN)
    process = await asyncio.create_subprocess_exec(
        *(*COMMAND, "web", "--port", "0", "--allow-changes", "--url", url, "--prefix", prefix, *options),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert process.stdout is not None
    told = await asyncio.wait_for(process.stdout.readline(), 50)
    process.terminate()
    told += (await process.communicate())[0]
    assert TOKEN.encode() not in told
    assert (b'"token": null' if options else b"the page asks for it") in told


async def test_it_ends_at_once_while_a_browser_looks(url: str, prefix: str) -> None:
    """Ctrl-C ends the streams, which would go on for ever, and then the command."""
    async with (
        served("--url", url, "--prefix", prefix) as view,
        httpx.AsyncClient() as http,
        http.stream("GET", f"{view.url}events") as stream,
    ):
        lines = stream.aiter_lines()
        assert await anext(lines) == "event: status"
        view.process.send_signal(signal.SIGINT)
        async with asyncio.timeout(20):
            async for _ in lines:
                pass
            assert await view.process.wait() == 130


async def test_an_address_for_all_is_warned_of(url: str, prefix: str) -> None:
    """Loopback is the default; another address is allowed and told loudly, as is a token that travels in the open."""
    told = await asyncio.gather(
        told_by("--url", url, "--prefix", prefix),
        told_by("--url", url, "--prefix", prefix, "--host", "0.0.0.0", "--allow-changes"),
    )
    assert told[0] == ""
    assert "WARNING: this is not a loopback address" in told[1]
    assert "WARNING: the token travels unencrypted" in told[1]


async def test_what_cannot_be_served_is_told_in_a_line(url: str, prefix: str) -> None:
    """A port that is in use, and a server that is not there."""
    async with served("--url", url, "--prefix", prefix) as view:
        port = view.url.rstrip("/").rpartition(":")[2]
        used, none = await asyncio.gather(
            run_async("web", "--url", url, "--port", port),
            run_async("web", "--url", "redis://localhost:1", "--port", "0"),
        )
    for done in (used, none):
        assert done.stderr.count("\n") == 1, done.stderr
    assert (used.returncode, none.returncode) == (1, Exit.UNAVAILABLE)
    assert "Address already in use" in used.stderr
    assert "could not be reached" in none.stderr
