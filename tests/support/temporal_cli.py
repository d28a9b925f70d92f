"""The Temporal CLI, whose development server the adapter's tests run on. Run as a program, this file says where it is.

It needs nothing but the standard library, so that CI may build the CLI before there is an environment.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

import golang
from caches import cache_directory, cached

# Its server is 1.29.1, on which the figures of the adapter were measured.
VERSION = "v1.5.1"
MODULE = "github.com/temporalio/cli"
# The CLI's own version of this, 1.34.1, leaves a statement open when a query is cancelled as its first row comes. From
# then on every query on the server's one connection is interrupted, and the server serves nobody any more.
DRIVER = "modernc.org/sqlite"
DRIVER_VERSION = "v1.51.0"

NAME = f"temporal-{VERSION}-sqlite-{DRIVER_VERSION}"  # in the cache

DOWNLOAD_WITHIN = 60.0


@functools.cache
def find_cli() -> Path:
    """Return the CLI: the one at hand, else fetch it, else build it, which takes minutes."""
    return cli_at_hand() or cached(NAME, _get) / "temporal"


def cli_at_hand() -> Path | None:
    """Return the CLI that is on PATH, else the one that was got before."""
    on_path = shutil.which("temporal")
    place = Path(on_path) if on_path else cache_directory() / NAME / "temporal"
    return place if place.exists() else None


def _get(directory: Path) -> None:
    """Put the CLI into the directory, by whichever way there is here."""
    hindrances = []
    for way in (_download, _build):
        try:
            way(directory)
        except RuntimeError as error:
            hindrances.append(str(error))
        else:
            return
    raise RuntimeError(
        f"There is no Temporal CLI: none on PATH; {'; '.join(hindrances)}. "
        "Put `temporal` on PATH, or install Go and see that its module proxy can be reached."
    )


def _download(directory: Path) -> None:
    """Let the SDK fetch what it starts its own test environments with."""
    if importlib.util.find_spec("temporalio") is None:
        raise RuntimeError("the SDK, which could fetch it, is not installed")
    # The import is here because CI runs this file before the SDK is installed.
    from temporalio.testing import WorkflowEnvironment  # noqa: PLC0415

    async def fetch() -> None:
        async with asyncio.timeout(DOWNLOAD_WITHIN):
            environment = await WorkflowEnvironment.start_local(
                download_dest_dir=str(directory), dev_server_download_version=VERSION
            )
        await environment.shutdown()

    try:
        asyncio.run(fetch())
    except (RuntimeError, TimeoutError) as error:
        raise RuntimeError(f"the SDK could not fetch it ({error or 'it took too long'})") from error
    # The SDK names the file after itself and the version.
    (fetched,) = (path for path in directory.iterdir() if os.access(path, os.X_OK))
    fetched.rename(directory / "temporal")


def _build(directory: Path) -> None:
    """Build it from its source, which the Go module proxy has, with a driver that outlives a cancelled query."""
    needed = f"require (\n\t{MODULE} {VERSION}\n\t{DRIVER} {DRIVER_VERSION}\n)\n"
    with tempfile.TemporaryDirectory() as source:
        (Path(source) / "go.mod").write_text(f"module temporal\n\n{needed}")
        words = ["build", "-mod=mod", "-o", str(directory / "temporal"), f"{MODULE}/cmd/temporal"]
        golang.build(words, directory, {}, source=Path(source))


if __name__ == "__main__":
    print(find_cli())  # noqa: T201
