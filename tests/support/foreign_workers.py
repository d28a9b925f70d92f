"""Workers in Go, Java and TypeScript that call the lock service, each built once from the same source.

Run as a program, this file builds them and says how each is run. It needs nothing but the standard library.
"""

from __future__ import annotations

import functools
import hashlib
import shlex
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import golang
import maven
import node
from caches import cached

if TYPE_CHECKING:
    from collections.abc import Callable

LANGUAGES = Path(__file__).parents[2] / "adapters" / "languages"


def _go(source: Path) -> list[str]:
    def make(directory: Path) -> None:
        golang.build(["build", "-o", str(directory / "worker"), "./worker"], directory, {}, source=source)

    return [str(_built("go", source, make) / "worker")]


def _java(source: Path) -> list[str]:
    pom = source / "pom.xml"

    def fetch(directory: Path) -> None:
        maven.fetch(
            "Temporal's SDK for Java",
            *(f"--file={pom}", "dependency:copy-dependencies"),
            *(f"-DoutputDirectory={directory}", "-DincludeScope=runtime"),
        )

    def make(directory: Path) -> None:
        sources = [str(path) for path in sorted(source.rglob("*.java"))]
        options = ["--release", "11", "-Xlint:all", "-cp", f"{libraries}/*", "-d", str(directory)]
        node.run(["javac", *options, *sources], directory)

    maven.require("the worker in Java", "javac")
    libraries = cached(f"java-libraries-{_digest([pom])}", fetch)
    # A JVM that compiles less starts sooner.
    words = ["-Xmx256m", "-XX:TieredStopAtLevel=1", "-cp", f"{_built('java', source, make)}:{libraries}/*"]
    return ["java", *words, "worker.Worker"]


def _typescript(source: Path) -> list[str]:
    def make(directory: Path) -> None:
        shutil.copytree(source, directory, dirs_exist_ok=True, ignore=shutil.ignore_patterns("node_modules", "dist"))
        (directory / "node_modules").symlink_to(node.modules(source))
        node.compile_typescript(directory)

    return [str(node.find_node()), str(_built("typescript", source, make) / "dist" / "worker" / "worker.js")]


_COMMANDS: dict[str, Callable[[Path], list[str]]] = {"go": _go, "java": _java, "typescript": _typescript}


@functools.cache
def command(language: str) -> list[str]:
    """Return how the worker of a language is run; its address, namespace and task queue are to follow.

    Raises:
        RuntimeError: Something could not be fetched or built.
    """
    return _COMMANDS[language](LANGUAGES / language)


def _built(language: str, source: Path, make: Callable[[Path], None]) -> Path:
    files = [path for path in source.rglob("*") if path.is_file() and not {"node_modules", "dist"} & {*path.parts}]
    return cached(f"{language}-caller-{_digest(sorted(files))}", make)


def _digest(files: list[Path]) -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:12]


if __name__ == "__main__":
    for each in _COMMANDS:
        print(shlex.join(command(each)))  # noqa: T201
