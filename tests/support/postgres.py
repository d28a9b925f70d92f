"""A PostgreSQL server from the system's package, whose data is gone when it ends."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ports import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

WITHIN = 30.0


@contextlib.contextmanager
def running_postgres() -> Iterator[str]:
    """Start a server, yield its URL, and end it with the block."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    assert found, "there is no PostgreSQL under /usr/lib/postgresql: install it"
    programs = found[-1].parent
    # It refuses to run as root, so there it runs as the user that its package makes.
    user = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"] if os.geteuid() == 0 else []
    directory, port = Path(tempfile.mkdtemp(prefix="redlease-pg-", dir="/tmp")), free_port()
    try:
        if user:
            shutil.chown(directory, "postgres", "postgres")
        making = ["--pgdata", str(directory / "data"), "--username", "redlease", "--auth", "trust", "--no-sync"]
        quiet = subprocess.DEVNULL
        subprocess.run([*user, str(programs / "initdb"), *making], cwd="/", stdout=quiet, check=True)
        options = ["-D", str(directory / "data"), "-p", str(port), "-k", str(directory), "-F"]
        options += ["-c", "listen_addresses=127.0.0.1"]
        server = subprocess.Popen([*user, str(programs / "postgres"), *options], cwd="/", stdout=quiet, stderr=quiet)
        try:
            _wait_until_ready(directory / "data" / "postmaster.pid", server)
            yield f"postgresql://redlease@127.0.0.1:{port}/postgres"
        finally:
            # Killed outright it would leave its shared memory behind.
            server.send_signal(signal.SIGINT)
            server.wait(WITHIN)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _wait_until_ready(status: Path, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + WITHIN
    while not (status.exists() and status.read_text().rstrip().endswith("ready")):
        assert server.poll() is None, "PostgreSQL has ended"
        assert time.monotonic() < deadline, f"PostgreSQL is not ready after {WITHIN:g} s"
        time.sleep(0.02)
