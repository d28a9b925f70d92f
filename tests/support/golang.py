"""Go, by which Temporal's servers are built from their source, as the Go module proxy has it.

It needs nothing but the standard library, so that CI may build them before there is an environment.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

from caches import missing

# What the newer server's go.mod asks for. A Go from 1.21 on fetches a newer one by itself when it needs it.
GO_WANTED = "1.26.8"
GO_FETCHES_ITSELF_FROM = (1, 21)


def build(words: list[str], directory: Path, settings: dict[str, str], *, source: Path = Path("/")) -> None:
    """Run `go` with these words; what it needs to be fetched besides, it keeps in the directory meanwhile.

    Args:
        words: The command, such as `["install", ...]`.
        directory: Where to the program is built.
        settings: Of its environment.
        source: Where it runs; by default outside the project, lest a go.mod around it be minded.

    Raises:
        RuntimeError: There is no Go, or it fails.
    """
    if missing("go"):
        raise RuntimeError("there is no Go to build it with")
    settings = settings | {
        "GOTOOLCHAIN": "auto",
        "GOFLAGS": "-buildvcs=false",
        "GOWORK": "off",
        # It needs no C compiler.
        "CGO_ENABLED": "0",
    }
    with contextlib.ExitStack() as stack:
        go = "go"
        if _version() < GO_FETCHES_ITSELF_FROM:
            go = _newer(directory / "go-modules")
            settings |= {"GOROOT": "", "GOTOOLCHAIN": "local"}
            stack.callback(shutil.rmtree, directory / "go-modules", ignore_errors=True)
        _run([go, words[0], "-ldflags=-s -w", *words[1:]], settings, source)


def _version() -> tuple[int, ...]:
    """Return the version of the Go on PATH."""
    found = re.search(r"go(\d+)\.(\d+)", _run(["go", "version"], {"GOTOOLCHAIN": "local"}))
    return tuple(int(part) for part in found.groups()) if found else ()


def _newer(directory: Path) -> str:
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


def _run(command: list[str], settings: dict[str, str], directory: Path = Path("/")) -> str:
    """Run a command to its end and return what it printed; its failure is told by the last that it said."""
    done = subprocess.run(
        command, cwd=directory, env=os.environ | settings, stdin=subprocess.DEVNULL, capture_output=True, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"`{' '.join(command)}` failed: {done.stderr.decode(errors='replace').strip()[-500:]}")
    return done.stdout.decode()
