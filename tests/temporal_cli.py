"""The Temporal CLI, whose development server the adapter's tests run on. Run as a program, this file says where it is.

It needs nothing but the standard library, so that CI may build the CLI before there is an environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.util
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

from caches import cached, missing

# Its server is 1.29.1, on which the figures of the adapter were measured.
VERSION = "v1.5.1"
MODULE = f"github.com/temporalio/cli/cmd/temporal@{VERSION}"

# What the CLI's go.mod asks for. A Go from 1.21 on fetches a newer one by itself when it needs it.
GO_WANTED = "1.25.0"
GO_FETCHES_ITSELF_FROM = (1, 21)

DOWNLOAD_WITHIN = 60.0


@functools.cache
def find_cli() -> Path:
    """Return the CLI: from PATH, else what was got before, else fetch it, else build it, which takes minutes."""
    on_path = shutil.which("temporal")
    return Path(on_path) if on_path else cached(f"temporal-{VERSION}", _get) / "temporal"


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
    """Build it from its source, which the Go module proxy has."""
    if missing("go"):
        raise RuntimeError("there is no Go to build it with")
    settings = {
        "GOBIN": str(directory),
        "GOTOOLCHAIN": "auto",
        # It needs no C compiler.
        "CGO_ENABLED": "0",
    }
    with contextlib.ExitStack() as stack:
        go = "go"
        if _go_version() < GO_FETCHES_ITSELF_FROM:
            go = _newer_go(directory / "go-modules")
            settings |= {"GOROOT": "", "GOTOOLCHAIN": "local"}
            stack.callback(shutil.rmtree, directory / "go-modules", ignore_errors=True)
        _run([go, "install", "-ldflags=-s -w", MODULE], settings)


def _go_version() -> tuple[int, ...]:
    """Return the version of the Go on PATH."""
    found = re.search(r"go(\d+)\.(\d+)", _run(["go", "version"], {"GOTOOLCHAIN": "local"}))
    return tuple(int(part) for part in found.groups()) if found else ()


def _newer_go(directory: Path) -> str:
    """Fetch the wanted Go, which is a module too, with one that is too old to do so by itself, as Debian 12 has it."""
    machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    version = f"v0.0.1-go{GO_WANTED}.{platform.system().lower()}-{machine}"
    _run(
        ["go", "mod", "download", f"golang.org/toolchain@{version}"],
        {"GOMODCACHE": str(directory), "GOFLAGS": "-modcacherw"},
    )
    root = directory / "golang.org" / f"toolchain@{version}"
    # An old Go does not know that the files of this module are programs.
    for program in (*root.glob("bin/*"), *root.glob("pkg/tool/*/*")):
        program.chmod(0o755)
    return str(root / "bin" / "go")


def _run(command: list[str], settings: dict[str, str]) -> str:
    """Run a command to its end and return what it printed; its failure is told by the last that it said."""
    # It runs outside the project, lest a go.mod around it be minded.
    surroundings = os.environ | settings
    done = subprocess.run(
        command, cwd="/", env=surroundings, stdin=subprocess.DEVNULL, capture_output=True, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"`{' '.join(command)}` failed: {done.stderr.decode(errors='replace').strip()[-500:]}")
    return done.stdout.decode()


if __name__ == "__main__":
    print(find_cli())  # noqa: T201
