"""Secrets stay secret: TLS on both sides with real certificates, and no password in logs, errors or reprs."""

from __future__ import annotations

import logging
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import redlease.sync
from redlease import LeaseLost, Redlease, RedleaseError

from ports import free_port

if TYPE_CHECKING:
    from conftest import OwnServer

SECRET = "s3cr3t-of-the-test"


def openssl(*words: str, cwd: Path) -> None:
    """Run openssl."""
    program = shutil.which("openssl")
    assert program is not None, "the openssl command is missing"
    subprocess.run([program, *words], cwd=cwd, check=True, capture_output=True)


def authority(directory: Path, name: str) -> None:
    """Make an authority, `name.pem`, and a certificate that it signed for localhost, `name-leaf.pem`."""
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl(
        "req",
        "-x509",
        "-days",
        "2",
        *key,
        "-subj",
        f"/CN={name}",
        "-keyout",
        f"{name}.key",
        "-out",
        f"{name}.pem",
        cwd=directory,
    )
    leaf = f"{name}-leaf"
    openssl("req", *key, "-subj", "/CN=localhost", "-keyout", f"{leaf}.key", "-out", f"{leaf}.csr", cwd=directory)
    (directory / "names").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost")
    signed = ("-CA", f"{name}.pem", "-CAkey", f"{name}.key", "-CAcreateserial", "-days", "2", "-extfile", "names")
    openssl("x509", "-req", "-in", f"{leaf}.csr", *signed, "-out", f"{leaf}.pem", cwd=directory)


@pytest.mark.slow
async def test_mutual_tls(own_server: OwnServer, tmp_path: Path) -> None:
    """The server lets in who has a certificate of its authority; without one, or with another's, nobody gets in."""
    for name in ("ours", "theirs"):
        authority(tmp_path, name)
    port = free_port()
    own_server(
        *("redis7", "--tls-port", str(port), "--tls-auth-clients", "yes", "--tls-ca-cert-file", f"{tmp_path}/ours.pem"),
        *("--tls-cert-file", f"{tmp_path}/ours-leaf.pem", "--tls-key-file", f"{tmp_path}/ours-leaf.key"),
    )

    def client(leaf: str | None) -> Redlease:
        own = ("ssl_certfile", "pem"), ("ssl_keyfile", "key")
        paths: dict[str, Any] = {option: f"{tmp_path}/{leaf}.{kind}" for option, kind in own} if leaf else {}
        return Redlease.from_url(
            f"rediss://localhost:{port}/0", ssl_ca_certs=f"{tmp_path}/ours.pem", ssl_check_hostname=True, **paths
        )

    async with client("ours-leaf") as trusted, trusted.lock("r").hold() as hold:
        assert await trusted.lock("r").is_held(hold.permit)
    for leaf in (None, "theirs-leaf"):
        stranger = client(leaf)
        with pytest.raises(RedleaseError), pytest.MonkeyPatch.context() as patch:
            patch.setattr("redlease._core.client.LIMIT_MS", 500.0)
            async with stranger:
                pytest.fail("it has no certificate of that authority")


async def test_no_password_is_shown(own_server: OwnServer, caplog: pytest.LogCaptureFixture) -> None:
    """Not by reprs, errors or logs of any level: of a client that works, loses its server, and gives the wrong one."""
    caplog.set_level(logging.DEBUG)
    server = own_server("valkey9", "--requirepass", SECRET)
    url = server.url.replace("//", f"//:{SECRET}@")
    said: list[object] = []
    async with Redlease.from_url(url, call_timeout=0.3) as client:
        lock = client.lock("r", lease=0.3)
        hold = await lock.hold(on_lost="signal")
        said += [
            client,
            lock,
            hold,
            hold.permit,
            client._session,
            client._session.connection,
            redlease.sync.Redlease.from_url(url),
        ]
        server.kill()
        assert await hold.wait_lost()
        for attempt in (lock.acquire(timeout=0.1), lock.inspect()):
            with pytest.raises(RedleaseError) as caught:
                await attempt
            said.append(caught.value)
        with pytest.raises(LeaseLost) as lost:
            hold.check()
        said.append(lost.value)
    server.start()
    with pytest.raises(RedleaseError) as refused:
        async with Redlease.from_url(server.url.replace("//", f"//nobody:{SECRET}@")):
            pytest.fail("there is no such user")
    said.append(refused.value)
    for wrong in (f"redis://:{SECRET}@host:port", f"redis+sentinel://:{SECRET}@host", f"ftp://:{SECRET}@host"):
        with pytest.raises(ValueError, match=r".") as misread:
            Redlease.from_url(wrong)
        said.append(misread.value)
    assert not [text for text in map(repr, said) if SECRET in text]
    assert not [text for text in map(str, said) if SECRET in text]
    assert SECRET not in caplog.text
