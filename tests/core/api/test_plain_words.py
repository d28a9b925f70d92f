"""What a tired engineer does wrong is told in one clear sentence that says what to do, and shows no password."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import redis

from redlease import Redlease, RedleaseError
from redlease._core.protocol.arguments import AcquireRequest, Terms
from redlease._core.protocol.encoding import Resource
from redlease.testing import fake_client

from ports import free_port
from servers import Server

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import OwnServer, Servers


async def why_not(url: str, **options: Any) -> str:
    """Return the message with which a client cannot be entered; none of its punctuation may stand doubled."""
    with pytest.raises(RedleaseError) as caught:
        async with Redlease.from_url(url, **options):
            pytest.fail("that should have been refused")
    said = str(caught.value)
    assert not re.search(r"[.:;,!?] ?[.:;,!?](?!\d)", said.replace("...", "").replace("://", "")), said
    return said


# The client


@pytest.mark.parametrize("given", ["redis://user:secret@host", redis.Redis.from_url("redis://user:secret@host"), None])
def test_what_is_no_client_is_not_shown(given: Any) -> None:
    """A URL, or a blocking client, given for a client of redis.asyncio: the password in it is not repeated."""
    with pytest.raises(ValueError, match=r"redis\.asyncio") as caught:
        Redlease(given)
    assert "secret" not in str(caught.value)
    assert ("from_url" in str(caught.value)) == isinstance(given, str)


@pytest.mark.parametrize("prefix", [":app", "!app"])
def test_a_prefix_that_would_break_messages(prefix: str) -> None:
    """A channel that begins with a colon, and a place that begins with an exclamation mark, mean something else."""
    with pytest.raises(ValueError, match="prefix"):
        Redlease.from_url("redis://host", prefix=prefix)


def test_fake_client_without_fakeredis(monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra to install is named."""
    monkeypatch.setitem(sys.modules, "fakeredis", None)
    with pytest.raises(ModuleNotFoundError, match=re.escape("pip install 'redlease[testing]'")):
        fake_client()


# Rights


@pytest.mark.parametrize("missing", ["subscribe", "script", "evalsha", "select"])
async def test_every_missing_right_comes_with_advice(
    own_server: OwnServer, real_engine: str, prefix: str, missing: str
) -> None:
    """Whatever right it is that is missing, the same command grants all of them, for a database other than 0 too."""
    server = own_server(real_engine)
    url = f"redis://limited:pw@127.0.0.1:{server.port}/3"
    server.cli("ACL", "SETUSER", "limited", "reset", "on", ">pw", "~*", "&*", "+@all", f"-{missing}")
    (advice,) = re.findall(r"ACL SETUSER <user> ([^()]*?)(?: \(|$)", await why_not(url, prefix=prefix))
    server.cli("ACL", "SETUSER", "limited", "reset", "on", ">pw", "resetchannels", *advice.split())
    async with Redlease.from_url(url, prefix=prefix) as client, client.lock("r"):
        pass


async def test_a_missing_channel_comes_with_advice(own_server: OwnServer, prefix: str) -> None:
    """The channels of the prefix are part of it."""
    server = own_server("valkey9")
    server.cli("ACL", "SETUSER", "limited", "reset", "on", ">pw", "~*", "resetchannels", "+@all")
    said = await why_not(server.url.replace("//", "//limited:pw@"), prefix=prefix)
    assert f"&{prefix}:*" in said


# Passwords, TLS, and servers of another kind


async def test_messages_of_the_server_end_once(own_server: OwnServer, real_engine: str) -> None:
    """What the server says ends with a full stop of its own, or with none."""
    server = own_server(real_engine, "--requirepass", "secret")
    assert "wants a user name and password" in await why_not(server.url)
    assert "password" in await why_not(server.url.replace("//", "//:wrong@"))


async def test_a_database_that_is_not_there(servers: Servers, real_engine: str) -> None:
    """The message names what is to be put right in the URL."""
    assert "Put another number at the end of the URL" in await why_not(
        servers.url(real_engine).rsplit("/", 1)[0] + "/99"
    )


async def test_a_hold_in_place_of_its_permit(client: Redlease) -> None:
    """The message says which of the hold's names was meant."""
    async with client.lock("r").hold() as hold:
        with pytest.raises(ValueError, match=r"`hold\.release\(\)` gives it back"):
            await client.lock("r").release(hold)  # type: ignore[arg-type]


@pytest.mark.slow
async def test_nobody_listens() -> None:
    """The error of the network is quoted without its full stop."""
    assert "Connect call failed" in await why_not(f"redis://127.0.0.1:{free_port()}")


def certified(directory: Path, name: str) -> Path:
    """Write a certificate of its own authority for that name, and its key."""
    openssl = shutil.which("openssl")
    assert openssl is not None, "the openssl command is missing"
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", f"{directory}/key.pem"]
    whose = ["-subj", f"/CN={name}", "-addext", f"subjectAltName=DNS:{name}", "-out", f"{directory}/cert.pem"]
    subprocess.run([openssl, "req", "-x509", "-days", "2", *key, *whose], check=True, capture_output=True)
    return directory / "cert.pem"


@pytest.fixture
def secured(own_server: OwnServer, tmp_path: Path) -> tuple[str, str, Server]:
    """A server with TLS under another name than the one it is reached by: its URL, its authority, and itself."""
    cert, port = certified(tmp_path, "elsewhere.example"), free_port()
    server = own_server(
        *("redis7", "--tls-port", str(port), "--tls-cert-file", str(cert), "--tls-key-file", f"{tmp_path}/key.pem"),
        *("--tls-ca-cert-file", str(cert), "--tls-auth-clients", "no"),
    )
    return f"rediss://127.0.0.1:{port}", str(cert), server


@pytest.mark.slow
async def test_a_certificate_for_another_name(secured: tuple[str, str, Server]) -> None:
    """It is the name that is wrong, not the authority; where it is the authority, that is said."""
    url, authority, _ = secured
    said = await why_not(url, ssl_ca_certs=authority, ssl_check_hostname=True)
    assert "another name" in said
    assert "ssl_ca_certs" not in said
    assert "ssl_ca_certs" in await why_not(url)


@pytest.mark.slow
async def test_tls_and_none(secured: tuple[str, str, Server], monkeypatch: pytest.MonkeyPatch) -> None:
    """A `rediss://` URL of a port without TLS, and a `redis://` URL of one with it, are told apart from an outage."""
    monkeypatch.setattr("redlease._core.client.LIMIT_MS", 1500.0)
    url, _, server = secured
    assert "`redis://`" in await why_not(server.url.replace("redis://", "rediss://"))
    assert "`rediss://`" in await why_not(url.replace("rediss://", "redis://"))


async def test_sentinels_and_none(own_server: OwnServer, servers: Servers, real_engine: str) -> None:
    """A Sentinel URL of a plain server, and a plain URL of a Sentinel, say which one is right."""
    plain = servers[real_engine]
    said = await why_not(f"redis+sentinel://127.0.0.1:{plain.port}/mymaster")
    assert f"127.0.0.1:{plain.port} is no Sentinel" in said
    assert "`redis://`" in said
    with Server(real_engine, sentinel=True) as sentinel:
        assert "redis+sentinel://" in await why_not(f"redis://127.0.0.1:{sentinel.port}")


# What grows


async def test_what_is_remembered_of_adoptions_is_bounded(client: Redlease, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adoptions that were cancelled are remembered for as long as a permit of theirs may live."""
    monkeypatch.setattr(client._session.connection, "limit_ms", 500.0)
    lock = client.lock("r", lease=0.05)

    async def break_off(ticket: str) -> None:
        permit = await lock.acquire(ticket=ticket)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await lock.adopt(permit)
        await lock.release(ticket)

    for number in range(5):
        await break_off(f"t{number}")
    await asyncio.sleep(0.6)
    await break_off("last")
    assert len(client._session.memory.adopting) == 1


async def test_what_was_warned_of_is_bounded(client: Redlease, caplog: pytest.LogCaptureFixture) -> None:
    """A capacity that differs is warned of once a name; the names are not kept for ever."""
    for number in range(1100):
        client._session.memory.declared(_ask(client, f"r{number}"), 2)
        client._session.memory.declared(_ask(client, f"r{number}"), 2)
    assert len(caplog.records) == 1100
    assert len(client._session.memory._warned) <= 1000


def _ask(client: Redlease, name: str) -> Any:
    return AcquireRequest(Resource("p", name), Terms("o"), "t", "r")
